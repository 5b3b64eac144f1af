"""What law the speedups of one fixed amount of work follow, if any.

The experimentally determined serial fraction (Karp and Flatt 1990, "Measuring parallel processor
performance") tells the laws apart. Level over the sizes, it is Amdahl's. Where it rises, overhead
grows with the processes. Where the speedup itself falls, the universal scalability law is fitted
(Gunther 1993, "A simple capacity model of massively parallel transaction systems").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from recipes.scaling.noise import together

# By this much of the ideal speedup a single timing may be off, if its repeats do not say.
_ONE_TIMING = 0.02
# The share of the speedups by which a fitted curve may miss them.
_FITS = 0.10


@dataclass(frozen=True)
class Point:
    """A world size, its speedup over the smallest, and by which share the repeats leave that open.

    `off` is None for a single timing.
    """

    processes: int
    speedup: float
    off: float | None = None


@dataclass(frozen=True)
class Law:
    """What `kind` of law it is, and its numbers.

    Kinds are "amdahl", "growing overhead", "turns", "none" and, below three sizes, "unknown".
    `serial` is Amdahl's fraction, only for "amdahl". `karp_flatt` are the fractions at each size
    above the smallest. `best` is the number of processes that was fastest. For "turns", `peak` is
    the number at which the fitted curve is highest, None if the curve does not fit.
    """

    kind: str
    best: int
    karp_flatt: tuple[float, ...] = ()
    serial: float | None = None
    peak: float | None = None


def law_of(points: Sequence[Point]) -> Law:
    """The law of strong scaling. The first point is the smallest size, with a speedup of 1."""
    best = max(points, key=lambda point: point.speedup).processes
    if len(points) < 3:
        return Law("unknown", best)
    first, *larger = points
    fractions = tuple(_fraction(point.processes / first.processes, point.speedup) for point in larger)
    if _turns(points):
        return Law("turns", best, fractions, peak=_peak(first.processes, larger))
    off = [_uncertain(point, first.processes) for point in larger]
    if fractions[-1] - max(fractions[0], 0.0) > off[0] + off[-1]:
        return Law("growing overhead", best, fractions)
    serial = _amdahl(larger, first.processes)
    level = all(abs(max(one, 0.0) - serial) <= 2 * by + 1e-9 for one, by in zip(fractions, off, strict=True))
    return Law("amdahl", best, fractions, serial=serial) if level else Law("none", best, fractions)


def _fraction(times: float, speedup: float) -> float:
    """Karp and Flatt's e = (1/S - 1/p) / (1 - 1/p)."""
    return (1 / speedup - 1 / times) / (1 - 1 / times)


def _turns(points: Sequence[Point]) -> bool:
    """Whether a size is slower than a smaller one by more than their repeats differ."""
    return any(
        earlier.speedup / later.speedup - 1 > (together(earlier.off, later.off) or 1e-9)
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
    )


def _uncertain(point: Point, smallest: int) -> float:
    """By how much the repeats leave a Karp-Flatt fraction open."""
    off = _ONE_TIMING if point.off is None else point.off
    return off / point.speedup / (1 - smallest / point.processes)


def _amdahl(larger: Sequence[Point], smallest: int) -> float:
    """The serial fraction s of 1/S = s + (1 - s)/p, by least squares over the sizes.

    A superlinear speedup would give a negative fraction, which counts as 0. Source: Amdahl 1967,
    "Validity of the single processor approach".
    """
    shares = [1 - smallest / point.processes for point in larger]
    excess = [1 / point.speedup - smallest / point.processes for point in larger]
    found = sum(x * y for x, y in zip(shares, excess, strict=True)) / sum(x * x for x in shares)
    return min(max(found, 0.0), 1.0)


def _peak(smallest: int, larger: Sequence[Point]) -> float | None:
    """Where p / (1 + a(p-1) + b p(p-1)) is highest: at sqrt((1-a)/b).

    p/S - 1 = a(p-1) + b p(p-1) is linear in a and b: least squares, each weighted by 1/(p/S), with
    neither below 0.
    """
    times = [point.processes / smallest for point in larger]
    slowed = [times_p / point.speedup for times_p, point in zip(times, larger, strict=True)]
    one = [(p - 1) / y for p, y in zip(times, slowed, strict=True)]
    two = [p * (p - 1) / y for p, y in zip(times, slowed, strict=True)]
    aim = [(y - 1) / y for y in slowed]
    a, b = _least_squares(one, two, aim)
    if b <= 0 or a >= 1:
        return None
    fitted = [p / (1 + a * (p - 1) + b * p * (p - 1)) for p in times]
    if any(abs(fit / point.speedup - 1) > _FITS for fit, point in zip(fitted, larger, strict=True)):
        return None
    return smallest * sqrt((1 - a) / b)


def _least_squares(one: Sequence[float], two: Sequence[float], aim: Sequence[float]) -> tuple[float, float]:
    """The factors of `one` and `two` that come nearest to `aim`, neither below 0."""

    def dot(left: Sequence[float], right: Sequence[float]) -> float:
        return sum(x * y for x, y in zip(left, right, strict=True))

    determinant = dot(one, one) * dot(two, two) - dot(one, two) ** 2
    if determinant > 0:
        a = (dot(aim, one) * dot(two, two) - dot(aim, two) * dot(one, two)) / determinant
        b = (dot(aim, two) * dot(one, one) - dot(aim, one) * dot(one, two)) / determinant
        if a >= 0 and b >= 0:
            return a, b
    alone = dot(aim, one) / dot(one, one), dot(aim, two) / dot(two, two)

    def missed(side: Sequence[float], factor: float) -> float:
        return sum((factor * x - y) ** 2 for x, y in zip(side, aim, strict=True))

    if missed(one, alone[0]) < missed(two, alone[1]):
        return max(alone[0], 0.0), 0.0
    return 0.0, max(alone[1], 0.0)
