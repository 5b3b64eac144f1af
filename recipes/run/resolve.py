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
from recipes.run import recorded
from recipes.run.batch import Batch, data_parallel_size, split
from recipes.run.command_line import accept, parse, read_config
from recipes.run.engine import Engine, find_yaml, from_deepspeed, from_environment, from_yaml, shipped, with_fsdp
from recipes.run.hardware import Hardware
from recipes.run.hardware import read as read_hardware
from recipes.run.own_recipe import find_recipe, own_settings
from recipes.run.parallelism import Parallelism, from_config, from_variables
from recipes.run.spec import BATCH_FIELDS, LIBRARY, RunSpec, Setting, Settings


def resolve(
    argv: Sequence[str] = (),
    *,
    settings: Settings | None = None,
    settings_source: str = "argument",
    world_size: int | None = None,
    local_world_size: int | None = None,
    hardware: Hardware | None = None,
    engine: Engine | None = None,
    accelerate_config: str | None = None,
    environment: Mapping[str, str] | None = None,
    demonstrate: bool = True,
    elsewhere: frozenset[str] | None = None,
    launched: bool = False,
    own_script: bool = False,
) -> RunSpec:
    """The run of train.py's command line `argv`, and of `settings`, which count the same and come
    from `settings_source`.

    The world size is the given one, or the Accelerate YAML's, or 1. `environment` is os.environ if
    not given, `hardware` this machine. With `launched`, the engine is the one that a launcher has
    set up for this process. With `demonstrate` false, a run that names no model and no data is not
    train.py's demonstration. `elsewhere` are the packages known to be where the run goes; None if
    it runs here. With `own_script`, a script of the user's own trains, not train.py. Problems are
    in `run.problems`. Raises `UserError` for a file that cannot be read.
    """
    problems: list[Problem] = []
    given = parse(argv, problems)
    given |= accept(settings or {}, settings_source, problems)
    environment = os.environ if environment is None else environment
    hardware = hardware if hardware is not None else read_hardware()
    yaml_engine = from_yaml(find_yaml(accelerate_config)) if accelerate_config else None
    in_yaml = (yaml_engine.num_processes if yaml_engine else None) or 1
    world = world_size or max(1, in_yaml)  # accelerate_yaml reports a count below 1
    if yaml_engine and world_size:
        yaml_engine = replace(yaml_engine, num_processes=world_size)
    if "config" in given and given["config"].value is not None:
        given = {**_settings_of_file(given, world, hardware, environment, problems), **given}
    recipe = _find_recipe(given, problems)
    given = {**own_settings(recipe), **given}
    if yaml_engine and yaml_engine.kind != "deepspeed":  # its launcher exports its own
        environment = {name: value for name, value in environment.items() if not name.startswith("ACCELERATE_DYNAMO_")}
    if "use_cpu" in given and given["use_cpu"].value:
        hardware = replace(hardware, gpus=())  # unused GPUs must not decide anything
    if engine is None:
        if launched:
            engine = launched_engine(recipe, given, environment, hardware)
        else:
            engine = yaml_engine or _chosen_engine(recipe, given)
            if yaml_engine and not own_script:
                engine = _started_under(yaml_engine, recipe, given, hardware) or yaml_engine
        if engine.kind in ("ddp", "fsdp") and hardware.shards and "fsdp" in given and given["fsdp"].value:
            config = given["fsdp_config"].value if "fsdp_config" in given else {}
            engine = with_fsdp(engine, given["fsdp"].value, config)
        engine = _with_parallelism(engine, given, environment, named=yaml_engine is not None)
    if world_size:
        engine = replace(engine, num_processes=world_size)
    # Divided sequences are refused in any world; a DeepSpeed JSON could still divide tensors.
    refused = engine.parallelism.is_refused(own_script=True)
    batch = _split(recipe, world, engine.parallelism, given, [] if refused else problems)
    return RunSpec(
        recipe=recipe,
        hardware=hardware,
        engine=engine,
        world_size=world,
        local_world_size=local_world_size or world,
        given=given,
        batch=batch,
        problems=tuple(problems),
        environment=environment,
        demonstrate=demonstrate,
        launcher=yaml_engine if yaml_engine and yaml_engine.source != engine.source else None,
        elsewhere=elsewhere,
        own_script=own_script,
        launched=launched,
    )


