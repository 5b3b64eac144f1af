"""The trainer_state.json of a checkpoint: its step, and whether the installed Trainer reads it."""

from __future__ import annotations

import json
from pathlib import Path

from launch.host.files import read_regular

NAME = "trainer_state.json"
_REQUIRED = {"global_step", "max_steps", "log_history"}


def state_faults(checkpoint: Path, step: int | None) -> list[str]:
    """What is wrong with the state of a checkpoint of this step; any step if it is None."""
    from transformers import TrainerState

    try:
        state = json.loads(read_regular(checkpoint / NAME))
        TrainerState(**state)  # fields come and go between versions
    except FileNotFoundError:
        return [f"{NAME} is missing"]
    except TypeError:
        return [f"{NAME} is not Trainer's"]
    except (OSError, ValueError, AttributeError):
        return [f"{NAME} cannot be read"]
    if not set(state) >= _REQUIRED:
        return [f"{NAME} is not Trainer's"]
    if type(state["global_step"]) is not int or step not in (None, state["global_step"]):
        return [f"{NAME} is that of step {state['global_step']}"]
    return []


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint that has no faults."""
    return json.loads(read_regular(checkpoint / NAME))["global_step"]


def epoch_of(checkpoint: Path) -> float:
    """How many epochs a checkpoint that has no faults has trained."""
    return json.loads(read_regular(checkpoint / NAME)).get("epoch", 0.0)
