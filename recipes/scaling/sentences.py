"""The findings in words: how well a world size scales, where it loses time, and what is unknown."""

from math import ceil

from recipes.errors import plural
from recipes.scaling.analyse import Series, Size
from recipes.scaling.causes import (
    AGAINST_A_REFERENCE,
    CAUSES,
    HIDDEN,
    WORTH_NAMING,
    Cause,
    milliseconds,
    sets_the_pace,
)

_FAR = 10  # a limit beyond this many times the largest measured size would be a guess


def of(series: Series) -> list[str]:
    """Return all sentences about a series, in the order in which to read them."""
    found = []
    for size in series.sizes:
        others = [f"Also {CAUSES[cause.key]}: {cause.evidence}." for cause in size.losses.named[1:]]
        found += [verdict(size, series), *others]
    return list(filter(None, [*found, law(series)]))


def verdict(size: Size, series: Series) -> str:
    """Describe a size's speed, its main cause of lost time, and measurements that are missing."""
    speedup, efficiency = size.speedup.median, size.efficiency
    text = "the reference."
    if size.band:
        sure = "one timing" if size.repeats == 1 else f"quartiles {efficiency.low:.1%} and {efficiency.high:.1%}"
        text = f"{speedup:.2f} times as fast as {plural(series.sizes[0].num_processes, 'process')}, "
        text += f"{efficiency.median:.1%} efficiency: {size.band} ({sure})."
    elif len(series.sizes) == 1:
        text = "the only world size, so there is no speedup: add a row with fewer or more processes."
    return f"{plural(size.num_processes, 'process')}: {text}{_cause(size)}"


# --- Why -----------------------------------------------------------------------------------------


def _cause(size: Size) -> str:
    losses, row, text = size.losses, size.typical, ""
    if losses.undecided:
        text = f" {_undecided(size)}"
    elif losses.named:
        main = losses.named[0]
        text = f" {_lead(main, size)}: {main.evidence}."
        if losses.lost is None and size.num_processes > 1:
            text += f" {_beside_one(size)}"
    elif row.step_time is None and size.band not in ("", "excellent"):
        text = " Epoch times alone do not show the cause: measure the parts of a step with `recipes scale run`."
    unexplained, step = losses.unexplained or 0.0, row.step_time or 0.0
    if size.band and not losses.undecided and unexplained > WORTH_NAMING * step:
        text += f" {milliseconds(unexplained)} per step are unexplained."
    return text


def _lead(cause: Cause, size: Size) -> str:
    """Introduce the main cause. Write "most" only if the cause takes half of the lost time."""
    lost, named = size.losses.lost, CAUSES[cause.key]
    if sets_the_pace(cause, size.typical):
        return "Data loading sets the pace"
    if cause.key == HIDDEN:
        named += f", which cannot be told apart and take at most {milliseconds(cause.seconds)} of a "
        named += f"{milliseconds(cause.step)} step ({cause.share:.0%})"
    if lost is None:
        return f"Of what was measured, the largest loss of time is {named}"
    if cause.seconds >= lost / 2:
        return f"Most of the lost time goes to {named}"
    return f"The largest measured loss of time is {named}"


def _undecided(size: Size) -> str:
    """Return the reason why no cause is named, and the measurement that would show a cause."""
    if size.losses.undecided == "too noisy":
        return _too_noisy(size)
    if size.losses.undecided == "no reference":
        return f"No measured wait takes a tenth of a step. {_beside_one(size)}"
    engine = {"deepspeed": "ZeRO", "fsdp": "FSDP"}.get(size.typical.engine, "This training")
    text = f"{engine} has no step without communication, so the time of communication is unknown. "
    command = f"`recipes scale run --scaling weak --num_processes 1 {size.num_processes}`"
    return f"{text}For an upper bound, measure one process with the same share of the batch: {command}."


def _too_noisy(size: Size) -> str:
    covered = max((one for one in size.losses.causes if not one.clear), key=lambda cause: cause.seconds)
    off = covered.uncertain
    beside = ", together with those of one process," if covered.key in AGAINST_A_REFERENCE else ""
    text = f"Too noisy to name a cause: {CAUSES[covered.key]} may take {covered.share:.0%} of a step, but the "
    text += f"repeats{beside} leave an uncertainty of {off / covered.step:.0%}."
    more = ceil(1.2 * size.repeats * (off / covered.seconds) ** 2)
    return f"{text} Measure on a quiet machine; on this one, `recipes scale run --repeats {more}` may suffice."


def _beside_one(size: Size) -> str:
    return (
        "Only a comparison with one process shows contention, too little work per step and the total lost time: "
        f"`recipes scale run --num_processes 1 {size.num_processes}`."
    )


# --- Over all sizes ------------------------------------------------------------------------------


def law(series: Series) -> str:
    """Name the best world size if a size is slower than a smaller one. Otherwise give the serial
    fraction, or the reason why there is none; "" for weak scaling: Amdahl's law does not apply.
    """
    sizes, serial, best = series.sizes, series.serial_fraction, series.best
    first, last = sizes[0].num_processes, sizes[-1].num_processes
    if any(size.slower_than for size in sizes):
        than = "" if best is sizes[0] else f", {best.speedup.median:.2f} times as fast as {first}"
        return f"Of the measured world sizes, {best.num_processes} is the best{than}."
    if series.scaling == "weak":
        return ""
    if len(sizes) < 3 or not series.fixed:
        return "No serial fraction: Amdahl's law needs three world sizes with the same work."
    if serial is None:
        return "No serial fraction: the serial part of the time varies with the world size, which breaks Amdahl's law."
    words = f"Serial fraction {serial:.1%} (Amdahl's law, {len(sizes)} world sizes)"
    if serial * _FAR * last < first:
        return f"{words}: too small to derive a limit from world sizes up to {last}."
    return (
        f"{words}: that part of the time on {plural(first, 'process')} does not shrink, so no number of processes can "
        f"be more than {1 / serial:.3g} times as fast."
    )
