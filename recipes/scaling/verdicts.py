"""What timings say: speedup and efficiency at each world size, and what a step loses, in a sentence or two."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low, quantiles
from typing import Any

from recipes.scaling.causes import CAUSES, WORTH_NAMING, Cause, causes_of, milliseconds, sets_the_pace
from recipes.scaling.row import COLUMNS, Timing, from_columns, to_columns

# Efficiency from which a band begins. Below a speedup of 1 it is negative, whatever the efficiency.
EXCELLENT, GOOD = 0.85, 0.70
# Efficiency above this is said to be no scaling; a little more than all of it may be noise.
_MORE_THAN_ITS_SHARE = 1.1
# Epochs are of the same work where their samples differ by less: the last batch of one may be left out.
_SAME_WORK = 1.1


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
    columns = [to_columns(row) for row in rows]
    for name, column in COLUMNS.items():
        values = [value for row in columns if (value := row[name]) not in (None, "")]
        numbers = [value for value in values if not isinstance(value, str)]
        middle = median_low if all(isinstance(value, int) for value in numbers) else median
        found[name] = middle(numbers) if numbers else (values[0] if values else column.default)
    return from_columns(found)


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
        paced = sets_the_pace(cause, size.typical)
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
    if not row.step_time or not row.samples or not row.batch.total:
        return ""
    outside = row.epoch_time - row.step_time * row.samples / row.batch.total
    if outside < WORTH_NAMING * row.epoch_time:
        return ""
    return f" {milliseconds(outside)} of the {milliseconds(row.epoch_time)} lie outside the steps."


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"
