"""`resolve()` makes one `RunSpec` from command line > file > recipe > library default.

This module collects the values that the user wrote. `RunSpec.setting` decides every other value
when someone reads it. A wrong setting does not raise: `resolve` collects the problems, so that
`check` reports all of them at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from recipes import catalog, legal
from recipes.catalog import Recipe
from recipes.errors import Problem, UserError
from recipes.run import recorded
from recipes.run.batch import Batch, split
from recipes.run.command_line import accept, parse, read_config
from recipes.run.engine import Engine
from recipes.run.own_recipe import find_recipe, own_settings
from recipes.run.place import Place, engine_for, here
from recipes.run.spec import BATCH_FIELDS, LIBRARY, RunSpec, Setting, Settings

Given = Mapping[str, Setting]


def resolve(
    argv: Sequence[str] = (),
    place: Place | None = None,
    settings: Settings | None = None,
    settings_source: str = "argument",
) -> RunSpec:
    """Resolve train.py's command line `argv` at a place, by default one process on this machine.

    `settings` are added to `argv` and win over it; `settings_source` is their source. Problems
    are collected in `run.problems`. Raises `UserError` for an unusable --config file or YAML.
    """
    problems: list[Problem] = []
    place = place or here()
    given = {**parse(argv, problems), **accept(settings or {}, settings_source, problems)}
    if (config := given.get("config")) and config.value is not None:
        given = {**_settings_of_file(config.value, given, place, problems), **given}
    recipe = _find_recipe(given, problems)
    given = {**own_settings(recipe), **given}
    if "use_cpu" in given and given["use_cpu"].value:
        place = replace(place, hardware=replace(place.hardware, gpus=()))  # unused GPUs must not decide anything
    engine = engine_for(recipe, place, {name: setting.value for name, setting in given.items()})
    batch = _split(recipe, place, engine, given, problems)
    return RunSpec(recipe, given, place, engine, batch, tuple(problems))


def _settings_of_file(path: str, given: Given, place: Place, problems: list[Problem]) -> Given:
    """The settings in the file of --config: a YAML, or the run.json of a run to be repeated."""
    if not recorded.is_record_at(path):
        return read_config(path, problems)
    record = recorded.read(path, "config")
    values = recorded.to_repeat(record, given, place, problems)
    # Add recorded values that another version, model or machine would derive differently.
    then = replace(place, world_size=record.get("world_size") or 1, yaml=None, launched=False)
    then = replace(then, local_world_size=record.get("local_world_size") or then.world_size)
    values |= recorded.otherwise_here(record, resolve(place=then, settings=values), place)
    return accept({name: value for name, value in values.items() if name not in given}, path, problems)


def _find_recipe(given: Given, problems: list[Problem]) -> Recipe:
    asked = given.get("recipe", Setting("standard", LIBRARY))
    try:
        return find_recipe(asked.value)
    except UserError as error:
        problems += [problem if problem.source else replace(problem, source=asked.source) for problem in error.problems]
        return catalog.standard()


def _split(recipe: Recipe, place: Place, engine: Engine, given: Given, problems: list[Problem]) -> Batch:
    """Split the global batch over the processes. If that is impossible, use a micro-batch of 1."""
    total, micro, accumulation = (given[name].value if name in given else None for name in BATCH_FIELDS)
    if any(size is not None and size < 1 for size in (total, micro, accumulation)):
        return Batch(1, 1, place.world_size, "unknown: a size below 1 was given")  # a rule reports the size
    if not (micro and accumulation):
        total = total or legal.run_flags()["global_batch_size"].default
    try:
        return split(total, place.world_size, recipe.micro_batch_cap, micro, accumulation, engine.parallelism)
    except UserError as error:
        source = " and ".join(sorted({given[name].source for name in BATCH_FIELDS if name in given})) or "default 16"
        problems += [one if one.subject == "num_processes" else replace(one, source=source) for one in error.problems]
        return Batch(1, 1, place.world_size, "unknown: the global batch cannot be split")
