"""What timings say: which rows are one training, its speedup and efficiency at each world size.

A job that adds a row with `--measure` cannot know whether others have the same global batch as it,
or the same batch per process: their rows are paired here. `scale run` knows and says so, and rows
of other programs are what they say, or strong scaling.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low, quantiles
from typing import Any, TypeVar

from recipes.scaling.causes import Losses, losses_of
from recipes.scaling.noise import of_median, together
from recipes.scaling.timings import COLUMNS, OF_ONE_PROCESS, Timing

K = TypeVar("K")
# Efficiency from which a band begins. Slower than a smaller size is negative, whatever it is.
EXCELLENT, GOOD = 0.85, 0.70
NEGATIVE = "negative scaling"
# From here on an efficiency is called superlinear; a little above 1 may be noise.
SUPERLINEAR = 1.1
# Epochs are the same work if their samples differ by less than this ratio: the last batch may be
# left out.
_SAME_WORK = 1.1
_ONE_TIMING = 0.02  # by this share a single timing may be off: no repeats say


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
    speedup divided by the ratio of the world sizes. `off` is the share by which the median may be
    off, None for a single one. `band` is empty for the smallest size. `slower_than` is the number
    of processes of the size that is faster although smaller.
    """

    num_processes: int
    repeats: int
    epoch_time: Spread
    samples_per_second: Spread | None
    tokens_per_second: float | None
    speedup: Spread
    efficiency: Spread
    off: float | None
    accuracy: float | None
    typical: Timing
    losses: Losses
    band: str = ""
    slower_than: int | None = None

    @property
    def cause(self) -> str | None:
        """The key of the main cause; None if none is worth naming or none can be told."""
        return self.losses.named[0].key if self.losses.named else None


@dataclass(frozen=True)
class Series:
    """One training at several world sizes, the smallest first, and its rows.

    `karp_flatt` are the serial fractions at each size above the smallest, empty below three sizes
    and where the work of a step or epoch is not `fixed`. `serial_fraction` is Amdahl's, None where
    his law does not describe the sizes.
    """

    name: str
    recipe: str
    scaling: str
    sizes: tuple[Size, ...]
    rows: tuple[Timing, ...]
    fixed: bool
    karp_flatt: tuple[float, ...] = ()
    serial_fraction: float | None = None

    @property
    def title(self) -> str:
        return ", ".join(filter(None, [self.name, self.recipe, f"{self.scaling} scaling"]))

    @property
    def best(self) -> Size:
        return max(self.sizes, key=lambda size: size.speedup.median)


def analyse(rows: Iterable[Timing]) -> list[Series]:
    """The series in the rows, those of one training together.

    Rows that try a recommendation are left out.
    """
    named = _named([row for row in rows if not row.applied])
    found = []
    for training in _grouped(named, lambda row: (row.name, row.recipe)).values():
        curves = _grouped(_with_scaling(training), lambda row: (row.name, row.recipe, row.scaling))
        same = [row for own in curves.values() for row in own]
        found += [_series(key, own, same) for key, own in curves.items()]
    return found


