"""Simulated trainings that are hard to judge, and whether a verdict on one of them is right.

Hard: two causes at once, noise between runs and within them, ZeRO (whose step cannot run without
its exchange), and a single row. The truth is what the simulator gains without each effect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from recipes.scaling.row import Timing
from recipes.scaling.verdicts import Verdict
from tests.support.simulated import CLEAR, HEALTHY, IDEAL, Training, draw, gains, known_cause, measured

NOISE = (0.03, 0.05, 0.15)  # by which runs differ, as a standard deviation
# What a row without a step without exchange cannot tell apart, and what a single row cannot show.
NEEDS_NO_SYNC = ("communication", "contention", "straggler")
NEEDS_REFERENCE = ("contention", "work")


@dataclass(frozen=True)
class Case:
    """`gains`: the share of a step that is saved without each effect."""

    kind: str  # "one cause", "two causes", "ZeRO" or "single row"
    seed: int
    noise: float
    training: Training
    largest: int
    gains: dict[str, float]
    rows: list[Timing]

    @property
    def first(self) -> str:
        """The largest cause, or "healthy"."""
        largest = max(self.gains, key=lambda cause: self.gains[cause])
        return largest if self.gains[largest] > HEALTHY else "healthy"

    @property
    def acceptable(self) -> set[str]:
        """The causes that may be named first: those that gain about as much as the largest."""
        if self.first == "healthy":
            return {"healthy"}
        return {cause for cause, gain in self.gains.items() if gain >= self.gains[self.first] / 1.5}

    @property
    def effect(self) -> float:
        return self.gains[self.first] if self.first != "healthy" else 0.0

    @property
    def visible(self) -> set[str]:
        """Of what a single row or ZeRO can show, the causes that may be named first."""
        hidden = {"single row": NEEDS_REFERENCE, "ZeRO": NEEDS_NO_SYNC}.get(self.kind, ())
        shown = {cause: gain for cause, gain in self.gains.items() if cause not in hidden and gain > HEALTHY}
        return {cause for cause, gain in shown.items() if gain >= max(shown.values()) / 1.5}

    def outcome(self, verdict: Verdict) -> str:
        """`right`, `undecided` where that is right, `timid` where it is not, or `wrong`."""
        if verdict.cause is None and verdict.undecided:
            return "undecided" if self._undecidable() else "timid"
        named = {cause.key for cause in verdict.named}
        invented = {cause for cause in named if self.gains[cause] < HEALTHY / 2 and self._alone(cause) < HEALTHY}
        of_what_was_measured = self.visible if "Of what was measured" in verdict.words else set()
        right = (verdict.cause or "healthy") in self.acceptable | of_what_was_measured
        return "right" if right and not invented else "wrong"

    def _alone(self, cause: str) -> float:
        """The share of a step that the effect would take if there were no other: none hides it."""
        ideal = {name: value for key, change in IDEAL.items() if key != cause for name, value in change.items()}
        return gains(replace(self.training, **ideal), self.largest)[cause]

    def _undecidable(self) -> bool:
        if self.kind == "ZeRO" and self.acceptable & {*NEEDS_NO_SYNC, "healthy"}:
            return True
        if self.kind == "single row" and self.acceptable & {*NEEDS_REFERENCE, "healthy"}:
            return True
        return self.effect <= 3 * self.noise or self.effect <= self._differ()

    def _differ(self) -> float:
        """By how much repeats of the largest size or of one process differ, as a share."""
        sizes = [[row.step_time for row in self.rows if row.num_processes == world] for world in (1, self.largest)]
        return max((max(steps) / min(steps) - 1 for steps in sizes if steps), default=0.0)


def cases(of_each: int, first_seed: int = 0) -> Iterator[Case]:
    """Cases of every kind and noise: `of_each` for each clear cause, and healthy ones."""
    for kind in ("one cause", "two causes", "ZeRO", "single row"):
        wanted = dict.fromkeys([*IDEAL, "healthy"], of_each * (1 if kind in ("ZeRO", "single row") else len(NOISE)))
        if kind == "two causes":
            wanted.pop("healthy")
        for seed in count(first_seed):
            case = _case(kind, seed, wanted)
            if case:
                wanted[case.first] -= 1
                yield case
            if not any(wanted.values()):
                break


def _case(kind: str, seed: int, wanted: dict[str, int]) -> Case | None:
    random = Random(f"{kind} {seed}")
    training, largest = draw(random, 2 if kind == "two causes" else None)
    found = gains(training, largest)
    if kind == "two causes":
        first, second = sorted(found, key=lambda cause: -found[cause])[:2]
        if found[second] < CLEAR or not wanted[first]:
            return None
    else:
        cause = known_cause(training, largest, found)
        if cause is None or not wanted[cause]:
            return None
    noise = NOISE[seed % len(NOISE)]
    rows = measured(training, largest, random.randint(3, 5), random, noise, random.uniform(0.1, 0.5) * noise)
    if kind == "ZeRO":
        rows = [_zero_like(row) for row in rows]
    if kind == "single row":
        rows = [next(row for row in rows if row.num_processes == largest and row.scaling == "strong")]
    return Case(kind, seed, noise, training, largest, found, rows)


def _zero_like(row: Timing) -> Timing:
    """The row as ZeRO measures it: the backward pass holds the exchange and the wait for others."""
    parts = row.parts
    backward = parts.backward + parts.communication + parts.other
    parts = replace(parts, backward=backward, communication=None, other=0.0)
    return replace(row, parts=parts, no_sync=None, setup=replace(row.setup, engine="deepspeed"))
