"""The findings in words: how well a size scales, why no better, and what cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from recipes.errors import plural
from recipes.scaling.analyse import NEGATIVE, SUPERLINEAR, Series, Size, band
from recipes.scaling.causes import AGAINST_A_REFERENCE, CAUSES, WORTH_NAMING, Cause, milliseconds, sets_the_pace
from recipes.scaling.timings import Timing

_MOST_REPEATS = 30  # beyond them a quieter machine is the better advice
_FAR = 10  # times the measured sizes: a limit further away would be a guess


def verdict(size: Size, series: Series) -> str:
    """How fast a size is, what it loses most, and what was not measured."""
    text = "the reference."
    if size.band:
        text = _speed(size, [other for other in series.sizes if other.num_processes < size.num_processes])
    elif len(series.sizes) == 1:
        text = "the only size, so there is no speedup: a row with fewer or more processes would show it."
    return f"{plural(size.num_processes, 'process')}: {text}{_cause(size)}"


def also(size: Size) -> list[str]:
    """The causes besides the main one that are worth naming."""
    return [f"Also {CAUSES[cause.key]}: {cause.evidence}." for cause in size.losses.named[1:]]


# --- How fast ------------------------------------------------------------------------------------


def _speed(size: Size, smaller: Sequence[Size]) -> str:
    efficiency, base = size.efficiency.median, smaller[0]
    text = f"{size.speedup.median:.2f} times as fast as {base.num_processes}, {efficiency:.1%} efficiency: "
    text += f"{size.band}{_spread(size, smaller)}."
    faster = next((other for other in smaller if other.num_processes == size.slower_than), None)
    if faster and faster is not base:
        times = size.speedup.median / faster.speedup.median
        text += f" It is {times:.2f} times as fast as {faster.num_processes} processes."
    if efficiency > SUPERLINEAR:
        text += " Superlinear: something else slowed the reference, a process's share fits into a cache, or rows "
        text += "without samples share an epoch and say weak scaling."
    return text


def _spread(size: Size, smaller: Sequence[Size]) -> str:
    """How certain an efficiency is."""
    if size.repeats == 1:
        return " (one timing)"
    fastest = max(other.speedup.median for other in smaller)
    low, high = (
        NEGATIVE if speedup < fastest else band(share)
        for speedup, share in ((size.speedup.low, size.efficiency.low), (size.speedup.high, size.efficiency.high))
    )
    text = f" (quartiles {size.efficiency.low:.1%} and {size.efficiency.high:.1%}"
    if low == high:
        return f"{text})"
    return f"{text}, between {low} and {high}: only more repeats or a quiet machine can tell)"


# --- Why -----------------------------------------------------------------------------------------


def _cause(size: Size) -> str:
    losses, row, text = size.losses, size.typical, ""
    if losses.undecided:
        text = f" {_undecided(size)}"
    elif losses.named:
        main = losses.named[0]
        text = f" {_lead(main, row, losses.lost)}: {main.evidence}."
        if losses.lost is None and size.num_processes > 1:
            text += f" {_beside_one(size)}"
    elif row.step_time is None and size.band not in ("", "excellent"):
        text = " Epoch times alone do not say why: measure the parts of a step with `recipes scale run`."
    unexplained, step = losses.unexplained or 0.0, row.step_time or 0.0
    if size.band and not losses.undecided and unexplained > WORTH_NAMING * step:
        text += f" {milliseconds(unexplained)} per step are unexplained."
    return text


def _lead(cause: Cause, row: Timing, lost: float | None) -> str:
    """How the main cause is introduced: "most" only if it is at least half of the lost time."""
    if sets_the_pace(cause, row):
        return "Data loading sets the pace"
    if lost is None:
        return f"Of what was measured, the largest loss is {CAUSES[cause.key]}"
    if cause.seconds >= lost / 2:
        return f"Most of the lost time goes to {CAUSES[cause.key]}"
    return f"The largest measured loss is {CAUSES[cause.key]}"


def _undecided(size: Size) -> str:
    """Why no cause is named, and what would show one."""
    bound, step = size.losses.bound, size.typical.step_time or 0.0
    if size.losses.undecided == "noise":
        return _too_noisy(size, step)
    if size.losses.undecided == "no reference":
        return f"Nothing that was measured takes a tenth of a step. {_beside_one(size)}"
    engine = {"deepspeed": "ZeRO", "fsdp": "FSDP"}.get(size.typical.engine, size.typical.engine)
    if not bound:
        text = f"{engine} has no step without communication, so what that takes cannot be told. One process with the "
        text += "same share of the batch bounds it: "
        return f"{text}`recipes scale run --scaling weak --num_processes 1 {size.num_processes}`."
    text = f"{engine} has no step without communication, so no cause is named. Communication, contention and waits for "
    text += f"slower processes take at most {milliseconds(bound.seconds)} of a {milliseconds(step)} step together "
    return f"{text}({bound.share:.0%}): {bound.evidence}."


def _too_noisy(size: Size, step: float) -> str:
    covered = max((one for one in size.losses.causes if not one.clear), key=lambda cause: cause.seconds)
    off = covered.uncertain
    beside = ", with those of one process beside them," if covered.key in AGAINST_A_REFERENCE else ""
    text = f"Too noisy to name a cause: {CAUSES[covered.key]} seems to take {covered.share:.0%} of a step, and the "
    text += f"repeats{beside} leave {off / step:.0%} open."
    more = ceil(1.2 * size.repeats * (off / covered.seconds) ** 2)
    repeats = f", or with more repeats (`recipes scale run --repeats {more}`)" if more <= _MOST_REPEATS else ""
    return f"{text} Measure on a quiet machine{repeats}."


def _beside_one(size: Size) -> str:
    return (
        "Contention, too little work per step and the whole lost time show only beside one process: "
        f"`recipes scale run --num_processes 1 {size.num_processes}`."
    )


# --- The law over all sizes ----------------------------------------------------------------------


def law(series: Series) -> str:
    """Amdahl's serial fraction and what follows from it, or why there is none."""
    sizes, serial = series.sizes, series.serial_fraction
    first, last = sizes[0].num_processes, sizes[-1].num_processes
    text = "No serial fraction: Amdahl's law "
    if not series.fixed:
        differ = "these sizes differ in samples" if series.scaling == "strong" else "this is weak scaling"
        return f"{text}describes a fixed amount of work, and {differ}."
    if not series.karp_flatt:
        return f"{text}needs at least three world sizes, and there are {len(sizes)}."
    if any(size.slower_than for size in sizes):
        best = f"{series.best.num_processes} is the best, {series.best.speedup.median:.2f} times as fast as {first}"
        return f"{text}does not describe these sizes, since more processes are slower. Of the measured sizes {best}."
    if serial is None:
        low, high = series.karp_flatt[0], series.karp_flatt[-1]
        text += f"does not describe these sizes. The fraction of Karp and Flatt goes from {low:.1%} at "
        text += f"{sizes[1].num_processes} to {high:.1%} at {last} processes: "
        return text + ("overhead grows with the processes." if high > low else "it is not level.")
    if serial == 0:
        return f"No serial fraction is visible in {len(sizes)} world sizes (Amdahl's law)."
    words = f"Serial fraction {serial:.1%} (Amdahl's law, {len(sizes)} world sizes)"
    if 1 / serial > _FAR * last / first:
        return f"{words}: too small for a limit to follow from sizes up to {last}."
    return (
        f"{words}: that part of the time on {plural(first, 'process')} does not shrink, so no number of processes can "
        f"be more than {1 / serial:.3g} times as fast."
    )
