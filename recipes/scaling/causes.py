"""Where the time of a step is lost, in numbers.

Lost time is counted against a measured reference: the time of one process with all the work,
divided by the number of processes. Each cause adds the difference of two measured times to a step,
so the causes can be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from recipes.scaling.row import Timing

# A cause is named from this share of a step on: a smaller gain is hard to tell from noise.
WORTH_NAMING = 0.10
CAUSES = {
    "communication": "communication",
    "contention": "contention",
    "data": "data loading",
    "work": "too little work per step",
    "straggler": "stragglers",
    "logging": "logging",
    "saving": "checkpoints and evaluations",
}
# Data workers prefetch during these. Logging and saving are rare, and outlast the prefetch queue.
_OF_EVERY_STEP = ("communication", "contention", "work", "straggler")


@dataclass(frozen=True)
class Cause:
    """Time that a step loses to one of `CAUSES`, in seconds and as a share of the step."""

    key: str
    seconds: float
    share: float
    evidence: str


def causes_of(row: Timing, same: Iterable[Timing]) -> tuple[list[Cause], float | None, float | None]:
    """The causes of a step's lost time, all its lost time, and how much of that is unexplained.

    The causes are in the order of `Verdict`. `row` holds medians over repeats; `same` are all rows
    of its training and recipe. A cause whose reference was not measured is left out. Lost time is
    None without a reference.
    """
    step = row.step_time
    if not step:
        return [], None, None
    same, micro = list(same), row.batch.micro
    whole, share = _alone(same, row.batch.total, micro), _alone(same, _share(row), micro)
    ideal = whole / row.num_processes if whole else share

    measured = [*_waits(row, step), *_straggler(row, step)]
    differences = [*_contention_and_work(row, step, whole, share)]
    if ideal:
        differences = _limited(differences, step - ideal - sum(cause.seconds for cause in measured), step)
    found = [*measured, *differences]
    paced = any(sets_the_pace(cause, row) for cause in found)
    causes = [cause for cause in found if cause.seconds > 0]
    causes.sort(key=lambda cause: (paced and cause.key in _OF_EVERY_STEP, -cause.seconds))
    if not ideal:
        return causes, None, None
    lost = max(0.0, step - ideal)
    return causes, lost, max(0.0, lost - sum(cause.seconds for cause in found))


def _cause(key: str, seconds: float, step: float, evidence: str) -> Cause:
    return Cause(key, seconds, seconds / step, evidence)


# --- What was measured in the step itself --------------------------------------------------------


def _waits(row: Timing, step: float) -> Iterator[Cause]:
    parts = row.parts
    waits = {
        "data": (parts.data_wait if row.data_wait_max is None else row.data_wait_max, "are spent waiting for data"),
        "communication": (parts.communication, f"are spent waiting for gradients{_exchange_words(row)}"),
        "logging": (parts.logging, "are spent on logging"),
        "saving": (parts.saving, "are spent on checkpoints and evaluations"),
    }
    for key, (seconds, words) in waits.items():
        if seconds is not None:
            of_step = f"{milliseconds(seconds)} of a {milliseconds(step)} step ({seconds / step:.0%})"
            yield _cause(key, seconds, step, f"{of_step} {words}")


def _exchange_words(row: Timing) -> str:
    exchange, link, text = row.exchange, row.link, ""
    if exchange and link and exchange.bytes and link.bandwidth:
        seconds = wire_time(exchange.bytes, link.bandwidth, row.num_processes)
        text += f"; {megabytes(exchange.bytes)} per step over a link of {megabytes(link.bandwidth)}/s "
        text += f"take {milliseconds(seconds)}"
    if exchange and exchange.syncs and exchange.syncs > 1:
        text += f"; {exchange.syncs:.0f} exchanges per step where one is enough"
    return text


def _straggler(row: Timing, step: float) -> Iterator[Cause]:
    if row.no_sync and row.no_sync.median and row.no_sync.slowest:
        slowest, middle = row.no_sync.slowest, row.no_sync.median
        words = f"the slowest process computes for {milliseconds(slowest)}, the median one for {milliseconds(middle)}"
        yield _cause("straggler", slowest - middle, step, words)


def sets_the_pace(cause: Cause, row: Timing) -> bool:
    """Whether the cause is data loading, and a step takes as long as loading does.

    Workers load while a process computes and communicates, so the process waits only if loading
    takes longer than all of that together. A step that gets faster elsewhere then waits longer for
    data. Without workers the times add up.
    """
    return cause.key == "data" and bool(row.setup.workers) and cause.share >= WORTH_NAMING


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


# --- What is a difference to a reference ---------------------------------------------------------


def _contention_and_work(row: Timing, step: float, whole: float | None, share: float | None) -> Iterator[Cause]:
    """`whole`, `share`: seconds of one process alone for the batch, and for a process's share."""
    if row.num_processes == 1 or not row.no_sync or not row.no_sync.median or not share:
        return
    beside, alone = row.no_sync.median, milliseconds(share)
    words = f"the same work takes {milliseconds(beside)} beside the other processes and {alone} alone"
    yield _cause("contention", max(0.0, beside - share), step, words)
    if whole:
        ideal = whole / row.num_processes
        words = f"a process's share of the batch takes {alone}; "
        words += f"1/{row.num_processes} of the time for the whole batch is {milliseconds(ideal)}"
        yield _cause("work", max(0.0, share - ideal), step, words)


def _limited(differences: list[Cause], left: float, step: float) -> list[Cause]:
    """Differences to a reference, at most what the waits leave of the lost time."""
    found = sum(cause.seconds for cause in differences)
    if found <= 0:
        return differences
    factor = min(1.0, max(0.0, left) / found)
    return [_cause(cause.key, cause.seconds * factor, step, cause.evidence) for cause in differences]


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
        if row.num_processes == 1 and row.batch.total and row.no_sync and row.no_sync.median:
            steps.setdefault(row.batch.total, []).append(row.no_sync.median)
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


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"
