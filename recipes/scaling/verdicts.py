"""What timings say: speedup, efficiency, and a sentence or two on what each size loses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.scaling.causes import WORTH_NAMING, Cause, bound_of, causes_of, hides_communication
from recipes.scaling.laws import Law, Point, law_of
from recipes.scaling.noise import together
from recipes.scaling.pairing import is_same_training, paired
from recipes.scaling.row import Timing
from recipes.scaling.sentences import words_of
from recipes.scaling.sizes import (
    NEGATIVE,
    SUPERLINEAR,
    UNCLEAR,
    Size,
    Verdict,
    band,
    faster_and_smaller,
    size_of,
    worth_naming,
)

# Epochs are the same work if their samples differ by less than this ratio: the last batch may be
# left out.
_SAME_WORK = 1.1


@dataclass(frozen=True)
class Series:
    """One training at several world sizes.

    `law` is what its speedups follow; None for weak scaling, and for epochs of different work.
    """

    name: str
    recipe: str
    scaling: str
    sizes: tuple[Size, ...]
    verdicts: tuple[Verdict, ...]
    law: Law | None

    @property
    def serial_fraction(self) -> float | None:
        """Amdahl's, where his law describes the sizes."""
        return self.law.serial if self.law else None

    @property
    def title(self) -> str:
        return ", ".join(filter(None, [self.name, self.recipe, f"{self.scaling} scaling"]))


def analyse(rows: Sequence[Timing]) -> list[Series]:
    """The series in the rows, in the order of their first rows.

    Rows that try a recommendation are left out.
    """
    rows = paired([row for row in rows if not row.applied])
    groups: dict[tuple[str, str, str], list[Timing]] = {}
    for row in rows:
        groups.setdefault((row.name, row.recipe, row.scaling), []).append(row)
    return [_series(key, own, rows) for key, own in groups.items()]


def _series(key: tuple[str, str, str], own: list[Timing], rows: list[Timing]) -> Series:
    if not all(row.samples for row in own):  # then epochs are compared, whatever their samples
        own = [dataclasses.replace(row, samples=None) for row in own]
    worlds = sorted({row.num_processes for row in own})
    by_world = {world: [row for row in own if row.num_processes == world] for world in worlds}
    sizes = tuple(size_of(world, by_world[world], by_world[worlds[0]]) for world in worlds)
    same = [row for row in rows if is_same_training(row, own[0])]
    verdicts = tuple(
        verdict_of(size, sizes[:number], same, by_world[size.num_processes], only=len(sizes) == 1)
        for number, size in enumerate(sizes)
    )
    same_work = key[2] == "strong" and _is_same_work([size.typical for size in sizes])
    points = [Point(size.num_processes, size.speedup.median, together(sizes[0].off, size.off)) for size in sizes]
    return Series(*key, sizes, verdicts, law_of(points) if same_work else None)


def _is_same_work(rows: Sequence[Timing]) -> bool:
    """Whether the sizes share the work of a step or of an epoch, as Amdahl's law assumes."""
    batches, samples = {row.batch.total for row in rows}, [row.samples or 1 for row in rows]
    return (len(batches) == 1 and None not in batches) or max(samples) <= _SAME_WORK * min(samples)


# --- Verdicts ------------------------------------------------------------------------------------


def verdict_of(
    size: Size, smaller: Sequence[Size], same: Sequence[Timing], repeats: Sequence[Timing], only: bool
) -> Verdict:
    """The verdict on one size, after those of the `smaller` ones, smallest first.

    `same` are all rows of that training and recipe; the references are among them.
    """
    faster = faster_and_smaller(size, smaller)
    name = "" if not smaller else NEGATIVE if faster else band(size.efficiency.median)
    if smaller and _questionable(size):
        name = UNCLEAR
    causes, lost, unexplained = causes_of(size.typical, same, repeats)
    bound = bound_of(size.typical, same)
    if bound and unexplained:
        unexplained = max(0.0, unexplained - bound.seconds)
    undecided = _undecided(size, causes, lost, bound)
    clear = [] if undecided else worth_naming(causes)
    found = Verdict(
        num_processes=size.num_processes,
        band=name,
        words="",
        cause=clear[0].key if clear else None,
        causes=tuple(causes),
        lost=lost,
        unexplained=unexplained,
        undecided=undecided,
        bound=bound,
        slower_than=faster.num_processes if faster else None,
    )
    return dataclasses.replace(found, words=words_of(found, size, smaller, only))


def _questionable(size: Size) -> bool:
    """Whether weak scaling looks like strong: the epoch got shorter, and nobody counted samples."""
    row = size.typical
    counted = row.samples or row.tokens
    return row.scaling == "weak" and not counted and size.efficiency.median > SUPERLINEAR


def _undecided(size: Size, causes: Sequence[Cause], lost: float | None, bound: Cause | None) -> str:
    """Why no cause can be told: "noise", "bound", "hidden", "no reference", or empty.

    A cause that the noise covers hides every smaller one.
    """
    clear = worth_naming(causes)
    largest = max((cause.seconds for cause in clear), default=0.0)
    covered = [cause for cause in causes if cause.share >= WORTH_NAMING and not cause.clear]
    if any(cause.seconds > largest for cause in covered):
        return "noise"
    if bound and bound.share >= WORTH_NAMING and bound.seconds > largest:
        return "bound"
    if not clear and not bound and hides_communication(size.typical) and size.typical.step_time:
        return "hidden"
    if not clear and lost is None and size.typical.step_time and size.num_processes > 1:
        return "no reference"
    return ""