def _settings_of_file(
    given: dict[str, Setting], world: int, hardware: Hardware, environment: Mapping[str, str], problems: list[Problem]
) -> dict[str, Setting]:
    """The settings of --config: a YAML's, or those that repeat the run of a run.json."""
    path = given["config"].value
    if not recorded.is_record_at(path):
        return read_config(path, problems)
    record = recorded.read(path, "config")
    processes = record.get("world_size") or 1
    same_world = world == processes
    values = recorded.at_their_place(recorded.written(record, same_world), record, given, problems, path)
    pushed = record["settings"].get("push_to_hub", {}).get("value")
    pushes = given["push_to_hub"].value if "push_to_hub" in given else pushed
    values = recorded.without_secrets(values, given, bool(environment.get("HF_TOKEN")), pushes, problems)
    derived = resolve(
        settings=values,
        world_size=processes,
        local_world_size=record.get("local_world_size"),
        hardware=hardware,
        environment=environment,
    )
    values |= recorded.otherwise_here(record, derived, same_world)
    return accept({name: value for name, value in values.items() if name not in given}, path, problems)


def _chosen_engine(recipe: Recipe, given: Settings) -> Engine:
    """The engine of a run for which no Accelerate YAML is named."""
    own = given.get("deepspeed")
    return from_deepspeed(own.value) if own else from_yaml(shipped(recipe.engine))


def launched_engine(recipe: Recipe, given: Settings, environment: Mapping[str, str], hardware: Hardware) -> Engine:
    """The engine of a process that a launcher has started. accelerate uses FSDP on GPUs only: on a
    CPU the same launch is DDP.
    """
    ignored = () if hardware.shards else ("ACCELERATE_USE_FSDP",)
    around = from_environment({name: value for name, value in environment.items() if name not in ignored})
    around = around or from_yaml(shipped("single.yaml"))
    return _started_under(around, recipe, given, hardware) or around


def _started_under(around: Engine, recipe: Recipe, given: Settings, hardware: Hardware) -> Engine | None:
    """The engine that train.py starts itself; None if it trains on the launched one.

    Trainer prefers `--deepspeed` to any launched engine. And under plain DDP a recipe that shards
    or offloads would do neither, so such a recipe starts FSDP or DeepSpeed, with its own YAML.
    """
    own = given.get("deepspeed")
    if own and own.value:
        engine = from_deepspeed(own.value)
    elif around.kind in ("single", "ddp"):
        engine = from_yaml(shipped(recipe.engine))
        if engine.kind not in (("deepspeed", "fsdp") if hardware.shards else ("deepspeed",)):
            return None
    else:
        return None
    sizes = replace(around.parallelism, autotp=engine.parallelism.autotp)  # those that the launch exports
    return replace(engine, num_processes=around.num_processes, parallelism=sizes)


def _with_parallelism(engine: Engine, given: Settings, environment: Mapping[str, str], named: bool) -> Engine:
    """The engine with parallelism that its own YAML or JSON does not tell.

    Trainer prefers the arguments `parallelism_config` and `deepspeed` to what the launcher exports.
    The launcher hands on the variables that it finds, unless its YAML (`named`) has sizes.
    """
    sizes = engine.parallelism if engine.parallelism.source else from_variables(environment)
    around = None if named else from_environment(environment)
    autotp = engine.parallelism.autotp if around is None or around.kind != "deepspeed" else around.parallelism.autotp
    config, own = (given[name].value if name in given else None for name in ("parallelism_config", "deepspeed"))
    if config is not None:
        sizes = from_config(config)
    if own:
        autotp = from_deepspeed(own).parallelism.autotp
    return replace(engine, parallelism=replace(sizes, autotp=autotp))


def _find_recipe(given: dict[str, Setting], problems: list[Problem]) -> Recipe:
    asked = given.get("recipe", Setting("standard", LIBRARY))
    try:
        return find_recipe(asked.value)
    except UserError as error:
        problems += [problem if problem.source else replace(problem, source=asked.source) for problem in error.problems]
        return catalog.standard()


def _split(
    recipe: Recipe, world: int, parallelism: Parallelism, given: dict[str, Setting], problems: list[Problem]
) -> Batch:
    total, micro, accumulation = (given.get(name) for name in BATCH_FIELDS)
    if any(setting and setting.value < 1 for setting in (total, micro, accumulation)):
        return Batch(1, 1, world, "unknown: a size below 1 was given")  # rules.values reports it
    try:
        groups = data_parallel_size(world, parallelism)
    except UserError as error:
        problems.extend(error.problems)
        return Batch(1, 1, 1, "unknown: the processes cannot be divided")
    try:
        return split(
            total.value if total else legal.run_flags()["global_batch_size"].default,
            groups,
            recipe.micro_batch_cap,
            micro.value if micro else None,
            accumulation.value if accumulation else None,
            total is not None,
            parallelism.sharing,
        )
    except UserError as error:
        sources = {setting.source for setting in (total, micro, accumulation) if setting} or {"default 16"}
        problems.extend(replace(problem, source=" and ".join(sorted(sources))) for problem in error.problems)
        return Batch(1, 1, groups, "unknown: the global batch cannot be split")
