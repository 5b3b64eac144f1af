"""This page decides which engine trains a run, before a launch and inside a launched process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.catalog import Recipe
from recipes.run.engine_sources import (
    Engine,
    exported_sizes,
    from_deepspeed,
    from_environment,
    from_yaml,
    sizes_of,
    with_fsdp,
)
from recipes.run.files import shipped
from recipes.run.place import Place


def launch_yaml(recipe: Recipe, deepspeed: object) -> Path:
    """The Accelerate YAML to launch with if the user names none: the recipe's. With `--deepspeed`
    it is plain DDP's, because accelerate refuses DeepSpeed settings in a YAML then.
    """
    return shipped("standard.yaml" if deepspeed else recipe.engine)


def engine_for(recipe: Recipe, place: Place, given: Mapping[str, Any]) -> Engine:
    """The engine that trains; of a script of the user's own, the one to launch it with. `given` are
    the values that the user wrote.

    The launch sets up an engine. train.py replaces that engine in two cases: the user gives
    `--deepspeed` or `--fsdp`; or the recipe shards or offloads, and the launch is plain DDP or one
    process. The sizes of groups are those of the argument parallelism_config, else of the
    engine's YAML, else of the launcher's variables.
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
    around = from_environment(place.environment) if place.own_script else None  # a script asks once it is launched
    if around is not None and around.kind == "deepspeed" and not deepspeed:
        autotp = around.parallelism.autotp
    if (config := given.get("parallelism_config")) is not None:
        sizes = sizes_of(vars(config), "argument")
    elif not sizes.source:
        sizes = exported_sizes(place.environment)
    return replace(engine, parallelism=replace(sizes, autotp=autotp))


def _launched_engine(place: Place) -> Engine:
    """The engine that a launcher has set up for this process. accelerate uses FSDP on GPUs only: on
    a CPU the same launch is DDP.
    """
    ignored = () if place.hardware.can_shard else ("ACCELERATE_USE_FSDP",)
    around = from_environment({name: value for name, value in place.environment.items() if name not in ignored})
    return around or from_yaml(shipped("single.yaml"))


def _inside(launch: Engine, engine: Engine) -> Engine:
    """An engine that train.py starts inside a launch, with the launch's processes and sizes."""
    sizes = replace(launch.parallelism, autotp=engine.parallelism.autotp)
    return replace(engine, num_processes=launch.num_processes, parallelism=sizes)
