"""A few small traces instead of every large one: of another batch, a deep model, a long sequence.

`at_batch` and `of_depth` raise `ValueError` if their two traces show something else than that each
further sequence, or layer, does the same.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from recipes.planner.shapes import LOOP, Allocation, Moment, Traced

Times = tuple[int | None, int | None]

_DIFFERENT = "the two ran different operations"


def at_length(three: Sequence[Traced], length: float) -> Traced:
    """The trace of sequences `length` times as long as the first of three, equally further apart.

    For models that loop over a sequence. Of each trace two moments are enough: where activations
    are fullest, and where all gradients are made: in between one grows as the other falls. They are
    of the second degree in the length, as the scores of attention are.
    """
    weights = [(length - 2) * (length - 3) / 2, -(length - 1) * (length - 3), (length - 1) * (length - 2) / 2]
    moments = []
    for fullest in (lambda moment: (moment[0] + moment[1], moment[2]), lambda moment: (moment[2], sum(moment))):
        each = [max(one.moments, key=fullest) for one in three]
        sizes = [
            round(sum(weight * moment[part] for weight, moment in zip(weights, each, strict=True))) for part in range(3)
        ]
        moments.append((max(0, sizes[0]), max(0, sizes[1]), max(0, sizes[2])))
    return Traced(moments, forward=1, kernels=three[0].kernels | {LOOP})


class Depths(NamedTuple):
    """Layers of the two models to trace for a deep one, and pieces that it has beyond the first."""

    shallow: int
    deeper: int
    times: int


def depths(kinds: Sequence[object], pieces: int = 1) -> Depths | None:
    """The shortest models that end as one with these kinds of layers does. None without a period.

    After some first layers, as the dense ones before experts, kinds repeat: each layer is as the
    one before it, or as in Gemma 3 the sixth before it. The shallow model has so many such pieces,
    or two of several layers.
    """
    found = []
    for period in range(1, len(kinds) // 3 + 1):
        before = len(kinds) - period
        while before and kinds[before - 1] == kinds[before - 1 + period]:
            before -= 1
        shallow = before + (len(kinds) - before) % period + period * (pieces if period == 1 else 2)
        if shallow + period < len(kinds):
            found.append(Depths(shallow, shallow + period, (len(kinds) - shallow) // period))
    return min(found, key=lambda one: one.deeper, default=None)


def at_batch(two: Traced, three: Traced, batch: float) -> Traced:
    """The trace of `batch` sequences from those of two and three: each further one adds the same.

    A part of a sequence is a shorter one: nearly everything grows with the number of tokens.

    One sequence runs slightly different operations than two: on the models in the tests, its
    extrapolation is at most 0.2 % off.
    """
    times = batch - 2
    if [one[1:] for one in two.allocations] != [other[1:] for other in three.allocations]:
        raise ValueError(_DIFFERENT)
    pairs = zip(two.allocations, three.allocations, strict=True)
    allocations = [Allocation(_size(one.size, other.size, times), *one[1:]) for one, other in pairs]
    return replace(two, moments=_further(two.moments, three.moments, times), allocations=allocations)


def _size(one: int, other: int, times: float) -> int:
    return max(0, round(one + (other - one) * times))


def _further(first: list[Moment], second: list[Moment], times: float) -> list[Moment]:
    """`first` plus `times` the difference between the two, moment by moment."""
    pairs = zip(first, second, strict=True)
    return [
        (round(a + (x - a) * times), round(b + (y - b) * times), round(c + (z - c) * times))
        for (a, b, c), (x, y, z) in pairs
    ]


def of_depth(shallow: Traced, deeper: Traced, times: int) -> Traced:
    """The trace of a model with `times` as many more layers than `shallow` as `deeper` has.

    A piece of the forward, and one of the backward, happens once in `shallow`, twice in `deeper`,
    and `times` + 1 times here. From one time to the next memory grows or falls evenly, so that two
    at either end stand for all.
    """
    # Operations around a piece may have the same names as its own, but other lifetimes.
    for share in (0.5, 0):
        with contextlib.suppress(ValueError):
            return _with_repeated(shallow, deeper, times, _repeated(shallow, deeper, share))
    raise ValueError(_DIFFERENT)


def _with_repeated(shallow: Traced, deeper: Traced, times: int, pieces: list[tuple[int, int, int]]) -> Traced:
    moments: list[Moment] = []
    forward = 0
    for first, last, end in pieces:
        start, added = forward and shallow.forward, last - first
        one = shallow.moments[start:end]
        two = deeper.moments[forward and deeper.forward :][: len(one) + added]
        first, last = first - start, last - start
        moments += _further(one[:first], two[:first], times)
        here, before, after = one[first:last], two[first:last], two[last : last + added]
        for place in sorted({0, 1, times - 1, times}):
            moments += _at_place(here, before, after, times, place)
        moments += _further(one[last:], two[last + added :], times)
        forward = forward or len(moments)
    more = times - 1
    made_forward = deeper.made_forward + more * (deeper.made_forward - shallow.made_forward)
    return Traced(moments, forward, _deep_allocations(shallow, deeper, pieces, more), made_forward, deeper.kernels)


def _at_place(alone: list[Moment], before: list[Moment], after: list[Moment], times: int, place: int) -> list[Moment]:
    """The piece at this place of `times` + 1. It was traced `alone`, and `before` and `after`."""
    return [
        tuple(a + (x - a) * times + (y - x) * place for a, x, y in zip(*each, strict=True))  # type: ignore[misc]
        for each in zip(alone, before, after, strict=True)
    ]


def _repeated(shallow: Traced, deeper: Traced, share: float) -> list[tuple[int, int, int]]:
    """Of forward and backward: where the repeated piece begins and ends in `shallow`, and its end.

    It begins at this share of the operations where it may. An evaluation has no backward.
    """
    found = []
    ends = [(shallow.forward, deeper.forward), (len(shallow.operations), len(deeper.operations))]
    start, other_start = 0, 0
    for end, other_end in ends:
        if start == end and other_start == other_end:
            continue
        one, two = (
            [name for name, _ in trace.operations[part]]
            for trace, part in ((shallow, slice(start, end)), (deeper, slice(other_start, other_end)))
        )
        added = len(two) - len(one)
        # What comes before and after the piece is the same in both.
        earliest = max(0, len(one) - _same(reversed(one), reversed(two)))
        latest = min(_same(one, two), len(one)) - added
        if added <= 0 or earliest > latest:
            raise ValueError(_DIFFERENT)
        first = start + earliest + int((latest - earliest) * share)
        found.append((first, first + added, end))
        start, other_start = end, other_end
    return found


def _same(one: Iterable[str], two: Iterable[str]) -> int:
    """How many operations are the same from the start."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


