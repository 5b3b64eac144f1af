"""`resolve()`: command line > file > recipe > library default, together in one `RunSpec`.

A wrong setting does not raise: problems are collected, so that `check` reports all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from recipes import catalog, legal
from recipes.catalog import Recipe
from recipes.errors import Problem, UserError
from recipes.run.batch import Batch, split
from recipes.run.command_line import accept, parse, read_config
from recipes.run.engine import Engine, from_deepspeed, from_yaml, shipped
from recipes.run.hardware import Hardware
from recipes.run.hardware import read as read_hardware
from recipes.run.own_recipe import find_recipe, own_settings
from recipes.run.spec import BATCH_FIELDS, LIBRARY, RunSpec, Setting, Settings


def resolve(
    argv: Sequence[str] = (),
    *,
    settings: Settings | None = None,
    world_size: int | None = None,
    local_world_size: int | None = None,
    hardware: Hardware | None = None,
    engine: Engine | None = None,
    accelerate_config: str | None = None,
    environment: Mapping[str, str] | None = None,
    demonstrate: bool = True,
    elsewhere: frozenset[str] | None = None,
) -> RunSpec:
    """The run of train.py's command line `argv`, and of `settings`, which count the same.

    The world size is the given one, or the Accelerate YAML's, or 1. `environment` is os.environ if
    not given, `hardware` this machine. With `demonstrate` false, a run that names no model and no
    data is not train.py's demonstration. `elsewhere` are the packages known to be where the run
    goes; None if it runs here. Problems are in `run.problems`. Raises `UserError` for a file that
    cannot be read.
    """
    problems: list[Problem] = []
    given = parse(argv, problems)
    given |= accept(settings or {}, "argument", problems)
    if "config" in given and given["config"].value is not None:
        given = {**read_config(given["config"].value, problems), **given}
    recipe = _find_recipe(given, problems)
    given = {**own_settings(recipe), **given}
    yaml_engine = from_yaml(accelerate_config) if accelerate_config else None
    own = given.get("deepspeed")
    engine = engine or yaml_engine or (from_deepspeed(own.value) if own else from_yaml(shipped(recipe.engine)))
    world = world_size or (yaml_engine.num_processes if yaml_engine else None) or 1
    hardware = hardware if hardware is not None else read_hardware()
    if "use_cpu" in given and given["use_cpu"].value:
        hardware = replace(hardware, gpus=())  # unused GPUs must not decide anything
    batch = _split(recipe, world, given, problems)
    return RunSpec(
        recipe=recipe,
        hardware=hardware,
        engine=engine,
        world_size=world,
        local_world_size=local_world_size or world,
        given=given,
        batch=batch,
        problems=tuple(problems),
        environment=os.environ if environment is None else environment,
        demonstrate=demonstrate,
        elsewhere=elsewhere,
    )


def _find_recipe(given: dict[str, Setting], problems: list[Problem]) -> Recipe:
    asked = given.get("recipe", Setting("standard", LIBRARY))
    try:
        return find_recipe(asked.value)
    except UserError as error:
        problems += [problem if problem.source else replace(problem, source=asked.source) for problem in error.problems]
        return catalog.standard()


def _split(recipe: Recipe, world: int, given: dict[str, Setting], problems: list[Problem]) -> Batch:
    total, micro, accumulation = (given.get(name) for name in BATCH_FIELDS)
    if any(setting and setting.value < 1 for setting in (total, micro, accumulation)):
        return Batch(1, 1, world, "unknown: a size below 1 was given")  # rules.values reports it
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
