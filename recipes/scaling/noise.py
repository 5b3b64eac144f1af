"""By how much repeated measurements leave a loss open.

The scatter is a median of differences between repeats, so that one repeat that something disturbed
does not hide what the others agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import sqrt
from statistics import median

from recipes.scaling.timings import Timing

# The median of |x - y| of two normal values, in standard deviations.
_PAIR = 0.954
# The standard error of a median of n normal values is this times the deviation over sqrt(n).
_MEDIAN = 1.253
_SURE = 2  # standard errors: about 19 of 20 medians are nearer than that


def uncertain(of: Callable[[Timing], float | None], own: Sequence[Timing], same: Iterable[Timing]) -> float | None:
    """By how much the median of a quantity over the repeats `own` may be off.

    The scatter is that of these repeats or, if larger, of all sizes in `same`: two or three repeats
    can agree by chance. None for a single row or unknown values.
    """
    values = [value for row in own if (value := of(row)) is not None]
    if len(values) < 2:
        return None
    groups: dict[tuple, list[float]] = {}
    for row in same:
        value = of(row)
        if value is not None and (row.num_processes > 1) == (own[0].num_processes > 1):
            groups.setdefault((row.num_processes, row.scaling, row.global_batch), []).append(value)
    return max(of_median(values), _off(groups.values(), len(values)))


def of_median(values: Sequence[float]) -> float:
    """By how much the median of these values may be off."""
    return _off([values], len(values))


def _off(groups: Iterable[Sequence[float]], count: int) -> float:
    """By how much a median of `count` may be off: repeats scatter as all pairs in each group do."""
    pairs = [abs(one - other) for values in groups for one, other in combinations(values, 2)]
    return _SURE * _MEDIAN * median(pairs) / _PAIR / sqrt(count) if pairs else 0.0


def together(*parts: float | None) -> float | None:
    """The uncertainty of a sum or difference; None if nothing is known of any part."""
    known = [part for part in parts if part is not None]
    return sqrt(sum(part**2 for part in known)) if known else None