def _deep_allocations(
    shallow: Traced, deeper: Traced, pieces: list[tuple[int, int, int]], more: int
) -> list[Allocation]:
    """What a model with `more` such pieces than `deeper` allocates.

    When something is freed is linear in the number of these pieces, and in the place of its own
    among them.
    """
    forward = deeper.made_forward - shallow.made_forward
    backward = len(deeper.allocations) - len(shallow.allocations) - forward
    found: list[Allocation] = []
    start = 0
    for (first, last, end), added in zip(pieces, (forward, backward), strict=False):
        first, last, end = (_made(shallow, operation) - start for operation in (first, last, end))
        if added != last - first:
            raise ValueError(_DIFFERENT)
        one = shallow.allocations[start : start + end]
        two = deeper.allocations[start and deeper.made_forward :][: len(one) + added]
        found += [_later(*pair, more, forward, backward) for pair in zip(one[:first], two[:first], strict=True)]
        piece = list(zip(one[first:last], two[first:last], two[last : last + added], strict=True))
        for place in range(more + 2):
            for alone, before, after in piece:
                step = _step(before, after, (added, 0, -backward))
                found.append(_moved(_later(alone, before, more, forward, backward), step, place))
        found += [_later(*pair, more, forward, backward) for pair in zip(one[last:], two[last + added :], strict=True)]
        start += end
    return found


def _made(traced: Traced, operation: int) -> int:
    """Allocations before this operation."""
    return traced.operations[operation - 1][1] if operation else 0


def _later(one: Allocation, same: Allocation, more: int, forward: int, backward: int) -> Allocation:
    """The same allocation in a model with `more` layers than the second one has."""
    return _moved(same, _step(one, same, (0, forward, backward, forward + backward)), more)


def _step(one: Allocation, other: Allocation, possible: Sequence[int]) -> Times:
    """By how much the second one is freed, and complete, later."""
    if one.size != other.size:
        raise ValueError(_DIFFERENT)
    steps: list[int | None] = []
    for before, after in zip(one[1:], other[1:], strict=True):
        if before is None or after is None:
            if before is not after:
                raise ValueError(_DIFFERENT)
            steps.append(None)
        elif after - before in possible:
            steps.append(after - before)
        else:
            raise ValueError(_DIFFERENT)
    return steps[0], steps[1]


def _moved(one: Allocation, step: Times, times: int) -> Allocation:
    freed, complete = (
        None if time is None or each is None else time + each * times for time, each in zip(one[1:], step, strict=True)
    )
    return Allocation(one.size, freed, complete)
