"""What timings say: speedup and efficiency at each world size, and where the time of a step is lost, in numbers.

Lost time is counted against a reference that is measured, never assumed: one process with all the work, shared out
without loss. What each cause adds to a step is a difference of two measured times, so the causes can be told apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low, quantiles
from typing import Any

from recipes.scaling.timings import PARTS, Timing

# Efficiency from which a band begins. Below a speedup of 1 it is negative, whatever the efficiency.
EXCELLENT, GOOD = 0.85, 0.70
# A cause is named from this share of a step on: mending less is hard to tell from noise.
WORTH_NAMING = 0.10
# Efficiency above this is said to be no scaling; a little more than all of it may be noise.
_MORE_THAN_ITS_SHARE = 1.1
# Epochs are of the same work where their samples differ by less: the last batch of one may be left out.
_SAME_WORK = 1.1
# What every step has. Logs and checkpoints come every so many steps, and last longer than what is loaded ahead.
_OF_EVERY_STEP = ("communication", "contention", "work", "straggler")


@dataclass(frozen=True)
class Spread:
    """The median of repeats with its quartiles; all three are the same for a single one."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Size:
    """One world size of a series. Times are in seconds; `typical` holds the median of every column.

    `speedup` is throughput over that of the series' smallest world, `efficiency` that over the ratio of the sizes.
    """

    num_processes: int
    repeats: int
    epoch_time: Spread
    samples_per_second: Spread | None
    tokens_per_second: float | None
    speedup: Spread
    efficiency: Spread
    accuracy: float | None
    typical: Timing


@dataclass(frozen=True)
class Cause:
    """What a step loses. `seconds` of an optimizer step; `key` is one of `CAUSES`."""

    key: str
    seconds: float
    share: float
    evidence: str


@dataclass(frozen=True)
class Verdict:
    """What is said of one world size: the band of its efficiency, and what costs it time, in the order to mend it.

    The largest comes first, but nothing that every step has before the loading of data where that sets the pace.
    `cause` is None where nothing is worth naming or nothing can be told; `words` say it all in a line or two.
    """

    num_processes: int
    band: str
    words: str
    cause: str | None
    causes: tuple[Cause, ...]
    lost: float | None  # seconds of a step beyond the reference
    unexplained: float | None  # of them


@dataclass(frozen=True)
class Series:
    """One training at several world sizes. `serial_fraction` is Amdahl's, from three sizes on, for strong scaling."""

    name: str
    recipe: str
    scaling: str
    sizes: tuple[Size, ...]
    verdicts: tuple[Verdict, ...]
    serial_fraction: float | None

    @property
    def title(self) -> str:
        return ", ".join(filter(None, [self.name, self.recipe, f"{self.scaling} scaling"]))


CAUSES = {
    "communication": "communication",
    "contention": "contention",
    "data": "data loading",
    "work": "too little work per step",
    "straggler": "stragglers",
    "logging": "logging",
    "saving": "checkpoints and evaluations",
}


def analyse(rows: Sequence[Timing]) -> list[Series]:
    """The series in the rows, in the order in which they begin. Rows that try a recommendation are not among them."""
    rows = [row for row in rows if not row.applied]
    groups: dict[tuple[str, str, str], list[Timing]] = {}
    for row in rows:
        groups.setdefault((row.name, row.recipe, row.scaling), []).append(row)
    return [_series(key, own, rows) for key, own in groups.items()]


def _series(key: tuple[str, str, str], own: list[Timing], rows: list[Timing]) -> Series:
    if not all(row.samples for row in own):  # then they are compared by their epochs
        own = [dataclasses.replace(row, samples=None) for row in own]
    worlds = sorted({row.num_processes for row in own})
    by_world = {world: [row for row in own if row.num_processes == world] for world in worlds}
    sizes = tuple(_size(world, by_world[world], by_world[worlds[0]]) for world in worlds)
    same = [row for row in rows if (row.name, row.recipe) == key[:2]]
    verdicts = tuple(judge(size, sizes[0], same) for size in sizes)
    samples = [size.typical.samples or 1 for size in sizes]
    shared_out = key[2] == "strong" and max(samples) <= _SAME_WORK * min(samples)  # what Amdahl's law is about
    serial = serial_fraction(sizes) if shared_out else None
    return Series(*key, sizes, verdicts, serial)


