"""Ends a training at an exact moment, so that the same seed kills in the same place.

A rank counts its events: Trainer's and torch's own functions as they begin and end, and every file
below the output folder that Python opens, renames or removes. At the drawn event, or some
milliseconds later, it kills itself and all others, or only itself.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

VARIABLE = "CAMPAIGN_MOMENT"  # in the environment of a rank: a Moment as JSON, or COUNT
COUNT = "count"  # only count the events
HIT = "hit"  # the file that names the phase in which the moment came
MAIN, BACKGROUND = "main", "background"  # a save goes on in another thread

# Function -> its phase; "" if its begin and end are only two events.
_OF_TRAINER = {
    "_inner_training_loop": "training",
    "_finalize_training": "end",
    "_save_checkpoint": "save",
    "_load_from_checkpoint": "loading",
    "_load_best_model": "best model",
    "evaluation_loop": "evaluation",
    "prediction_step": "",
    "training_step": "step",
}
_OF_MODULES = {("transformers.trainer", "rotate_checkpoints"): "rotation", ("torch", "save"): "", ("os", "fsync"): ""}
_FILES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree"}
_REMOVALS = {"os.remove", "os.rmdir"}


@dataclass(frozen=True)
class Moment:
    """`delay` seconds after the event with this `number` (from 1) of a thread, as `rank` counts.

    `alone`: only that rank is struck. Otherwise all processes of the run, the launcher among them.
    """

    number: int
    delay: float = 0.0
    rank: int = 0
    alone: bool = False
    thread: str = MAIN
    signal: int = int(signal.SIGKILL)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Watch:
    """Keeps the phase of each event of this rank, by its thread, and acts at the moment."""

    def __init__(self, moment: Moment | None, folder: str) -> None:
        self.moment, self.folder = moment, os.path.abspath(folder)  # noqa: PTH100
        self.phases = ["start"]
        self.events: dict[str, list[str]] = {MAIN: [], BACKGROUND: []}

    def event(self) -> None:
        thread = MAIN if threading.current_thread() is threading.main_thread() else BACKGROUND
        phase, moment = self.phases[-1] if thread == MAIN else BACKGROUND, self.moment
        self.events[thread].append(phase)
        if moment and (thread, len(self.events[thread])) == (moment.thread, moment.number):
            if moment.delay:
                threading.Timer(moment.delay, self.act, [phase]).start()
            else:
                self.act(phase)

    def act(self, phase: str) -> None:
        assert self.moment is not None
        handle = os.open(HIT, os.O_CREAT | os.O_WRONLY)
        os.write(handle, phase.encode())
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
            named = f"step {args[0].state.global_step + 1}" if phase == "step" else phase
            self.phases.append(named or self.phases[-1])
            self.event()
            try:
                return function(*args, **kwargs)
            finally:
                self.event()
                self.phases.pop()
                if phase == "training":
                    self.phases[0] = "end"

        return inside


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
    from launch.training.trainer import RecipeTrainer

    for name, phase in _OF_TRAINER.items():
        setattr(RecipeTrainer, name, watch.within(phase, getattr(RecipeTrainer, name)))
    for (module, name), phase in _OF_MODULES.items():
        holder = importlib.import_module(module)
        setattr(holder, name, watch.within(phase, getattr(holder, name)))
    sys.addaudithook(watch.audit)
    watch.event()
    try:
        yield
    finally:
        Path(f"events-{rank}.json").write_text(json.dumps(watch.events), encoding="utf-8")
