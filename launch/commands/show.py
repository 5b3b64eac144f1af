"""`recipes list`, `recipes show` and `recipes copy`: what the catalogue holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from launch.flags import Commands, count, spellings
from launch.terminal import plural, print_table
from recipes.catalog import RECIPES, Recipe
from recipes.errors import UserError, mistake

if TYPE_CHECKING:
    from recipes.run import Json, RunSpec, Setting

_NAME = "a shipped recipe, or the file of your own: mine.yaml, mine.py:function"


def add_parser(commands: Commands) -> None:
    listing = commands.add_parser("list", allow_abbrev=False)
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(run=list_recipes)

    show = commands.add_parser("show", allow_abbrev=False)
    show.add_argument("name", metavar="NAME", help=_NAME)
    show.add_argument("--diff", metavar="OTHER", help="only what differs from another recipe")
    show.add_argument(*spellings("num_processes"), type=count, help="processes in all, one per GPU [1]")
    show.add_argument(*spellings("global_batch_size"), type=count, help="examples per optimizer step [16]")
    show.add_argument("--json", action="store_true")
    show.set_defaults(run=show_recipe)

    copy = commands.add_parser("copy", allow_abbrev=False)
    copy.add_argument("name", metavar="NAME", help=_NAME)
    copy.add_argument("file", metavar="FILE")
    copy.set_defaults(run=copy_recipe)


def list_recipes(options: argparse.Namespace, rest: list[str]) -> int:
    recipes = [build() for build in RECIPES.values()]
    if options.json:
        fields = ("name", "purpose", "engine", "micro_batch_cap")
        print(json.dumps([{name: getattr(recipe, name) for name in fields} for recipe in recipes], indent=2))
        return 0
    rows = [[recipe.name, recipe.engine, recipe.purpose] for recipe in recipes]
    print_table(["recipe", "accelerate_configs/", "what it is for"], rows)
    return 0


def show_recipe(options: argparse.Namespace, rest: list[str]) -> int:
    run = _resolve_recipe(options.name, options)
    if options.diff:
        return _show_difference(run, _resolve_recipe(options.diff, options), as_json=options.json)
    settings = {name: setting for name, setting in run.chosen().items() if name != "recipe"}
    if options.json:
        print(json.dumps(as_json(run, settings), indent=2, default=str))
        return 0
    _print_heading(run)
    rows = [[name, _text(setting.value), setting.source, setting.reason] for name, setting in settings.items()]
    print_table(["setting", "value", "from", "reason"], rows)
    return 0


def _show_difference(run: RunSpec, other: RunSpec, as_json: bool) -> int:
    names = [name for name in run if run[name] != other[name] and name not in ("recipe", "output_dir")]
    if as_json:
        differences = {name: {run["recipe"]: run[name], other["recipe"]: other[name]} for name in names}
        print(json.dumps(differences, indent=2, default=str))
        return 0
    _print_heading(run)
    rows = [[name, _text(run[name]), _text(other[name]), _reason(name, run, other)] for name in names]
    if run.recipe.engine != other.recipe.engine:
        rows.insert(0, ["engine", run.recipe.engine, other.recipe.engine, run.engine_title])
    print_table(["setting", run["recipe"], other["recipe"], "reason"], rows)
    return 0


def _reason(name: str, run: RunSpec, other: RunSpec) -> str:
    """Why this recipe chose the value; if it kept the default, why the other one did not."""
    theirs = other.setting(name).reason
    return run.setting(name).reason or (f"{other['recipe']}: {theirs}" if theirs else "")


def copy_recipe(options: argparse.Namespace, rest: list[str]) -> int:
    from recipes.run import find_recipe

    recipe = find_recipe(options.name)
    target = Path(options.file)
    try:
        with target.open("x", encoding="utf-8") as stream:  # "x": an existing file is never overwritten
            stream.write(_as_yaml(recipe, options.name))
    except FileExistsError:
        raise mistake("FILE", f"{target} exists already", "another name") from None
    except OSError as error:
        raise mistake("FILE", f"{target} cannot be written: {error.strerror}", "choose a writable folder") from None
    print(f"{target}: edit it, then train with --config {target}")
    return 0


def as_json(run: RunSpec, settings: dict[str, Setting]) -> Json:
    """A run and some of its settings for scripts; tokens are hidden."""
    from recipes.run import shown

    return {
        "recipe": run.recipe.name,
        "purpose": run.recipe.purpose,
        "engine": run.recipe.engine,
        "num_processes": run.world_size,
        "data_parallel_size": run.data_parallel_size,
        "hardware": str(run.hardware),
        "settings": {
            name: {**vars(setting), "value": shown(name, setting.value)} for name, setting in settings.items()
        },
    }


def _resolve_recipe(name: str, options: argparse.Namespace) -> RunSpec:
    from recipes.run import resolve  # what is legal is read from the installed libraries: `recipes list` need not wait

    settings = {"recipe": name}
    if options.global_batch_size:
        settings["global_batch_size"] = options.global_batch_size
    run = resolve(settings=settings, world_size=options.num_processes, demonstrate=False)
    if run.problems:
        raise UserError(*run.problems)
    return run


def _as_yaml(recipe: Recipe, given: str) -> str:
    """A file for --config: fixed settings as values, those that depend on the run as comments.

    `given` is what --recipe takes: the recipe's name, or the user's own file.
    """
    engine = Path("accelerate_configs", recipe.engine)  # a user's own YAML is an absolute path
    lines = [f"# {recipe.purpose}", f"# Engine: {engine}", f"recipe: {given}", ""]
    for name, setting in recipe.settings.items():
        if callable(setting):
            decided_by = setting.__name__.replace("_", " ")
            lines += [f"# {name}: decided by the recipe for each machine and run ({decided_by})", ""]
        else:
            value, reason = setting
            lines += [f"# {reason}", f"{name}: {json.dumps(value)}", ""]  # JSON is YAML
    return "\n".join(lines).rstrip() + "\n"


def _print_heading(run: RunSpec) -> None:
    print(f"{run.recipe.name}: {run.recipe.purpose}")
    world = plural(run.world_size, "process")
    print(f"on {run.hardware}, {world}, {run.engine_title} ({run.recipe.engine}), batch {run.batch}\n")


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, (bool, dict, list)) or value is None else str(value)
