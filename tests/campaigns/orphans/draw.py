"""What strikes a run: which signal, whom, and when."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from random import Random

STEPS = 10
LAUNCHERS = ("accelerate launch", "torchrun", "recipes train")
SIGNALS = tuple(signal.Signals[f"SIG{name}"] for name in ("KILL", "STOP", "TERM", "USR1", "HUP"))
_STARTING_SECONDS = 15.0  # how long a start takes on a machine that has nothing else to do
_IN_TRAINING = 0.75  # of the blows


@dataclass(frozen=True)
class Blow:
    """`delay` seconds after the run has logged its `step`, or has started if that is 0. `rank` is
    None for the launcher.
    """

    launcher: str
    processes: int
    signal: str
    rank: int | None
    step: int
    delay: float

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        whom = "the launcher" if self.rank is None else f"rank {self.rank}"
        when = f"{self.delay} s after " + (f"step {self.step}" if self.step else "the start")
        return f"{self.launcher} of {self.processes}: {self.signal} to {whom}, {when}"

    @property
    def saves(self) -> bool:
        """Whether the run is told to stop, and has the time to save."""
        if self.signal == "SIGKILL":
            return self.rank is None
        return self.signal != "SIGSTOP"

    @property
    def hangs(self) -> bool:
        """Whether a rank waits for one that is stopped."""
        return self.signal == "SIGSTOP" and self.rank is not None and self.processes > 1


def from_json(text: str) -> Blow:
    return Blow(**json.loads(text))


def draw(random: Random) -> Blow:
    processes = random.choice((1, 2))
    rank = random.choice((None, *range(processes)))
    step = random.randrange(1, STEPS + 1) if random.random() < _IN_TRAINING else 0
    delay = random.uniform(0, 1 if step else _STARTING_SECONDS)
    return Blow(random.choice(LAUNCHERS), processes, random.choice(SIGNALS).name, rank, step, round(delay, 3))
