"""What timings say: speedup, efficiency, and a sentence or two on what each size loses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low, quantiles

from recipes.scaling.causes import CAUSES, WORTH_NAMING, Cause, causes_of, milliseconds, sets_the_pace
from recipes.scaling.row import COLUMNS, Timing, from_columns, to_columns

# Efficiency from which a band begins. Below a speedup of 1 it is negative, whatever the efficiency.
EXCELLENT, GOOD = 0.85, 0.70
# From here on an efficiency is called superlinear; a little above 1 may be noise.
_SUPERLINEAR = 1.1
# Epochs are the same work if their samples differ by less than this ratio: the last batch may be
# left out.
_SAME_WORK = 1.1


@dataclass(frozen=True)
class Spread:
    """The median of repeats with its quartiles; all three are equal for a single one."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Size:
    """One world size of a series. Times are in seconds; `typical` is the median of each column.

    `speedup` is the throughput divided by that of the series' smallest world; `efficiency` is the
    speedup divided by the ratio of the world sizes.
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
    """The band of one world size, and the causes of its lost time in the order to fix them.

    The largest cause comes first. But if data loading sets the pace, it comes before every cause
    that it overlaps with. `cause` is None if none is worth naming or none is known; `words` say
    everything in a line or two.
    """

    num_processes: int
    band: str
    words: str
    cause: str | None
    causes: tuple[Cause, ...]
    lost: float | None  # seconds of a step beyond the reference
    unexplained: float | None  # seconds of `lost` that no cause explains


@dataclass(frozen=True)
class Series:
    """One training at several world sizes.

    `serial_fraction` is Amdahl's, for strong scaling at three sizes or more.
    """

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
    """The series in the rows, in the order of their first rows.

    Rows that try a recommendation are left out.
    """
    rows = [row for row in rows if not row.applied]
    groups: dict[tuple[str, str, str], list[Timing]] = {}
    for row in rows:
        groups.setdefault((row.name, row.recipe, row.scaling), []).append(row)
    return [_series(key, own, rows) for key, own in groups.items()]


def _series(key: tuple[str, str, str], own: list[Timing], rows: list[Timing]) -> Series:
    if not all(row.samples for row in own):  # then epochs are compared, whatever their samples
        own = [dataclasses.replace(row, samples=None) for row in own]
    worlds = sorted({row.num_processes for row in own})
    by_world = {world: [row for row in own if row.num_processes == world] for world in worlds}
    sizes = tuple(_size(world, by_world[world], by_world[worlds[0]]) for world in worlds)
    same = [row for row in rows if (row.name, row.recipe) == key[:2]]
    verdicts = tuple(verdict_of(size, sizes[0], same) for size in sizes)
    samples = [size.typical.samples or 1 for size in sizes]
    same_work = key[2] == "strong" and max(samples) <= _SAME_WORK * min(samples)  # Amdahl's law assumes it
    serial = serial_fraction(sizes) if same_work else None
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
    """Seconds per sample or, if samples are unknown, per work that is equal in all rows.

    In strong scaling that is an epoch. In weak scaling an epoch grows with the number of
    processes.
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
    """The median of every numeric column, the lower one for counts; text as in the first row."""
    found: dict[str, object] = {}
    columns = [to_columns(row) for row in rows]
    for name, column in COLUMNS.items():
        values = [value for row in columns if (value := row[name]) not in (None, "")]
        numbers = [value for value in values if not isinstance(value, str)]
        middle = median_low if all(isinstance(value, int) for value in numbers) else median
        found[name] = middle(numbers) if numbers else (values[0] if values else column.default)
    return from_columns(found)