def _grouped(rows: Iterable[Timing], key: Callable[[Timing], K]) -> dict[K, list[Timing]]:
    groups: dict[K, list[Timing]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


# --- Rows of jobs --------------------------------------------------------------------------------

_EACH = {"strong": "global batch", "weak": "batch per process"}  # what all sizes of a kind share


def _batch(kind: str, row: Timing) -> float:
    return (row.global_batch or 0) / (row.num_processes if kind == "weak" else 1)


def _is_of_a_job(row: Timing) -> bool:
    return not row.scaling and bool(row.engine) and row.global_batch is not None


def _flags(row: Timing) -> frozenset[str]:
    """What was trained and how, whatever the order: each flag with its values, "max_length 512"."""
    return frozenset(filter(None, re.split(r"(?:^|\s+)--", row.command)))


def _named(rows: Sequence[Timing]) -> list[Timing]:
    """The rows, those of jobs under the name of their training.

    Jobs are often named after their size: where names never meet at one size, one stands for
    all. Where one name has several trainings, it gets the flags in which they differ.
    """
    jobs = [row for row in rows if _is_of_a_job(row)]
    names: dict[int, str] = {}  # by the row's id
    for own in _grouped(jobs, lambda row: (row.recipe, _flags(row))).values():
        points = {(row.name, row.num_processes, row.global_batch) for row in own}
        by_size = len({point[1:] for point in points}) == len(points)
        names |= {id(row): min(one.name for one in own) if by_size else row.name for row in own}
    trainings = _grouped(jobs, lambda row: (names[id(row)], row.recipe))
    shared = {key: frozenset.intersection(*map(_flags, alike)) for key, alike in trainings.items()}
    found = []
    for row in rows:
        if name := names.get(id(row)):
            own_flags = sorted(_flags(row) - shared[name, row.recipe])
            row = replace(row, name=f"{name} ({', '.join(own_flags)})" if own_flags else name)
        found.append(row)
    return found


def _with_scaling(training: Sequence[Timing]) -> list[Timing]:
    """The rows of one training, each with its kind of scaling.

    A job's row is there once for each kind that it shows beside the others: strong where sizes
    share the global batch, weak where they share that of a process. A row that pairs with none is
    strong scaling by itself.
    """
    jobs = [row for row in training if _is_of_a_job(row)]
    several: dict[str, set[float]] = {}  # by kind: the batches at which there is more than one size
    for kind in _EACH:
        worlds = {(_batch(kind, job), job.num_processes) for job in jobs}
        several[kind] = {batch for batch, count in Counter(batch for batch, _ in worlds).items() if count > 1}
    found = []
    for row in training:
        if not _is_of_a_job(row):
            found.append(replace(row, scaling=row.scaling or "strong"))
            continue
        kinds = {kind: len(several[kind]) > 1 for kind in _EACH if _batch(kind, row) in several[kind]}
        for kind, labelled in (kinds or {"strong": len(jobs) > 1}).items():
            label = f", {_EACH[kind]} {_batch(kind, row):g}" if labelled else ""
            found.append(replace(row, scaling=kind, name=row.name + label))
    return found


# --- Sizes ---------------------------------------------------------------------------------------


def _series(key: tuple[str, str, str], own: list[Timing], same: Sequence[Timing]) -> Series:
    if not all(row.samples for row in own):  # then epochs are compared, whatever their samples
        own = [replace(row, samples=None) for row in own]
    by_world = sorted(_grouped(own, lambda row: row.num_processes).items())
    sizes: list[Size] = []
    for _, rows in by_world:
        sizes.append(_size(rows, by_world[0][1], sizes, same))
    batches, samples = {size.typical.global_batch for size in sizes}, [size.typical.samples or 1 for size in sizes]
    fixed = (len(batches) == 1 and None not in batches) or max(samples) <= _SAME_WORK * min(samples)
    found = Series(*key, tuple(sizes), tuple(own), fixed and key[2] == "strong")
    return _with_law(found) if found.fixed and len(sizes) > 2 else found


def _size(rows: list[Timing], base: list[Timing], smaller: Sequence[Size], same: Sequence[Timing]) -> Size:
    """The size of `rows`; `base` are those of the series' smallest world.

    Throughput is that of samples; of tokens where samples are unknown; else of epochs.
    """
    world, typical = rows[0].num_processes, _typical(rows)
    count = "samples" if base[0].samples else "tokens" if all(row.tokens for row in [*base, *rows]) else ""
    each = [_each(row, count) for row in rows]
    own, reference = spread(each), spread([_each(row, count) for row in base]).median
    speedup = Spread(reference / own.median, reference / own.high, reference / own.low)
    times = base[0].num_processes / world
    efficiency = Spread(speedup.median * times, speedup.low * times, speedup.high * times)
    off = of_median(each) / own.median if len(each) > 1 else None
    best = max(smaller, key=lambda other: other.speedup.median, default=None)
    slower_than, named = None, band(efficiency.median) if smaller else ""
    if best and best.speedup.median / speedup.median - 1 > (together(best.off, off) or 1e-9):
        slower_than, named = best.num_processes, NEGATIVE
    tokens = [row.tokens / row.epoch_time for row in rows if row.tokens]
    return Size(
        num_processes=world,
        repeats=len(rows),
        epoch_time=spread([row.epoch_time for row in rows]),
        samples_per_second=Spread(1 / own.median, 1 / own.high, 1 / own.low) if rows[0].samples else None,
        tokens_per_second=median(tokens) if tokens else None,
        speedup=speedup,
        efficiency=efficiency,
        off=off,
        accuracy=max((row.accuracy for row in rows if row.accuracy is not None), default=None),
        typical=typical,
        losses=losses_of(typical, same, rows),
        band=named,
        slower_than=slower_than,
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
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(median(values), low, high)


def _typical(rows: Sequence[Timing]) -> Timing:
    """The median of every numeric column, the lower one for counts; text as in the first row.

    The slowest process is unknown if it is not the same one in all rows.
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
    """The band of an efficiency, rounded to the digits that are printed: 85.0% is excellent."""
    efficiency = round(efficiency, 3)
    return "excellent" if efficiency >= EXCELLENT else "good" if efficiency >= GOOD else "poor"


def _with_law(series: Series) -> Series:
    """The series with its serial fractions.

    The experimentally determined ones (Karp and Flatt 1990, "Measuring parallel processor
    performance") are level over the sizes that follow Amdahl's law (Amdahl 1967, "Validity of the
    single processor approach").
    """
    first, *larger = series.sizes
    shares = [1 - first.num_processes / size.num_processes for size in larger]
    excess = [1 / size.speedup.median - 1 + share for size, share in zip(larger, shares, strict=True)]
    series = replace(series, karp_flatt=tuple(over / share for over, share in zip(excess, shares, strict=True)))
    # Least squares of 1/S = s + (1 - s)/p. A superlinear speedup would give a fraction below 0.
    fitted = sum(x * y for x, y in zip(shares, excess, strict=True)) / sum(x * x for x in shares)
    serial = min(max(fitted, 0.0), 1.0)
    for size, share, fraction in zip(larger, shares, series.karp_flatt, strict=True):
        off = (together(first.off, size.off) or _ONE_TIMING) / size.speedup.median / share
        if size.slower_than or abs(max(fraction, 0.0) - serial) > 2 * off:
            return series
    return replace(series, serial_fraction=serial)
