"""The causes of lost time in a step, with the seconds that each cause costs.

Lost time is a step's time minus a reference. With p processes, the reference is 1/p of the time
that one process takes for the batch. If this is not measured, the reference is the time that one
process takes for 1/p of the batch. The step itself shows the seconds of data, communication,
logging and saving; a comparison of computing times shows the other causes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import hypot, log, prod
from statistics import median

from recipes.scaling.timings import Timing, grouped, of_median

# A cause is named only if it takes this share of a step or more: a smaller share may be noise.
WORTH_NAMING = 0.10
HIDDEN = "hidden"  # three causes in one, for engines that run no step without communication
CAUSES = {
    "communication": "communication",
    "contention": "contention",
    HIDDEN: "communication, contention or stragglers",
    "data": "data loading",
    "work": "too little work per step",
    "straggler": "stragglers",
    "logging": "logging",
    "saving": "checkpoints and evaluations",
}
AGAINST_A_REFERENCE = ("contention", "work")  # measured by comparison with one process alone
# These causes overlap with data loading, because workers prefetch during every step. Logging and
# saving do not: they are rare, and take longer than the prefetched batches last.
_OF_EVERY_STEP = ("communication", "contention", HIDDEN, "work", "straggler")


@dataclass(frozen=True)
class Cause:
    """Time that a step loses to one of `CAUSES`."""

    key: str
    seconds: float  # an upper bound for HIDDEN
    step: float  # the seconds of the whole step
    evidence: str
    uncertain: float = 0.0  # the uncertainty of `seconds`, from the repeats

    @property
    def share(self) -> float:
        return self.seconds / self.step

    @property
    def large(self) -> bool:
        """True if the lost time is worth naming, even if it is not `clear`."""
        return self.share >= WORTH_NAMING

    @property
    def clear(self) -> bool:
        """True if the lost time is longer than its uncertainty."""
        return self.seconds > self.uncertain


@dataclass(frozen=True)
class LostTime:
    """The time that a step loses. `causes` are sorted by lost time, the largest first.

    If data loading sets the pace, the causes that overlap with data loading come last.
    """

    causes: tuple[Cause, ...] = ()
    lost: float | None = None  # seconds of a step beyond the reference, None without a reference
    unexplained: float | None = None  # seconds of `lost` that no cause explains
    undecided: str = ""  # why no cause can be named: "too noisy", HIDDEN (without an upper bound), "no reference"

    @property
    def named(self) -> list[Cause]:
        """The causes that are `large` and `clear`, the main cause first; empty if `undecided`."""
        return [] if self.undecided else [cause for cause in self.causes if cause.large and cause.clear]


def lost_time_of(row: Timing, training: Training, repeats: Sequence[Timing]) -> LostTime:
    """Return the time that a step loses. `row` holds the medians of `repeats`.

    Without a step time, the result is empty. A cause without a value or reference is left out.
    """
    step = row.step_time
    if not step:
        return LostTime()
    whole, share = training.alone(row.global_batch, row.micro_batch), training.alone(_share(row), row.micro_batch)
    found = [*_waits(row, step), *_slowdowns(row, step, whole, share)]
    several = row.num_processes > 1
    hides = several and row.no_sync_step is None and row.communication is None
    bound = list(_hidden(row, step, share)) if hides and share else []
    causes = [
        replace(cause, uncertain=step * training.uncertain(cause.key, row, repeats))
        for cause in (*found, *bound)
        if cause.seconds > 0
    ]
    paced = any(sets_the_pace(cause, row) for cause in causes)
    causes.sort(key=lambda cause: (paced and cause.key in _OF_EVERY_STEP, -cause.seconds))
    ideal = whole / row.num_processes if whole else share
    lost = max(0.0, step - ideal) if ideal else None
    unexplained = None if lost is None else max(0.0, lost - sum(cause.seconds for cause in causes))
    reason = HIDDEN if hides and not bound else "no reference" if lost is None and several else ""
    return LostTime(tuple(causes), lost, unexplained, _undecided(causes, reason))


def _undecided(causes: Sequence[Cause], reason: str) -> str:
    """Return "too noisy" if noise may hide the main cause, "" if one is named, else `reason`."""
    largest = max((cause.seconds for cause in causes if cause.large and cause.clear), default=0.0)
    if any(cause.large and not cause.clear and cause.seconds > largest for cause in causes):
        return "too noisy"
    return "" if largest else reason


# --- Measured in the step itself -----------------------------------------------------------------


def _waits(row: Timing, step: float) -> Iterator[Cause]:
    longest = "" if row.data_wait_rank is None else f" (rank {row.data_wait_rank} waits longest)"
    words = {
        "data": f"spent waiting for data{longest}",
        "communication": f"spent waiting for gradients{_exchange_words(row)}",
        "logging": "spent on logging",
        "saving": "spent on checkpoints and evaluations",
    }
    for key, spent in words.items():
        seconds = _measured(key, row)
        if seconds is not None:
            of_step = f"{milliseconds(seconds)} of a {milliseconds(step)} step ({seconds / step:.0%})"
            yield Cause(key, seconds, step, f"{of_step} are {spent}")


def _measured(key: str, row: Timing) -> float | None:
    """Return the seconds that the row's step loses to a cause; None if the row lacks the value."""
    if key == "data":
        return row.data_wait if row.data_wait_max is None else row.data_wait_max
    if key == "straggler":
        return row.no_sync_step_max - row.no_sync_step if row.no_sync_step and row.no_sync_step_max else None
    return getattr(row, key, None)


