"""Where the time of a step is lost, in numbers.

Lost time is counted against a measured reference: the time of one process with all the work,
divided by the number of processes. Each cause adds the difference of two measured times to a step,
so the causes can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import log, prod
from statistics import median

from recipes.scaling.noise import together, uncertain
from recipes.scaling.row import Slowest, Timing

# A cause is named from this share of a step on: a smaller gain is hard to tell from noise.
WORTH_NAMING = 0.10
# Micro-batches that each worker loads ahead: torch's default prefetch_factor.
HELD_AHEAD = 2
CAUSES = {
    "communication": "communication",
    "contention": "contention",
    "data": "data loading",
    "work": "too little work per step",
    "straggler": "stragglers",
    "logging": "logging",
    "saving": "checkpoints and evaluations",
}
AGAINST_A_REFERENCE = ("contention", "work")  # one process alone
# Data workers prefetch during these. Logging and saving are rare, and outlast the prefetch queue.
_OF_EVERY_STEP = ("communication", "contention", "work", "straggler")


@dataclass(frozen=True)
class Cause:
    """Time that a step loses to one of `CAUSES`, in seconds and as a share of the step.

    `saves`: seconds of a step that are saved if this cause alone is mended. Causes that multiply
    each other save more than their part of the loss. `uncertain`: by how many seconds the repeats
    leave it open; None for a single row.
    """

    key: str
    seconds: float
    share: float
    evidence: str
    saves: float
    uncertain: float | None = None

    @property
    def clear(self) -> bool:
        """Whether the loss is larger than what repeats of it differ by."""
        return self.seconds > (self.uncertain or 0.0)


def causes_of(
    row: Timing, same: Iterable[Timing], repeats: Sequence[Timing] = ()
) -> tuple[list[Cause], float | None, float | None]:
    """The causes of a step's lost time, all its lost time, and how much of that is unexplained.

    The causes are in the order of `Verdict`. `row` holds medians over `repeats`; `same` are all
    rows of its training and recipe. A cause whose reference was not measured is left out. Lost time
    is None without a reference.
    """
    step = row.step_time
    if not step:
        return [], None, None
    same, micro = list(same), row.batch.micro
    whole, share = _alone(same, row.batch.total, micro), _alone(same, _share(row), micro)
    ideal = whole / row.num_processes if whole else share

    waits = [*_waits(row, step)]
    slowdowns = _slowdowns(row, step, whole, share)
    if ideal:
        slowdowns = _limited(slowdowns, step - ideal - sum(cause.seconds for cause in waits), step)
    found = [_with_noise(_with_rank(cause, repeats), row, repeats, same) for cause in [*waits, *slowdowns]]
    paced = any(sets_the_pace(cause, row) for cause in found)
    causes = [cause for cause in found if cause.seconds > 0]
    causes.sort(key=lambda cause: (paced and cause.key in _OF_EVERY_STEP, -cause.seconds))
    if not ideal:
        return causes, None, None
    lost = max(0.0, step - ideal)
    return causes, lost, max(0.0, lost - sum(cause.seconds for cause in found))


def _cause(key: str, seconds: float, step: float, evidence: str, saves: float | None = None) -> Cause:
    return Cause(key, seconds, seconds / step, evidence, seconds if saves is None else saves)


# --- What was measured in the step itself --------------------------------------------------------


def _waits(row: Timing, step: float) -> Iterator[Cause]:
    words = {
        "data": "are spent waiting for data",
        "communication": f"are spent waiting for gradients{_exchange_words(row)}",
        "logging": "are spent on logging",
        "saving": "are spent on checkpoints and evaluations",
    }
    for key, seconds in _seconds_waited(row).items():
        if seconds is not None:
            of_step = f"{milliseconds(seconds)} of a {milliseconds(step)} step ({seconds / step:.0%})"
            yield _cause(key, seconds, step, f"{of_step} {words[key]}")


def _seconds_waited(row: Timing) -> dict[str, float | None]:
    parts = row.parts
    return {
        "data": parts.data_wait if row.data_wait_max is None else row.data_wait_max,
        "communication": parts.communication,
        "logging": parts.logging,
        "saving": parts.saving,
    }


def _exchange_words(row: Timing) -> str:
    exchange, link, text = row.exchange, row.link, ""
    if exchange and link and exchange.bytes and link.bandwidth:
        seconds = wire_time(exchange.bytes, link.bandwidth, row.num_processes)
        text += f"; {megabytes(exchange.bytes)} per step over a link of {megabytes(link.bandwidth)}/s "
        text += f"take {milliseconds(seconds)}"
    if exchange and exchange.syncs and exchange.syncs > 1:
        text += f"; {exchange.syncs:.0f} exchanges per step where one is enough"
    return text


def sets_the_pace(cause: Cause, row: Timing) -> bool:
    """Whether the cause is data loading, and a step takes as long as loading does.

    Workers load while a process computes and communicates, so the process waits only if loading
    takes longer than all of that together. A step that gets faster elsewhere then waits longer for
    data. Without workers the times add up, and so they do if the workers have filled their queues
    before what comes once a step is over.
    """
    if cause.key != "data" or not row.setup.workers or cause.share < WORTH_NAMING:
        return False
    parts, held = row.parts, HELD_AHEAD * row.setup.workers / (row.batch.accumulation or 1)  # in steps
    once = sum(part or 0.0 for part in (parts.communication, parts.optimizer))
    return held >= 1 or once <= held * (row.step_time or 0.0)


def wire_time(size: float, bandwidth: float, processes: int) -> float:
    """Seconds that an all-reduce of `size` bytes takes at a bus bandwidth in bytes/s.

    2(p-1)/p of the bytes are sent: the definition of bus bandwidth in nccl-tests,
    doc/PERFORMANCE.md.
    """
    return 2 * (processes - 1) / processes * size / bandwidth


def volume_bound(row: Timing) -> bool | None:
    """Whether a step's collectives take longer for their bytes than for their number.

    None if unknown. A bandwidth that was measured with small messages includes their latency, so
    it alone cannot tell.
    """
    exchange, link = row.exchange, row.link
    if not exchange or not link or not exchange.bytes or not link.bandwidth:
        return None
    if exchange.collectives is None or link.latency is None:
        return None
    return 2 * exchange.collectives * link.latency < wire_time(exchange.bytes, link.bandwidth, row.num_processes)


# --- What the repeats leave open -----------------------------------------------------------------


def _with_noise(cause: Cause, row: Timing, repeats: Sequence[Timing], same: Sequence[Timing]) -> Cause:
    step = row.step_time or 0.0
    if cause.key in AGAINST_A_REFERENCE:
        own = _off(repeats, same) if cause.key == "contention" else _off(_alone_with(same, row.batch.total), same)
        off = together(own, _off(_alone_with(same, _share(row)), same))
    else:
        off = uncertain(lambda one: _share_of(cause.key, one), repeats, same)
    return cause if off is None else replace(cause, uncertain=off * step)


def _share_of(key: str, row: Timing) -> float | None:
    """The share of a row's own step that is lost to a cause; None if that is not measured in it."""
    seconds = _seconds_waited(row).get(key)
    if key == "straggler" and row.no_sync and row.no_sync.median and row.no_sync.slowest:
        seconds = row.no_sync.slowest - row.no_sync.median
    return None if seconds is None or not row.step_time else seconds / row.step_time


