"""The place of a run: its processes, their machine, and how they are launched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from recipes.run import hardware
from recipes.run.engine import Engine, from_yaml
from recipes.run.files import find_yaml
from recipes.run.hardware import Hardware


@dataclass(frozen=True)
class Place:
    """The processes of a run and their machine, before the launch or in a launched process.

    `world_size` counts all processes, `local_world_size` those of a node. `packages` are known to
    be installed where the run goes; None if it trains in this environment. `yaml` is the engine of
    the Accelerate YAML that the user names for the launch; None leaves it to the recipe.
    `launched`: this is a process of train.py, whose variables say which engine is set up.
    `trained_by` is train.py, a script of the user's own, or nobody yet: a plan needs neither a
    model nor data, and never trains the demonstration.
    """

    world_size: int
    local_world_size: int
    hardware: Hardware
    environment: Mapping[str, str]
    packages: frozenset[str] | None = None
    yaml: Engine | None = None
    launched: bool = False
    trained_by: Literal["train.py", "script", "nobody"] = "train.py"

    @property
    def is_elsewhere(self) -> bool:
        return self.packages is not None

    @property
    def by_train_py(self) -> bool:
        return self.trained_by == "train.py"

    @property
    def own_script(self) -> bool:
        return self.trained_by == "script"


def here(
    world_size: int | None = None,
    accelerate_config: str | None = None,
    local_world_size: int | None = None,
    **known: Any,
) -> Place:
    """This machine, as a process finds it; `known` are fields of `Place` that it should not read.

    The world size is the given one, or that of the Accelerate YAML `accelerate_config`, or 1.
    Raises `UserError` if that file cannot be read.
    """
    yaml = from_yaml(find_yaml(accelerate_config)) if accelerate_config else None
    size = world_size or max(1, (yaml and yaml.num_processes) or 1)  # a rule reports a count below 1
    if yaml and world_size:
        yaml = replace(yaml, num_processes=world_size)
    if "hardware" not in known:
        known["hardware"] = hardware.read()
    environment = dict(known.pop("environment", os.environ))
    if yaml and yaml.kind != "deepspeed":  # its launcher exports its own
        environment = {name: value for name, value in environment.items() if not name.startswith("ACCELERATE_DYNAMO_")}
    return Place(size, local_world_size or size, environment=environment, yaml=yaml, **known)