def _exchange_words(row: Timing) -> str:
    text = ""
    if row.sync_bytes and row.link_bandwidth:
        seconds = bus_bytes(row.sync_bytes, row.num_processes) / row.link_bandwidth
        text += f"; sending {megabytes(row.sync_bytes)} per step over a link of {megabytes(row.link_bandwidth)}/s "
        text += f"takes {milliseconds(seconds)}"
    if row.syncs and row.syncs > 1:
        text += f"; gradients are synchronised {row.syncs:.0f} times per step, and once is enough"
    return text


def sets_the_pace(cause: Cause, row: Timing) -> bool:
    """True if the wait for data workers is `large`: a step then takes as long as loading does.

    Workers load while a process computes and communicates, so the process waits only if loading
    takes longer than both together. Faster computing or communicating would then only lengthen the
    wait for data. False without workers, because loading then adds to the other times.
    """
    return cause.key == "data" and bool(row.workers) and cause.large


def bus_bytes(size: float, processes: int) -> float:
    """Return the bytes that each process sends in an all-reduce of `size` bytes: 2(p-1)/p of them.

    Divided by seconds, they are the bus bandwidth of nccl-tests (doc/PERFORMANCE.md).
    """
    return 2 * (processes - 1) / processes * size


# --- All rows of a training together -------------------------------------------------------------


class Training:
    """The timings of one process: the reference for all world sizes of a training and recipe."""

    def __init__(self, rows: Sequence[Timing]) -> None:
        alone = [row for row in rows if row.num_processes == 1 and row.global_batch]
        self._alone = grouped(alone, lambda row: row.global_batch or 0)

    def uncertain(self, key: str, row: Timing, repeats: Sequence[Timing]) -> float:
        """Return the uncertainty of the time lost to a cause, as a share of the step."""
        if key not in AGAINST_A_REFERENCE:
            lost = ((_measured(key, repeat), repeat.step_time) for repeat in repeats)
            return of_median([seconds / step for seconds, step in lost if seconds is not None and step])
        own = repeats if key == "contention" else self._nearest_alone(row.global_batch)
        both = [map(_computing, rows) for rows in (own, self._nearest_alone(_share(row)))]
        # The difference of two logarithms is the relative difference of the seconds.
        return hypot(*(of_median([log(seconds) for seconds in times if seconds]) for times in both))

    def _nearest_alone(self, samples: float | None) -> list[Timing]:
        """Return the rows of one process with the global batch that is nearest to `samples`."""
        return self._alone[min(self._alone, key=lambda batch: abs(batch - (samples or 0)))] if self._alone else []

    @cached_property
    def _times_alone(self) -> dict[int, float]:
        """Seconds that one process computes per step, by global batch in ascending order."""
        seconds = {batch: [*filter(None, map(_computing, rows))] for batch, rows in sorted(self._alone.items())}
        return {batch: median(times) for batch, times in seconds.items() if times}

    def alone(self, samples: float | None, micro_batch: int | None) -> float | None:
        """Return the seconds that one process computes for a step of `samples`, without any wait.

        At a fixed micro-batch the time grows with the number of passes. So this function
        interpolates between the two nearest batches that were measured, or scales down a single,
        larger batch. The result is None without such batches, or if micro-batches differ.
        """
        times = self._times_alone
        if not samples or samples in times:
            return times.get(int(samples)) if samples else None
        if {row.micro_batch for batch in times for row in self._alone[batch]} != {micro_batch}:
            return None
        low = max((batch for batch in times if batch < samples), default=None)
        high = min((batch for batch in times if batch > samples), default=None)
        if len(times) == 1 and high:
            return times[high] * samples / high
        if low is None or high is None:
            return None
        return times[low] + (times[high] - times[low]) * (samples - low) / (high - low)


