"""Resolving: command line > file > recipe > library default, into one `RunSpec` that everything else reads.

Nothing raises for a wrong setting: problems are collected, so that one run of the check reports them all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from recipes import catalog, legal
from recipes.catalog import Recipe
from recipes.errors import Problem, UserError
from recipes.run.batch import Batch, split
from recipes.run.command_line import accept, nearest, parse, read_config
from recipes.run.engine import Engine, from_deepspeed, from_yaml, shipped
from recipes.run.hardware import Hardware
from recipes.run.hardware import read as read_hardware
from recipes.run.spec import BATCH_FIELDS, LIBRARY, RunSpec, Setting


def resolve(
    argv: Sequence[str] = (),
    *,
    settings: Mapping[str, Any] | None = None,
    world_size: int | None = None,
    local_world_size: int | None = None,
    hardware: Hardware | None = None,
    engine: Engine | None = None,
    accelerate_config: str | None = None,
    environment: Mapping[str, str] | None = None,
    demonstrate: bool = True,
    elsewhere: frozenset[str] | None = None,
) -> RunSpec:
    """Resolve train.py's command line `argv` (and keyword `settings`, which count the same) into a run.

    The world size is the given one, else the Accelerate YAML's, else 1. Problems are in `run.problems`.
    `demonstrate` false leaves the demonstration's settings out where no model and data are named.
    """
    problems: list[Problem] = []
    given = parse(argv, problems)
    given |= accept(settings or {}, "argument", problems)
    if "config" in given:
        given = {**read_config(given["config"].value, problems), **given}
    recipe = _find_recipe(given, problems)
    yaml_engine = from_yaml(accelerate_config) if accelerate_config else None
    own = given.get("deepspeed")
    engine = engine or yaml_engine or (from_deepspeed(own.value) if own else from_yaml(shipped(recipe.engine)))
    world = world_size or (yaml_engine.num_processes if yaml_engine else None) or 1
    hardware = hardware if hardware is not None else read_hardware()
    if "use_cpu" in given and given["use_cpu"].value:
        hardware = replace(hardware, gpus=())  # GPUs that are not to be used decide nothing
    batch = _split(recipe, world, given, problems)
    return RunSpec(
        recipe,
        hardware,
        engine,
        world,
        local_world_size or world,
        given,
        batch,
        tuple(problems),
        os.environ if environment is None else environment,
        demonstrate,
        elsewhere,
    )


def _find_recipe(given: dict[str, Setting], problems: list[Problem]) -> Recipe:
    asked = given.get("recipe", Setting("standard", LIBRARY))
    if asked.value in catalog.RECIPES:
        return catalog.RECIPES[asked.value]()
    fix = nearest(str(asked.value), catalog.RECIPES) or "one of " + ", ".join(catalog.RECIPES)
    problems.append(Problem("recipe", f"there is no recipe {asked.value!r}", fix, asked.source))
    return catalog.standard()


def _split(recipe: Recipe, world: int, given: dict[str, Setting], problems: list[Problem]) -> Batch:
    total, micro, accumulation = (given.get(name) for name in BATCH_FIELDS)
    if any(setting and setting.value < 1 for setting in (total, micro, accumulation)):
        return Batch(1, 1, world, "unknown: a size below 1 was given")  # which the range rules report
    try:
        return split(
            total.value if total else legal.run_flags()["global_batch_size"].default,
            world,
            recipe.micro_batch_cap,
            micro.value if micro else None,
            accumulation.value if accumulation else None,
            total is not None,
        )
    except UserError as error:
        sources = {setting.source for setting in (total, micro, accumulation) if setting} or {"default 16"}
        problems.extend(replace(problem, source=" and ".join(sorted(sources))) for problem in error.problems)
        return Batch(1, 1, world, "unknown: the global batch cannot be split")
