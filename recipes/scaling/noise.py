"""The error that repeated measurements leave a value.

The scatter is a median of differences between repeats, so that one repeat that something disturbed
does not hide what the others agree on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt
from statistics import median

# The median of |x - y| of two normal values, in standard deviations.
_PAIR = 0.954
# The standard error of a median of n normal values is this times the deviation over sqrt(n).
_MEDIAN = 1.253
_SURE = 2  # standard errors: about 19 of 20 medians are nearer than that
_MOST = 50  # of the values are compared in pairs


def of_median(values: Sequence[float]) -> float:
    """The error that the median of these values may have; 0 if there are no repeats to say."""
    few = sorted(values)[:: -(-len(values) // _MOST) or 1]
    pairs = [abs(one - other) for one, other in combinations(few, 2)]
    return _SURE * _MEDIAN * median(pairs) / _PAIR / sqrt(len(values)) if pairs else 0.0


def together(*parts: float | None) -> float | None:
    """The uncertainty of a sum or difference; None if nothing is known of any part."""
    known = [part for part in parts if part is not None]
    return sqrt(sum(part**2 for part in known)) if known else None