def _size(world: int, rows: list[Timing], base: list[Timing]) -> Size:
    own, reference = spread([_each(row) for row in rows]), spread([_each(row) for row in base]).median
    speedup = Spread(reference / own.median, reference / own.high, reference / own.low)
    times = base[0].num_processes / world
    tokens = [row.tokens / row.epoch_time for row in rows if row.tokens]
    measured = [row.accuracy for row in rows if row.accuracy is not None]
    return Size(
        world,
        len(rows),
        spread([row.epoch_time for row in rows]),
        Spread(1 / own.median, 1 / own.high, 1 / own.low) if all(row.samples for row in rows) else None,
        median(tokens) if tokens else None,
        speedup,
        Spread(speedup.median * times, speedup.low * times, speedup.high * times),
        max(measured, default=None),
        typical(rows),
    )


def _each(row: Timing) -> float:
    """Seconds for each sample; where samples are not counted, for each of what is as many in the rows of a series.

    That is an epoch in strong scaling; in weak scaling an epoch grows with the processes.
    """
    if row.samples:
        return row.epoch_time / row.samples
    return row.epoch_time / (row.num_processes if row.scaling == "weak" else 1)


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high)


def typical(rows: Sequence[Timing]) -> Timing:
    """The median of every numeric column over repeats, of counts one of them; text as in the first row."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Timing):
        values = [value for value in (getattr(row, field.name) for row in rows) if value not in (None, "")]
        numbers = [value for value in values if not isinstance(value, str)]
        middle = median_low if all(isinstance(value, int) for value in numbers) else median
        found[field.name] = middle(numbers) if numbers else (values[0] if values else field.default)
    return Timing(**found)


def serial_fraction(sizes: Sequence[Size]) -> float | None:
    """Amdahl's serial fraction s of 1/S = s + (1 - s)/p, by least squares; None from fewer than three sizes.

    Source: Amdahl 1967, "Validity of the single processor approach". Less than 0, a superlinear speedup, counts as 0.
    """
    if len(sizes) < 3:
        return None
    smallest = sizes[0].num_processes
    shares = [1 - smallest / size.num_processes for size in sizes]
    excess = [1 / size.speedup.median - smallest / size.num_processes for size in sizes]
    found = sum(x * y for x, y in zip(shares, excess, strict=True)) / sum(x * x for x in shares)
    return min(max(found, 0.0), 1.0)


# --- Verdicts --------------------------------------------------------------------------------------------------------


def band(speedup: float, efficiency: float) -> str:
    """The band of an efficiency, which is rounded as it is printed."""
    if speedup < 1:
        return "negative scaling"
    efficiency = round(efficiency, 3)
    return "excellent" if efficiency >= EXCELLENT else "good" if efficiency >= GOOD else "poor"


def judge(size: Size, base: Size, same: Sequence[Timing]) -> Verdict:
    """The verdict on one size; `same` are all rows of that training and recipe, where the references are found."""
    alone = size.num_processes == base.num_processes
    name = "" if alone else band(size.speedup.median, size.efficiency.median)
    causes, lost, unexplained = causes_of(size.typical, same)
    named = causes[0] if causes and causes[0].share >= WORTH_NAMING else None
    return Verdict(
        size.num_processes,
        name,
        _words(size, base, name, named, lost, unexplained or 0.0),
        named.key if named else None,
        tuple(causes),
        lost,
        unexplained,
    )


def _words(size: Size, base: Size, name: str, cause: Cause | None, lost: float | None, unexplained: float) -> str:
    told = f"{_processes(size.num_processes)}: the reference."
    if name:
        told = f"{_processes(size.num_processes)}: {size.speedup.median:.2f} times as fast as {base.num_processes}, "
        told += f"{size.efficiency.median:.1%} efficiency: {name}{_spread_words(size)}."
        if size.efficiency.median > _MORE_THAN_ITS_SHARE:
            told += " More than all of it: the reference was slowed by something else, or its share fits a cache."
    step = size.typical.step_time
    if cause:
        paced = _sets_the_pace(cause.key, cause.seconds, size.typical)
        most = lost is None or cause.seconds >= lost / 2
        first = "Nothing is gained before" if paced else "Most is lost to" if most else "Of what was measured, most is"
        told += f" {first} {CAUSES[cause.key]}: {cause.evidence}."
    elif step is None and name not in ("", "excellent"):
        told += " Epoch times alone do not say why: measure the parts of a step with `recipes scale run`."
    if name and step and unexplained > WORTH_NAMING * step:
        told += f" {milliseconds(unexplained)} of a step are lost to nothing that was measured."
    return told + _outside_words(size.typical)


def _spread_words(size: Size) -> str:
    """How sure an efficiency is."""
    if size.repeats == 1:
        return " (one timing)"
    low, high = (band(speedup, share) for speedup, share in _borders(size))
    between = f", between {low} and {high}" if low != high else ""
    return f" (quartiles {size.efficiency.low:.1%} and {size.efficiency.high:.1%}{between})"


def _borders(size: Size) -> list[tuple[float, float]]:
    return [(size.speedup.low, size.efficiency.low), (size.speedup.high, size.efficiency.high)]


def _outside_words(row: Timing) -> str:
    """Time of an epoch in which no step runs."""
    if not row.step_time or not row.samples or not row.global_batch:
        return ""
    outside = row.epoch_time - row.step_time * row.samples / row.global_batch
    if outside < WORTH_NAMING * row.epoch_time:
        return ""
    return f" {milliseconds(outside)} of the {milliseconds(row.epoch_time)} lie outside the steps."


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def megabytes(size: float) -> str:
    return f"{size / 1e6:.3g} MB" if size < 1e9 else f"{size / 1e9:.3g} GB"


def causes_of(row: Timing, same: Iterable[Timing]) -> tuple[list[Cause], float | None, float | None]:
    """What a step of `row` loses, in the order of `Verdict`; the time lost in all; and what of it nothing explains.

    `row` holds medians over repeats. Times without a reference are not guessed: their cause is left out.
    """
    step = row.step_time
    if not step:
        return [], None, None
    seconds: dict[str, float] = {
        "data": row.data_wait_max if row.data_wait_max is not None else row.data_wait or 0.0,
        "communication": row.communication or 0.0,
        "logging": row.logging or 0.0,
        "saving": row.saving or 0.0,
    }
    if row.no_sync_step and row.no_sync_step_max:
        seconds["straggler"] = row.no_sync_step_max - row.no_sync_step
    same, micro = list(same), row.micro_batch
    whole, share = _alone(same, row.global_batch, micro), _alone(same, _share(row), micro)
    if row.num_processes > 1 and row.no_sync_step and share:
        seconds["contention"] = max(0.0, row.no_sync_step - share)
        if whole:
            seconds["work"] = max(0.0, share - whole / row.num_processes)
    ideal = whole / row.num_processes if whole else share
    if ideal:
        _share_out(seconds, step - ideal)
    causes = [
        Cause(key, lost, lost / step, _evidence(key, lost, row, share, whole))
        for key, lost in seconds.items()
        if lost > 0
    ]
    paced = _sets_the_pace("data", seconds["data"], row)
    causes.sort(key=lambda cause: (paced and cause.key in _OF_EVERY_STEP, -cause.seconds))
    if not ideal:
        return causes, None, None
    lost = max(0.0, step - ideal)
    return causes, lost, max(0.0, lost - sum(seconds.values()))


def _share_out(seconds: dict[str, float], lost: float) -> None:
    """What is a difference to a reference is no more than what is lost beside all that was measured in the step."""
    differences = [key for key in ("contention", "work") if seconds.get(key)]
    left = max(0.0, lost - sum(time for key, time in seconds.items() if key not in differences))
    found = sum(seconds[key] for key in differences)
    for key in differences:
        seconds[key] *= min(1.0, left / found)


def _sets_the_pace(key: str, seconds: float, row: Timing) -> bool:
    """Whether the cause is the loading of data, and a step takes as long as that does.

    Workers load while a process computes and communicates, so it waits for them only where they take longer than all
    of that together. What a step then gains elsewhere, it waits longer for them. Without workers the times add up.
    """
    return key == "data" and bool(row.workers) and seconds >= WORTH_NAMING * (row.step_time or 0.0)


def _share(row: Timing) -> float | None:
    """Examples of an optimizer step that each process computes."""
    return row.global_batch / row.num_processes if row.global_batch else None


def _alone(same: Iterable[Timing], samples: float | None, micro_batch: int | None) -> float | None:
    """Seconds in which one process computes a step of that many samples, without waiting for anything.

    At one micro-batch a step is so many passes: its time is on the line through two batches that were measured, or in
    proportion to a single one.
    """
    found = [row for row in same if row.num_processes == 1 and row.global_batch and row.no_sync_step]
    times = {batch: _median_step(found, batch) for batch in sorted({row.global_batch or 0 for row in found})}
    if not samples or not times:
        return None
    if samples in times:
        return times[int(samples)]
    if {row.micro_batch for row in found} != {micro_batch}:
        return None
    if len(times) == 1:
        [(batch, time)] = times.items()
        return time * samples / batch if samples < batch else None
    low = max((batch for batch in times if batch < samples), default=None)
    high = min((batch for batch in times if batch > samples), default=None)
    if low is None or high is None:
        return None
    return times[low] + (times[high] - times[low]) * (samples - low) / (high - low)


def _median_step(rows: list[Timing], batch: int) -> float:
    return median(row.no_sync_step or 0.0 for row in rows if row.global_batch == batch)


def volume_bound(row: Timing) -> bool | None:
    """Whether most of the time of a step's collectives is for their bytes, and not for their number.

    A bandwidth that was measured with small messages holds their latency, so it alone cannot tell.
    """
    if not row.sync_bytes or not row.link_bandwidth or row.collectives is None or row.link_latency is None:
        return None
    return 2 * row.collectives * row.link_latency < _over_the_link(row)


def _over_the_link(row: Timing) -> float:
    """Seconds that the bytes of a step take at the bus bandwidth: 2(p-1)/p of them are sent, as in nccl-tests."""
    share = 2 * (row.num_processes - 1) / row.num_processes
    return share * (row.sync_bytes or 0) / (row.link_bandwidth or 1)


def _evidence(key: str, lost: float, row: Timing, share: float | None, whole: float | None) -> str:
    step, part = row.step_time or 0.0, lost / (row.step_time or 1.0)
    of_step = f"{milliseconds(lost)} of a step's {milliseconds(step)} ({part:.0%})"
    if key == "communication":
        told = f"{of_step} wait for gradients"
        if row.sync_bytes and row.link_bandwidth:
            told += f"; {megabytes(row.sync_bytes)} a step over a link of {megabytes(row.link_bandwidth)}/s "
            told += f"take {milliseconds(_over_the_link(row))}"
        if row.syncs and row.syncs > 1:
            told += f"; {row.syncs:.0f} exchanges a step where one is enough"
        return told
    if key == "contention":
        alone = milliseconds(share or 0.0)
        return f"the same work takes {milliseconds(row.no_sync_step or 0.0)} beside the others and {alone} alone"
    if key == "work":
        ideal = milliseconds((whole or 0.0) / row.num_processes)
        told = f"a process's share of the batch takes {milliseconds(share or 0.0)}, "
        return f"{told}where 1/{row.num_processes} of the whole would be {ideal}"
    if key == "straggler":
        slowest, middle = milliseconds(row.no_sync_step_max or 0.0), milliseconds(row.no_sync_step or 0.0)
        return f"the slowest process computes {slowest}, the median one {middle}"
    waits = {"data": "wait for data", "logging": "go to logging", "saving": "go to checkpoints and evaluations"}
    return f"{of_step} {waits[key]}"


def parts(row: Timing) -> dict[str, float]:
    """The parts of a step that were measured, in seconds and in the order in which they happen."""
    return {name: value for name in PARTS if (value := getattr(row, name)) is not None}
