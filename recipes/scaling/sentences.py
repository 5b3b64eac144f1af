"""A verdict in words: how well a size scales, why no better, and what cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from recipes.scaling.causes import AGAINST_A_REFERENCE, CAUSES, WORTH_NAMING, Cause, milliseconds, sets_the_pace
from recipes.scaling.row import Timing
from recipes.scaling.sizes import NEGATIVE, SUPERLINEAR, UNCLEAR, Size, Verdict, band

_ONLY = "the only size, so there is no speedup: a row with fewer or more processes would show it."
_MOST_REPEATS = 30  # beyond them a quieter machine is the better advice
_NOTABLE_LOAD = 0.5  # cores that other programs keep busy


def words_of(verdict: Verdict, size: Size, smaller: Sequence[Size], only: bool) -> str:
    """The verdict on `size`; `smaller` are those before it, smallest first. `only`: it is alone."""
    text = f"{_processes(size.num_processes)}: {_ONLY if only else 'the reference.'}"
    if verdict.band:
        text = f"{_processes(size.num_processes)}: {_speed_words(verdict, size, smaller)}"
    return text + _cause_words(verdict, size) + _outside_words(size.typical)


# --- How fast ------------------------------------------------------------------------------------


def _speed_words(verdict: Verdict, size: Size, smaller: Sequence[Size]) -> str:
    efficiency, base = size.efficiency.median, smaller[0]
    if verdict.band == UNCLEAR:
        return (
            f"unclear. An epoch got {smaller[0].epoch_time.median / size.epoch_time.median:.3g} times as short, as if "
            f"{size.num_processes} processes shared the same samples, but the rows say weak scaling. Add a column "
            "samples, or write strong in the column scaling."
        )
    text = f"{size.speedup.median:.2f} times as fast as {base.num_processes}, {efficiency:.1%} efficiency: "
    text += f"{verdict.band}{_spread_words(size, smaller)}."
    faster = next((other for other in smaller if other.num_processes == verdict.slower_than), None)
    if faster and faster is not base:
        times = size.speedup.median / faster.speedup.median
        text += f" It is {times:.2f} times as fast as {faster.num_processes} processes."
    if efficiency > SUPERLINEAR:
        text += " Superlinear: something else slowed the reference, or a process's share fits into a cache."
    return text


def _spread_words(size: Size, smaller: Sequence[Size]) -> str:
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


def _cause_words(verdict: Verdict, size: Size) -> str:
    step, found = size.typical.step_time, verdict.named
    text = ""
    if verdict.undecided:
        text = _UNDECIDED[verdict.undecided](verdict, size)
    elif found:
        text = f" {_lead(found[0], size.typical, verdict.lost)}: {found[0].evidence}."
        if verdict.lost is None and size.num_processes > 1:
            text += f" {_second_row_words(size)}"
        load = _load_words(size.typical)
        if load and size.repeats == 1:
            text += f" {load}One timing does not show what that changes: repeat it (`recipes scale run --repeats 3`)."
    elif step is None and verdict.band not in ("", "excellent"):
        text = " Epoch times alone do not say why: measure the parts of a step with `recipes scale run`."
    unexplained = verdict.unexplained or 0.0
    if verdict.band and step and not verdict.undecided and unexplained > WORTH_NAMING * step:
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


def _noise_words(verdict: Verdict, size: Size) -> str:
    covered = max((one for one in verdict.causes if not one.clear), key=lambda cause: cause.seconds)
    step, off = size.typical.step_time or 0.0, covered.uncertain or 0.0
    beside = ", with those of one process beside them," if covered.key in AGAINST_A_REFERENCE else ""
    text = f" Too noisy to name a cause: {CAUSES[covered.key]} seems to take {covered.share:.0%} of a step, and the "
    text += f"repeats{beside} leave {off / step:.0%} open.{_differ_words(size)} {_load_words(size.typical)}"
    more = ceil(1.2 * size.repeats * (off / covered.seconds) ** 2)
    repeats = f", or with more repeats (`recipes scale run --repeats {more}`)" if more <= _MOST_REPEATS else ""
    return f"{text}Measure on a quiet machine{repeats}."


def _differ_words(size: Size) -> str:
    return f" Those of this size differ by {size.differ:.0%}." if size.differ else ""


def _load_words(row: Timing) -> str:
    if row.other_load is None or row.other_load < _NOTABLE_LOAD:
        return ""
    return f"Other programs kept {row.other_load:.1f} cores busy meanwhile. "


def _bound_words(verdict: Verdict, size: Size) -> str:
    bound = verdict.bound
    assert bound
    text = f" {_engine(size)} has no step without communication, so no cause is named. Communication, contention and "
    text += f"waits for slower processes take at most {milliseconds(bound.seconds)} of a "
    return text + f"{milliseconds(size.typical.step_time or 0.0)} step together ({bound.share:.0%}): {bound.evidence}."


def _engine(size: Size) -> str:
    kind = size.typical.setup.engine
    return {"deepspeed": "ZeRO", "fsdp": "FSDP"}.get(kind, kind)


def _hidden_words(verdict: Verdict, size: Size) -> str:
    text = f" {_engine(size)} has no step without communication, so what that takes cannot be told. One process with "
    text += "the same share of the batch bounds it: "
    return f"{text}`recipes scale run --scaling weak --num_processes 1 {size.num_processes}`."


def _no_reference_words(verdict: Verdict, size: Size) -> str:
    return f" Nothing that was measured takes a tenth of a step. {_second_row_words(size)}"


def _second_row_words(size: Size) -> str:
    return (
        "Contention, too little work per step and the whole lost time show only beside one process: "
        f"`recipes scale run --num_processes 1 {size.num_processes}`."
    )


_UNDECIDED = {
    "noise": _noise_words,
    "bound": _bound_words,
    "hidden": _hidden_words,
    "no reference": _no_reference_words,
}


def _outside_words(row: Timing) -> str:
    """The time of a row outside its steps, if it is worth naming."""
    if not row.step_time or not row.samples or not row.batch.total:
        return ""
    outside = row.epoch_time - row.step_time * row.samples / row.batch.total
    if outside < WORTH_NAMING * row.epoch_time:
        return ""
    whole = milliseconds(row.epoch_time)
    stretch = f"the {whole} of {row.timed}" if row.timed else f"a {whole} epoch"
    return f" {milliseconds(outside)} of {stretch} lie outside its steps."


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"
