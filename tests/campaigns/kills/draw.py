"""Draws when a training is killed, mostly while it writes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from random import Random

from tests.campaigns.moment import BACKGROUND, Moment

# How often a kind of phase is drawn. "step" are those of single steps.
_WEIGHTS = {
    "start": 3,
    "loading": 2,
    "training": 1,
    "step": 2,
    "evaluation": 3,
    "save": 7,
    BACKGROUND: 5,
    "rotation": 4,
    "best model": 3,
    "end": 4,
}
_MOST_KILLS = 4
_LOADING = 8  # events while a checkpoint is loaded; a run that nobody stopped loads none

Counts = list[dict[str, int]]  # of each rank: phase -> events


@dataclass(frozen=True)
class Chain:
    """A training that is killed once in each start, and then started once more."""

    engine: str
    moments: tuple[Moment, ...]

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return f"{self.engine}: " + ", then ".join(map(str, self.moments))


def from_json(text: str) -> Chain:
    content = json.loads(text)
    return Chain(content["engine"], tuple(Moment(**moment) for moment in content["moments"]))


def draw(random: Random, counts: dict[str, Counts]) -> Chain:
    """`counts` are the events of an undisturbed run of each engine that may be drawn."""
    engine = random.choice(sorted(counts))
    moments = [_moment(random, counts[engine], first=number == 0) for number in range(random.randint(1, _MOST_KILLS))]
    return Chain(engine, tuple(moments))


def _moment(random: Random, counts: Counts, first: bool) -> Moment:
    rank = random.randrange(len(counts))
    events = counts[rank] if first else {**counts[rank], "loading": _LOADING}
    phase = _phase(random, events, first)
    last = events[phase] if first else max(1, events[phase] // 2)  # a start that goes on has fewer
    alone = len(counts) > 1 and random.random() < 0.25
    return Moment(phase, random.randint(1, last), _delay(random, phase), rank, alone)


def _phase(random: Random, phases: Iterable[str], first: bool) -> str:
    steps = sorted(phase for phase in phases if phase.startswith("step "))
    found = [*(phase for phase in phases if phase in _WEIGHTS), random.choice(steps if first else steps[-2:])]
    return random.choices(found, [_WEIGHTS[phase.partition(" ")[0] if phase in steps else phase] for phase in found])[0]


def _delay(random: Random, phase: str) -> float:
    longest = random.choice((0.0, 0.0, 0.003, 0.03, 1.5 if phase == "start" else 0.1))
    return round(random.uniform(0, longest), 4)


def draw_chains(random: Random, counts: dict[str, Counts], kills: int) -> list[Chain]:
    """Chains of so many kills together."""
    chains: list[Chain] = []
    while (left := kills - sum(len(chain.moments) for chain in chains)) > 0:
        chain = draw(random, counts)
        chains.append(Chain(chain.engine, chain.moments[:left]))
    return chains
