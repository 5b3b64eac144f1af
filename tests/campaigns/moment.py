"""Ends a training at an exact moment, so that the same seed kills in the same place.

A rank counts events in each phase of its run: Trainer's and torch's own functions as they begin and
end, and every file below the output folder that Python opens, renames or removes. At the drawn
event, or some milliseconds later, it kills itself and all others, or only itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

VARIABLE = "CAMPAIGN_MOMENT"  # in the environment of a rank: a Moment as JSON, or COUNT
COUNT = "count"  # only count the events
HIT = "hit"  # the file that says that the moment came
BACKGROUND = "background"  # what another thread does

# Function of the Trainer or of a module -> the phase that it is; "" if it is only two events.
_OF_TRAINER = {
    "_save_checkpoint": "save",
    "_load_from_checkpoint": "loading",
    "_load_best_model": "best model",
    "evaluation_loop": "evaluation",
    "prediction_step": "",
    "training_step": "step {}",
}
_OF_MODULES = {("transformers.trainer", "rotate_checkpoints"): "rotation", ("torch", "save"): "", ("os", "fsync"): ""}
_FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree"}
_REMOVALS = {"os.remove", "os.rmdir"}


@dataclass(frozen=True)
class Moment:
    """`delay` seconds after the event with this `number` (from 1) of a phase, as `rank` counts.

    `alone`: only that rank is killed. Otherwise all processes of the run, the launcher among them.
    """

    phase: str
    number: int
    delay: float = 0.0
    rank: int = 0
    alone: bool = False
    signal: int = int(signal.SIGKILL)

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.alone else "all"
        return f"{who} at event {self.number} of {self.phase} + {self.delay * 1000:.1f} ms"


class Watch:
    """Counts the events of this rank, and acts at the moment. Phases: `start`, `training`, `end`,
    while they last those of `_OF_TRAINER` and `_OF_MODULES`, and what other threads do.
    """

    def __init__(self, moment: Moment | None, folder: str) -> None:
        self.moment, self.folder = moment, os.path.abspath(folder)  # noqa: PTH100
        self.phases = ["start"]
        self.counts: Counter[str] = Counter()

    def event(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        phase = self.phases[-1] if main else BACKGROUND
        self.counts[phase] += 1
        moment = self.moment
        if moment and (phase, self.counts[phase]) == (moment.phase, moment.number):
            if moment.delay:
                threading.Timer(moment.delay, self.act).start()
            else:
                self.act()

    def act(self) -> None:
        assert self.moment is not None
        os.close(os.open(HIT, os.O_CREAT))
        if self.moment.alone or self.moment.signal != signal.SIGKILL:
            os.kill(os.getpid(), self.moment.signal)
        else:
            os.killpg(os.getpgid(0), signal.SIGKILL)

    def audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in _FILES or not isinstance(arguments[0], str | os.PathLike):
            return
        path = str(arguments[0])  # of a folder that is removed whole, each file without the way to it
        if os.path.abspath(path).startswith(self.folder) or (name in _REMOVALS and "/" not in path):  # noqa: PTH100
            self.event()

    def within(self, phase: str, function: Callable) -> Callable:
        @wraps(function)
        def inside(*args, **kwargs):
            if phase:
                self.phases.append(phase.format(args[0].state.global_step + 1) if "{}" in phase else phase)
            self.event()
            try:
                return function(*args, **kwargs)
            finally:
                self.event()
                if phase:
                    self.phases.pop()

        return inside

    def from_now(self, phase: str, function: Callable) -> Callable:
        @wraps(function)
        def beginning(*args, **kwargs):
            self.phases[:] = [phase]
            self.event()
            return function(*args, **kwargs)

        return beginning


@contextlib.contextmanager
def watched(folder: str) -> Iterator[None]:
    """Watch this rank, which writes to `folder`, if its environment says so.

    What it has counted goes to events-RANK.json in the current folder.
    """
    asked, rank = os.environ.get(VARIABLE), int(os.environ.get("RANK", 0))
    if asked is None:
        yield
        return
    moment = None if asked == COUNT else Moment(**json.loads(asked))
    watch = Watch(moment if moment and moment.rank == rank else None, folder)
    _mark(watch)
    sys.addaudithook(watch.audit)
    watch.event()
    try:
        yield
    finally:
        Path(f"events-{rank}.json").write_text(json.dumps(watch.counts), encoding="utf-8")


def _mark(watch: Watch) -> None:
    from launch.training.trainer import RecipeTrainer

    for name, phase in _OF_TRAINER.items():
        setattr(RecipeTrainer, name, watch.within(phase, getattr(RecipeTrainer, name)))
    for (module, name), phase in _OF_MODULES.items():
        holder = importlib.import_module(module)
        setattr(holder, name, watch.within(phase, getattr(holder, name)))
    RecipeTrainer._inner_training_loop = watch.from_now("training", RecipeTrainer._inner_training_loop)
    RecipeTrainer._finalize_training = watch.from_now("end", RecipeTrainer._finalize_training)