# --- Factors of the computing time ---------------------------------------------------------------


def _slowdowns(row: Timing, step: float, whole: float | None, share: float | None) -> list[Cause]:
    """Divide the lost computing time among causes in proportion to the log of each one's factor."""
    factors = [factor for factor in _factors(row, whole, share) if factor[1] > 1]
    longest = row.no_sync_step_max or row.no_sync_step or share or 0.0  # 0 only without factors
    product = prod(times for _, times, _ in factors)
    lost = longest * (1 - 1 / product)
    return [Cause(key, lost * log(times) / log(product), step, evidence) for key, times, evidence in factors]


def _factors(row: Timing, whole: float | None, share: float | None) -> Iterator[tuple[str, float, str]]:
    """Yield each cause, the factor by which it makes computing longer, and the evidence.

    One process alone takes `whole` seconds for the global batch, `share` for 1/num_processes of it.
    """
    middle, slowest = row.no_sync_step, row.no_sync_step_max
    if middle and slowest:
        words = f"the slowest process computes for {milliseconds(slowest)}, the median one for {milliseconds(middle)}"
        if row.slowest_rank is not None:
            place = filter(None, [f"rank {row.slowest_rank}", row.slowest_host, row.slowest_device])
            words += f" ({', '.join(place)})"
        yield "straggler", slowest / middle, words
    if row.num_processes == 1 or not share:
        return
    alone = milliseconds(share)
    if middle:
        words = f"the same work takes {milliseconds(middle)} beside the other processes and {alone} alone"
        yield "contention", middle / share, words
    if whole:
        ideal = whole / row.num_processes
        words = f"one process alone takes {alone} for 1/{row.num_processes} of the batch; that share "
        words += f"of its time for the whole batch would be {milliseconds(ideal)}"
        yield "work", share / ideal, words


def _hidden(row: Timing, step: float, share: float) -> Iterator[Cause]:
    """Yield HIDDEN: forward, backward and optimizer time beyond `share`, one process's own time."""
    if row.forward is None or row.backward is None:
        return
    beside = row.forward + row.backward + (row.optimizer or 0.0)
    words = f"forward, backward and optimizer take {milliseconds(beside)} beside the other processes and "
    words += f"{milliseconds(share)} alone{_exchange_words(row)}"
    yield Cause(HIDDEN, min(step, beside - share), step, words)


def _computing(row: Timing) -> float | None:
    """Return the seconds that a step computes, without communication; None if they are unknown."""
    if row.no_sync_step:
        return row.no_sync_step
    if row.num_processes > 1 or row.forward is None or row.backward is None:
        return None
    return row.forward + row.backward + (row.optimizer or 0.0)


def _share(row: Timing) -> float | None:
    """Return the examples that each process computes in a step; None for an unknown batch."""
    return row.global_batch / row.num_processes if row.global_batch else None


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"
