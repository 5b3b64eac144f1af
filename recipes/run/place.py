"""The place of a run (processes, machine, launch), and the engine that trains the run."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from recipes.catalog import Recipe
from recipes.run import hardware
from recipes.run.engine import Engine, exported_sizes, from_deepspeed, from_environment, from_yaml, sizes_of, with_fsdp
from recipes.run.files import find_yaml, shipped
from recipes.run.hardware import Hardware


@dataclass(frozen=True)
class Place:
    """The processes of a run and their machine, before the launch or in a launched process.

    `world_size` counts all processes, `local_world_size` the processes of one node. If this machine
    will train, `packages` is None; else `packages` are known to be installed on the other machine.
    `yaml` is the engine of the Accelerate YAML that the user names for the launch, or None.
    `launched` is True in a launched process of train.py, whose environment shows the engine that
    the launcher has set up. `trained_by` is train.py, the user's own script, or nobody for a
    command that trains nothing, such as `recipes plan`, `show`, `generate` or `merge`.
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
    """Describe this machine. `known` are fields of `Place` that the caller knows already.

    The world size is `world_size` if given, else `num_processes` of the Accelerate YAML
    `accelerate_config`, else 1. Raises `UserError` if the YAML is missing, empty or no mapping.
    """
    yaml = from_yaml(find_yaml(accelerate_config)) if accelerate_config else None
    size = world_size or max(1, (yaml and yaml.num_processes) or 1)  # a count below 1 counts as 1
    if yaml and world_size:
        yaml = replace(yaml, num_processes=world_size)
    if "hardware" not in known:
        known["hardware"] = hardware.read()
    environment = dict(known.pop("environment", os.environ))
    if yaml and yaml.kind != "deepspeed":  # except under DeepSpeed, accelerate launch overwrites these variables
        environment = {name: value for name, value in environment.items() if not name.startswith("ACCELERATE_DYNAMO_")}
    return Place(size, local_world_size or size, environment=environment, yaml=yaml, **known)


# --- Which engine trains --------------------------------------------------------------------------


def launch_yaml(recipe: Recipe, deepspeed: object) -> Path:
    """Return the Accelerate YAML of a launch if the user names none: the recipe's own YAML, or with
    `--deepspeed` the YAML of plain DDP, because accelerate then refuses DeepSpeed in a YAML.
    """
    return shipped("standard.yaml" if deepspeed else recipe.engine)


def engine_for(recipe: Recipe, place: Place, given: Mapping[str, Any]) -> Engine:
    """Return the engine that trains; for the user's own script, the engine to launch it with.
    `given` are the values that the user wrote. Raises `UserError` if a YAML cannot be read.

    The launch sets up an engine. train.py replaces that engine in two cases: the user gives
    `--deepspeed` or `--fsdp`; or the recipe shards or offloads, and the launch is plain DDP or one
    process. One process ignores `--fsdp`, and FSDP needs GPUs. Process groups get
    their sizes from parallelism_config, else the engine's YAML, else the launcher's variables.
    """
    deepspeed, can_shard = given.get("deepspeed"), place.hardware.can_shard
    launch = _launched_engine(place) if place.launched else place.yaml or from_yaml(launch_yaml(recipe, deepspeed))
    engine = launch
    if deepspeed:
        engine = _inside(launch, from_deepspeed(deepspeed))
    elif launch.kind in ("single", "ddp"):
        own = from_yaml(shipped(recipe.engine))
        if own.kind == "deepspeed" or (own.kind == "fsdp" and can_shard):
            engine = _inside(launch, own)
    if engine.kind in ("ddp", "fsdp") and can_shard and given.get("fsdp"):
        engine = with_fsdp(engine, given["fsdp"], given.get("fsdp_config"))
    sizes, autotp = engine.parallelism, engine.parallelism.autotp
    around = from_environment(place.environment) if place.own_script else None  # a script calls this after the launch
    if around is not None and around.kind == "deepspeed" and not deepspeed:
        autotp = around.parallelism.autotp
    if (config := given.get("parallelism_config")) is not None:
        sizes = sizes_of(vars(config), "argument")
    elif not sizes.source:
        sizes = exported_sizes(place.environment)
    return replace(engine, parallelism=replace(sizes, autotp=autotp))


def _launched_engine(place: Place) -> Engine:
    """Return the engine that a launcher has set up for this process; else the engine of one
    process. On a CPU, accelerate trains plain DDP in an FSDP launch of several processes.
    """
    ignored = () if place.hardware.can_shard else ("ACCELERATE_USE_FSDP",)
    around = from_environment({name: value for name, value in place.environment.items() if name not in ignored})
    return around or from_yaml(shipped("single.yaml"))


def _inside(launch: Engine, engine: Engine) -> Engine:
    """Return `engine`, set up by train.py, with the process count and group sizes of `launch`."""
    sizes = replace(launch.parallelism, autotp=engine.parallelism.autotp)
    return replace(engine, num_processes=launch.num_processes, parallelism=sizes)