def _off(rows: Sequence[Timing], same: Sequence[Timing]) -> float | None:
    """By which share the median of the rows' computing may be off."""
    return uncertain(lambda row: log(seconds) if (seconds := computing(row)) else None, rows, same)


def _alone_with(same: Sequence[Timing], samples: float | None) -> list[Timing]:
    """The rows of one process with the batch that is nearest to so many samples."""
    alone = [row for row in same if row.num_processes == 1 and row.batch.total]
    nearest = min((abs(row.batch.total - (samples or 0)) for row in alone if row.batch.total), default=0)
    return [row for row in alone if row.batch.total and abs(row.batch.total - (samples or 0)) == nearest]


# --- Which process it is ------------------------------------------------------------------------


def _with_rank(cause: Cause, repeats: Sequence[Timing]) -> Cause:
    """The cause with the process that it comes from, and whether it is the same in every repeat."""
    places = [place for row in repeats if row.slowest and (place := _place(cause.key, row.slowest))]
    if not places:
        return cause
    if len(set(places)) > 1:
        often = max(set(places), key=lambda place: (places.count(place), place))
        words = f"not the same process in every repeat: {often} in {places.count(often)} of {len(places)}"
    else:
        words = places[0] + (f", in all {len(places)} repeats" if len(places) > 1 else "")
    return replace(cause, evidence=f"{cause.evidence} ({words})")


def _place(key: str, slowest: Slowest) -> str:
    if key == "data" and slowest.data_rank is not None:
        return f"rank {slowest.data_rank} waits longest"
    if key == "straggler" and slowest.rank is not None:
        return ", ".join(filter(None, [f"rank {slowest.rank}", slowest.host, slowest.device]))
    return ""


# --- What multiplies the time of computing -------------------------------------------------------


@dataclass(frozen=True)
class _Factor:
    """How many times as long a step computes because of a cause."""

    key: str
    times: float
    evidence: str


def _factors(row: Timing, whole: float | None, share: float | None) -> Iterator[_Factor]:
    """`whole`, `share`: seconds of one process alone for the batch, and for a process's share."""
    no_sync = row.no_sync
    if no_sync and no_sync.median and no_sync.slowest:
        slowest, middle = no_sync.slowest, no_sync.median
        words = f"the slowest process computes for {milliseconds(slowest)}, the median one for {milliseconds(middle)}"
        yield _Factor("straggler", slowest / middle, words)
    if row.num_processes == 1 or not share:
        return
    alone = milliseconds(share)
    if no_sync and no_sync.median:
        words = f"the same work takes {milliseconds(no_sync.median)} beside the other processes and {alone} alone"
        yield _Factor("contention", no_sync.median / share, words)
    if whole:
        ideal = whole / row.num_processes
        words = f"a process's share of the batch takes {alone}; "
        words += f"1/{row.num_processes} of the time for the whole batch is {milliseconds(ideal)}"
        yield _Factor("work", share / ideal, words)


