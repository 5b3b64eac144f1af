"""The analysis of timings: each training's rows, and its speedup and efficiency by world size.

Rows of `scale run` name their kind of scaling. A job that adds a row with `--measure` does not know
whether other jobs have the same global batch (strong scaling) or the same batch per process (weak),
so this module compares the jobs. Rows of other programs are strong scaling unless they name a kind.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import hypot
from statistics import linear_regression, median, median_low, quantiles
from typing import Any

from recipes.scaling.causes import LostTime, Training, lost_time_of
from recipes.scaling.timings import COLUMNS, OF_ONE_PROCESS, Timing, grouped, of_median

# The lowest efficiency of each band. A size that is slower than a smaller size is always negative.
EXCELLENT, GOOD = 0.85, 0.70
NEGATIVE = "negative scaling"
# Epochs are the same work if their samples differ by at most this ratio (dropped last batches).
_SAME_WORK = 1.1
_ONE_TIMING = 0.02  # the assumed relative error of a single timing, which only repeats could measure


@dataclass(frozen=True)
class Spread:
    """The median of repeats with its quartiles; all three are equal for a single repeat."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Size:
    """One world size of a series. Times are in seconds; `typical` is the median of each column."""

    num_processes: int
    repeats: int
    epoch_time: Spread
    samples_per_second: Spread | None
    tokens_per_second: float | None
    speedup: Spread  # the throughput divided by the throughput of the series' smallest world
    efficiency: Spread  # the speedup divided by the ratio of the world sizes
    off: float  # the relative error that the median may have, 0 for a single row
    accuracy: float | None
    typical: Timing
    losses: LostTime
    band: str  # empty for the smallest size
    slower_than: int | None  # the number of processes of a smaller size that is faster

    @property
    def cause(self) -> str | None:
        """The key of the main cause; None if no cause is large enough, or if none can be named."""
        return self.losses.named[0].key if self.losses.named else None


@dataclass(frozen=True)
class Series:
    """The rows of one training at several world sizes, the smallest size first."""

    name: str
    recipe: str
    scaling: str
    sizes: tuple[Size, ...]
    rows: tuple[Timing, ...]
    fixed: bool  # True if the work of a step or epoch is the same at every size
    serial_fraction: float | None  # of Amdahl's law; None if not `fixed`, or if `_serial_fraction` finds none

    @property
    def title(self) -> str:
        return ", ".join(filter(None, [self.name, self.recipe, f"{self.scaling} scaling"]))

    @property
    def best(self) -> Size:
        return max(self.sizes, key=lambda size: size.speedup.median)


def hardware_of(series: Iterable[Series]) -> str:
    """Return the hardware that the rows name; empty if no row names any."""
    return "; ".join(dict.fromkeys(row.hardware for one in series for row in one.rows if row.hardware))


def analyse(rows: Iterable[Timing]) -> list[Series]:
    """Group the rows into series, and analyse each. Series of the same training are adjacent.

    Runs that try advice, and the runs with which they are compared, are left out.
    """
    found = []
    for training in _trainings([row for row in rows if not row.applied]):
        same = Training(training)
        found += [_series(own, same) for own in _curves(training)]
    return found


# --- Rows of jobs --------------------------------------------------------------------------------


def _is_of_a_job(row: Timing) -> bool:
    return not row.scaling and bool(row.engine) and row.global_batch is not None


def _trainings(rows: Sequence[Timing]) -> Iterable[list[Timing]]:
    """Group the rows by training, that is by name and recipe.

    If jobs of one name and recipe have several commands, each command is a training of its own, and
    the name in its rows contains the command.
    """
    several: set[Timing] = set()
    for alike in grouped(filter(_is_of_a_job, rows), lambda row: (row.name, row.recipe)).values():
        if len({row.command for row in alike}) > 1:
            several |= {*alike}
    named = [replace(row, name=f"{row.name} ({row.command or 'no flags'})") if row in several else row for row in rows]
    return grouped(named, lambda row: (row.name, row.recipe)).values()


def _curves(training: Sequence[Timing]) -> Iterable[list[Timing]]:
    """Group one training's rows into series. The rows get the name and the scaling of their series.

    Jobs are weak scaling if their batches per process are equal and their global batches differ.
    Other jobs are strong scaling, with a series for each global batch.
    """
    jobs = [row for row in training if _is_of_a_job(row)]
    batches = {row.global_batch for row in jobs}
    weak = len(batches) > 1 and len({(row.global_batch or 0) / row.num_processes for row in jobs}) == 1
    named = []
    for row in training:
        of_a_job = _is_of_a_job(row)
        kind = row.scaling or ("weak" if weak and of_a_job else "strong")
        label = f", global batch {row.global_batch}" if of_a_job and len(batches) > 1 and not weak else ""
        named.append(replace(row, name=row.name + label, scaling=kind))
    return grouped(named, lambda row: (row.name, row.scaling)).values()


