"""Whether a resume can use a checkpoint's trainer_state.json.

A resume takes all of it but max_steps, num_train_epochs and what concerns its own process. A wrong
value would end it in a traceback, some at the first step, others at the end.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from launch.host.files import read_regular
from recipes.run import Json

NAME = "trainer_state.json"
_STEPS = ("global_step", "best_global_step")  # these name folders: 4.0 is not 4
_REQUIRED = {"global_step", "max_steps", "log_history"}


def state_faults(checkpoint: Path, step: int | None) -> list[str]:
    """What is wrong with the state of a checkpoint of this step; any step if it is None."""
    try:
        state = json.loads(read_regular(checkpoint / NAME))
    except FileNotFoundError:
        return [f"{NAME} is missing"]
    except (OSError, ValueError):
        return [f"{NAME} cannot be read"]
    if not _is_trainers(state):
        return [f"{NAME} is not Trainer's"]
    if wrong := [f"{NAME} has {name} {json.dumps(value):.40}" for name, value in _wrong(state)]:
        return wrong
    if step is not None and state["global_step"] != step:
        return [f"{NAME} is that of step {state['global_step']}"]
    return []


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint that has no faults."""
    return json.loads(read_regular(checkpoint / NAME))["global_step"]


def epoch_of(checkpoint: Path) -> float:
    """How many epochs a checkpoint that has no faults has trained."""
    return json.loads(read_regular(checkpoint / NAME)).get("epoch", 0.0)


def _is_trainers(state: Any) -> bool:
    """Whether the installed TrainerState accepts it. Fields come and go between versions."""
    from transformers import TrainerState

    try:
        TrainerState(**state)
    except TypeError:
        return False
    return set(state) >= _REQUIRED


def _wrong(state: Json) -> Iterator[tuple[str, Any]]:
    """Names and values that the installed Trainer could not use."""
    from transformers import TrainerState

    hints = get_type_hints(TrainerState)
    whole = {field.name: field.default for field in fields(TrainerState)} | state
    for name, value in whole.items():
        if name == "train_batch_size" and value is None:
            yield name, value  # Trainer divides by it, whatever its type says
        elif name == "stateful_callbacks":  # it is read as a dictionary, and is written as one
            if name in state and not _are_callbacks(value):
                yield name, value
        elif name in state and not _fits(value, hints[name], is_step=name in _STEPS):
            yield name, value


def _fits(value: Any, hint: Any, is_step: bool = False) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, part, is_step) for part in get_args(hint))
    if hint is int:  # --logging_steps 1 is written as 1.0
        return value >= 0 and value % 1 == 0 if type(value) in ((int,) if is_step else (int, float)) else False
    if hint is float:
        return type(value) in (int, float)
    kind = get_origin(hint) or hint
    if kind is list:
        return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
    return isinstance(value, kind)


def _are_callbacks(value: Any) -> bool:
    """Whether it holds, by class name, what one callback or several are made from."""
    if not isinstance(value, dict) or not isinstance(value.get("TrainerControl", {}), dict):
        return False
    saved = [(name, one) for name, ones in value.items() for one in (ones if isinstance(ones, list) else [ones])]
    return all(isinstance(one, dict) and _is_callback(name, one) for name, one in saved)


def _is_callback(name: str, saved: Json) -> bool:
    """Whether its parts have the names and kinds of a new one's. That of a library's subclass may
    be called as the class is, less `Callback`; those that are unknown are made from anything.
    """
    from transformers import trainer_callback

    parts = {part: saved.get(part, {}) for part in ("args", "attributes")}
    if not all(isinstance(values, dict) for values in parts.values()):
        return False
    kind = getattr(trainer_callback, name, None) or getattr(trainer_callback, f"{name}Callback", None)
    if kind is None or not issubclass(kind, trainer_callback.ExportableState):
        return True
    new = kind().state()
    return all(
        key in new[part] and (type(value) is bool) == (type(new[part][key]) is bool) and isinstance(value, int | float)
        for part, values in parts.items()
        for key, value in values.items()
    )