def _slowdowns(row: Timing, step: float, whole: float | None, share: float | None) -> list[Cause]:
    """Each factor's part of the time that they take together, by its logarithm.

    So the parts add up, and the largest factor has the largest part, whatever their order.
    """
    factors = [factor for factor in _factors(row, whole, share) if factor.times > 1]
    product = prod(factor.times for factor in factors)
    longest = (row.no_sync.slowest or row.no_sync.median if row.no_sync else None) or share
    if not longest or product <= 1:
        return []
    lost = longest * (1 - 1 / product)
    return [
        _cause(one.key, lost * log(one.times) / log(product), step, one.evidence, longest * (1 - 1 / one.times))
        for one in factors
    ]


def _limited(slowdowns: list[Cause], left: float, step: float) -> list[Cause]:
    """The slowdowns, those against a reference at most what the rest leaves of the lost time.

    The reference can be the slow process itself.
    """
    measured = [cause for cause in slowdowns if cause.key == "straggler"]
    differences = [cause for cause in slowdowns if cause.key != "straggler"]
    found = sum(cause.seconds for cause in differences)
    if found <= 0:
        return slowdowns
    by = min(1.0, max(0.0, left - sum(cause.seconds for cause in measured)) / found)
    return measured + [_cause(one.key, one.seconds * by, step, one.evidence, one.saves * by) for one in differences]


def computing(row: Timing) -> float | None:
    """Seconds that a step computes, without exchange. One process exchanges nothing."""
    if row.no_sync and row.no_sync.median:
        return row.no_sync.median
    parts = row.parts
    if row.num_processes > 1 or parts.forward is None or parts.backward is None:
        return None
    return parts.forward + parts.backward + (parts.optimizer or 0.0)


def _share(row: Timing) -> float | None:
    """Examples of an optimizer step that each process computes."""
    return row.batch.total / row.num_processes if row.batch.total else None


def _alone(same: Iterable[Timing], samples: float | None, micro_batch: int | None) -> float | None:
    """Seconds in which one process computes a step of that many samples without any wait.

    At a fixed micro-batch the time grows with the number of passes: it lies on the line through
    the two nearest batches that were measured, or is proportional to a single one. None if no such
    batch was measured.
    """
    steps: dict[int, list[float]] = {}
    micro_batches = set()
    for row in same:
        seconds = computing(row)
        if row.num_processes == 1 and row.batch.total and seconds:
            steps.setdefault(row.batch.total, []).append(seconds)
            micro_batches.add(row.batch.micro)
    times = {batch: median(steps[batch]) for batch in sorted(steps)}
    if not samples or not times:
        return None
    if samples in times:
        return times[int(samples)]
    if micro_batches != {micro_batch}:
        return None
    if len(times) == 1:
        [(batch, time)] = times.items()
        return time * samples / batch if samples < batch else None
    low = max((batch for batch in times if batch < samples), default=None)
    high = min((batch for batch in times if batch > samples), default=None)
    if low is None or high is None:
        return None
    return times[low] + (times[high] - times[low]) * (samples - low) / (high - low)


# --- What cannot be told apart -------------------------------------------------------------------


def bound_of(row: Timing, same: Iterable[Timing]) -> Cause | None:
    """The most that communication can take in a step that cannot run without it: ZeRO and FSDP.

    It is what the passes and the optimizer take longer than for the same share alone, which holds
    contention and waits for slower processes too. None without that reference.
    """
    step, parts = row.step_time, row.parts
    share = _alone(same, _share(row), row.batch.micro)
    if not step or not hides_communication(row) or parts.forward is None or parts.backward is None or not share:
        return None
    beside = parts.forward + parts.backward + (parts.optimizer or 0.0)
    words = f"forward, backward and optimizer take {milliseconds(beside)} beside the other processes and "
    words += f"{milliseconds(share)} alone{_wire_words(row)}"
    return _cause("bound", min(step, max(0.0, beside - share)), step, words)


def hides_communication(row: Timing) -> bool:
    """Whether the row is of an engine whose step cannot run without its exchange."""
    return row.num_processes > 1 and not row.no_sync and row.setup.engine not in ("", "ddp", "single")


def _wire_words(row: Timing) -> str:
    exchange, link = row.exchange, row.link
    if not exchange or not link or not exchange.bytes or not link.bandwidth:
        return ""
    seconds = wire_time(exchange.bytes, link.bandwidth, row.num_processes)
    seconds += (exchange.collectives or 0.0) * (link.latency or 0.0)
    what = f"{exchange.collectives or 0:.0f} collectives with {megabytes(exchange.bytes)}"
    return f"; {what} take {milliseconds(seconds)} on the measured link, if computing hides none of it"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"