def serial_fraction(sizes: Sequence[Size]) -> float | None:
    """Amdahl's serial fraction s of 1/S = s + (1 - s)/p, by least squares over the sizes.

    None for fewer than three sizes. A superlinear speedup would give a negative fraction, which
    counts as 0. Source: Amdahl 1967, "Validity of the single processor approach".
    """
    if len(sizes) < 3:
        return None
    smallest = sizes[0].num_processes
    shares = [1 - smallest / size.num_processes for size in sizes]
    excess = [1 / size.speedup.median - smallest / size.num_processes for size in sizes]
    found = sum(x * y for x, y in zip(shares, excess, strict=True)) / sum(x * x for x in shares)
    return min(max(found, 0.0), 1.0)


# --- Verdicts ------------------------------------------------------------------------------------


def band(speedup: float, efficiency: float) -> str:
    """The band of an efficiency, rounded to the digits that are printed: 85.0% is excellent."""
    if speedup < 1:
        return "negative scaling"
    efficiency = round(efficiency, 3)
    return "excellent" if efficiency >= EXCELLENT else "good" if efficiency >= GOOD else "poor"


def verdict_of(size: Size, base: Size, same: Sequence[Timing]) -> Verdict:
    """The verdict on one size.

    `same` are all rows of that training and recipe; the references are among them.
    """
    alone = size.num_processes == base.num_processes
    name = "" if alone else band(size.speedup.median, size.efficiency.median)
    causes, lost, unexplained = causes_of(size.typical, same)
    named = causes[0] if causes and causes[0].share >= WORTH_NAMING else None
    return Verdict(
        size.num_processes,
        name,
        _words(size, base, name, named, lost, unexplained),
        named.key if named else None,
        tuple(causes),
        lost,
        unexplained,
    )


def _words(
    size: Size, base: Size, name: str, cause: Cause | None, lost: float | None, unexplained: float | None
) -> str:
    text = f"{_processes(size.num_processes)}: the reference."
    if name:
        text = f"{_processes(size.num_processes)}: {size.speedup.median:.2f} times as fast as {base.num_processes}, "
        text += f"{size.efficiency.median:.1%} efficiency: {name}{_spread_words(size)}."
        if size.efficiency.median > _SUPERLINEAR:
            text += " Superlinear: something else slowed the reference, or a process's share fits into a cache."
    step = size.typical.step_time
    if cause:
        text += f" {_lead(cause, size.typical, lost)}: {cause.evidence}."
    elif step is None and name not in ("", "excellent"):
        text += " Epoch times alone do not say why: measure the parts of a step with `recipes scale run`."
    if name and step and unexplained and unexplained > WORTH_NAMING * step:
        text += f" {milliseconds(unexplained)} per step are unexplained."
    return text + _outside_words(size.typical)


def _lead(cause: Cause, row: Timing, lost: float | None) -> str:
    """How the main cause is introduced: "most" only if it is at least half of the lost time."""
    if sets_the_pace(cause, row):
        return "Data loading sets the pace"
    if lost is None or cause.seconds >= lost / 2:
        return f"Most of the lost time goes to {CAUSES[cause.key]}"
    return f"The largest measured loss is {CAUSES[cause.key]}"


def _spread_words(size: Size) -> str:
    """How certain an efficiency is."""
    if size.repeats == 1:
        return " (one timing)"
    low, high = (band(speedup, share) for speedup, share in _borders(size))
    between = f", between {low} and {high}" if low != high else ""
    return f" (quartiles {size.efficiency.low:.1%} and {size.efficiency.high:.1%}{between})"


def _borders(size: Size) -> list[tuple[float, float]]:
    return [(size.speedup.low, size.efficiency.low), (size.speedup.high, size.efficiency.high)]


def _outside_words(row: Timing) -> str:
    """The time of an epoch outside its steps, if it is worth naming."""
    if not row.step_time or not row.samples or not row.batch.total:
        return ""
    outside = row.epoch_time - row.step_time * row.samples / row.batch.total
    if outside < WORTH_NAMING * row.epoch_time:
        return ""
    return f" {milliseconds(outside)} of a {milliseconds(row.epoch_time)} epoch lie outside its steps."


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"
