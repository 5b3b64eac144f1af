"""One world size: its repeats in numbers, and the verdict on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low, quantiles

from recipes.scaling.causes import WORTH_NAMING, Cause
from recipes.scaling.noise import of_median, together
from recipes.scaling.row import COLUMNS, Timing, from_columns, to_columns

# Efficiency from which a band begins. Slower than a smaller size is negative, whatever it is.
EXCELLENT, GOOD = 0.85, 0.70
NEGATIVE, UNCLEAR = "negative scaling", "unclear"
# From here on an efficiency is called superlinear; a little above 1 may be noise.
SUPERLINEAR = 1.1


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
    speedup divided by the ratio of the world sizes. `differ` is by how much the slowest repeat took
    longer than the fastest, and `off` by how much the median may be off, both as shares of it; None
    for a single one.
    """

    num_processes: int
    repeats: int
    epoch_time: Spread
    samples_per_second: Spread | None
    tokens_per_second: float | None
    speedup: Spread
    efficiency: Spread
    differ: float | None
    off: float | None
    accuracy: float | None
    typical: Timing


@dataclass(frozen=True)
class Verdict:
    """The band of one world size, and the causes of its lost time in the order to fix them.

    The largest cause comes first. But if data loading sets the pace, it comes before every cause
    that it overlaps with. `cause` is None if none is worth naming or none can be told; `undecided`
    says why it cannot, empty if it can. `slower_than` is the size that is faster although smaller.
    `words` say everything in a line or two.
    """

    num_processes: int
    band: str
    words: str
    cause: str | None
    causes: tuple[Cause, ...]
    lost: float | None  # seconds of a step beyond the reference
    unexplained: float | None  # seconds of `lost` that no cause explains
    undecided: str = ""
    bound: Cause | None = None
    slower_than: int | None = None

    @property
    def named(self) -> list[Cause]:
        """The causes that are worth naming and larger than the noise, the main one first."""
        return [] if self.undecided else worth_naming(self.causes)


def size_of(world: int, rows: list[Timing], base: list[Timing]) -> Size:
    """The size of `world` processes; `base` are the rows of the series' smallest world.

    Throughput is that of samples; of tokens where samples are unknown; else of epochs.
    """
    count = "samples" if base[0].samples else "tokens" if all(row.tokens for row in [*base, *rows]) else ""
    each = [_each(row, count) for row in rows]
    own, reference = spread(each), spread([_each(row, count) for row in base]).median
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
        (max(each) - min(each)) / own.median if len(each) > 1 else None,
        of_median(each) / own.median if len(each) > 1 else None,
        max(measured, default=None),
        typical(rows),
    )


def _each(row: Timing, count: str) -> float:
    """Seconds per sample or token or, if neither is counted, per work that is equal in all rows.

    In strong scaling that is an epoch. In weak scaling an epoch grows with the number of
    processes.
    """
    if count:
        return row.epoch_time / getattr(row, count)
    return row.epoch_time / (row.num_processes if row.scaling == "weak" else 1)


def spread(values: Sequence[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high)


def typical(rows: Sequence[Timing]) -> Timing:
    """The median of every numeric column, the lower one for counts; text as in the first row.

    The slowest process is unknown if it is not the same one in all rows.
    """
    found: dict[str, object] = {}
    columns = [to_columns(row) for row in rows]
    for name, column in COLUMNS.items():
        values = [value for row in columns if (value := row[name]) not in (None, "")]
        numbers = [value for value in values if not isinstance(value, str)]
        middle = median_low if all(isinstance(value, int) for value in numbers) else median
        found[name] = middle(numbers) if numbers else (values[0] if values else column.default)
        if column.group == "slowest" and len(set(values)) > 1:
            found[name] = column.default
    return from_columns(found)


# --- Bands and causes -----------------------------------------------------------------------------


def band(efficiency: float) -> str:
    """The band of an efficiency, rounded to the digits that are printed: 85.0% is excellent."""
    efficiency = round(efficiency, 3)
    return "excellent" if efficiency >= EXCELLENT else "good" if efficiency >= GOOD else "poor"


def faster_and_smaller(size: Size, smaller: Sequence[Size]) -> Size | None:
    """The fastest smaller size, if it is faster by more than the repeats of both leave open."""
    best = max(smaller, key=lambda other: other.speedup.median, default=None)
    if not best or best.speedup.median / size.speedup.median - 1 <= (together(best.off, size.off) or 1e-9):
        return None
    return best


def worth_naming(causes: Sequence[Cause]) -> list[Cause]:
    return [cause for cause in causes if cause.share >= WORTH_NAMING and cause.clear]