# --- Sizes ---------------------------------------------------------------------------------------


def _series(own: list[Timing], training: Training) -> Series:
    """Return a series. Throughput counts samples, or tokens if rows lack samples, else epochs."""
    count = next((count for count in ("samples", "tokens") if all(getattr(row, count) for row in own)), "")
    by_world = sorted(grouped(own, lambda row: row.num_processes).items())
    sizes: list[Size] = []
    for _, rows in by_world:
        sizes.append(_size(rows, by_world[0][1], sizes, training, count))
    batches, samples = {size.typical.global_batch for size in sizes}, [size.typical.samples or 1 for size in sizes]
    alike = (len(batches) == 1 and None not in batches) or max(samples) <= _SAME_WORK * min(samples)
    fixed = alike and own[0].scaling == "strong"
    serial = _serial_fraction(sizes) if fixed else None
    return Series(own[0].name, own[0].recipe, own[0].scaling, tuple(sizes), tuple(own), fixed, serial)


def _size(rows: list[Timing], base: list[Timing], smaller: Sequence[Size], training: Training, count: str) -> Size:
    """Compare the `rows` of a world size with `base`, the smallest's. `count`: the unit of work."""
    world, typical = rows[0].num_processes, _typical(rows)
    typical = replace(typical, samples=typical.samples if count == "samples" else None)
    each, of_base = ([row.epoch_time / (getattr(row, count) if count else 1) for row in some] for some in (rows, base))
    own, reference = spread(each), median(of_base)
    speedup = Spread(reference / own.median, reference / own.high, reference / own.low)
    times = base[0].num_processes / world
    efficiency = Spread(speedup.median * times, speedup.low * times, speedup.high * times)
    off = of_median(each) / own.median
    best = max(smaller, key=lambda other: other.speedup.median, default=None)
    slower_than, named = None, band(efficiency.median) if smaller else ""
    if best and best.speedup.median / speedup.median - 1 > (hypot(best.off, off) or 1e-9):
        slower_than, named = best.num_processes, NEGATIVE
    tokens = [row.tokens / row.epoch_time for row in rows if row.tokens]
    return Size(
        num_processes=world,
        repeats=len(rows),
        epoch_time=spread([row.epoch_time for row in rows]),
        samples_per_second=Spread(1 / own.median, 1 / own.high, 1 / own.low) if count == "samples" else None,
        tokens_per_second=median(tokens) if tokens else None,
        speedup=speedup,
        efficiency=efficiency,
        off=off,
        accuracy=max((row.accuracy for row in rows if row.accuracy is not None), default=None),
        typical=typical,
        losses=lost_time_of(typical, training, rows),
        band=named,
        slower_than=slower_than,
    )


def spread(values: Sequence[float]) -> Spread:
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(median(values), low, high)


def _typical(rows: Sequence[Timing]) -> Timing:
    """Return a typical row: the median of each numeric column (the lower median of integers), and
    the first text of each other column. A rank, host or device is left out if the rows differ.
    """
    found: dict[str, Any] = {}
    for name in COLUMNS:
        values = [value for row in rows if (value := getattr(row, name)) not in (None, "")]
        if not values or (name in OF_ONE_PROCESS and len(set(values)) > 1):
            continue
        middle = median_low if all(isinstance(value, int) for value in values) else median
        found[name] = values[0] if isinstance(values[0], str) else middle(values)
    return Timing(**found)


def band(efficiency: float) -> str:
    """Return the band of an efficiency, rounded as printed: 84.96 % is 85.0%, thus excellent."""
    efficiency = round(efficiency, 3)
    return "excellent" if efficiency >= EXCELLENT else "good" if efficiency >= GOOD else "poor"


def _serial_fraction(sizes: Sequence[Size]) -> float | None:
    """Return Amdahl's serial fraction; None if the sizes break his law or are fewer than three.

    The experimentally determined fractions (Karp and Flatt 1990, "Measuring parallel processor
    performance") are constant over the sizes that follow Amdahl's law (Amdahl 1967, "Validity of
    the single processor approach").
    """
    first, *larger = sizes
    if len(larger) < 2:
        return None
    shares = [1 - first.num_processes / size.num_processes for size in larger]
    excess = [1 / size.speedup.median - 1 + share for size, share in zip(larger, shares, strict=True)]
    # Least squares of 1/S = s + (1 - s)/p. A superlinear speedup would give a fraction below 0.
    fitted, _ = linear_regression(shares, excess, proportional=True)
    serial = min(max(fitted, 0.0), 1.0)
    for size, share, over in zip(larger, shares, excess, strict=True):
        off = (hypot(first.off, size.off) or _ONE_TIMING) / size.speedup.median / share
        if size.slower_than or abs(max(over / share, 0.0) - serial) > 2 * off:
            return None
    return serial
