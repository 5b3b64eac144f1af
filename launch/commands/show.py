"""`recipes list`, `recipes show` and `recipes copy`: what the catalogue holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from launch.flags import Commands, count, spellings
from launch.output.fields import FIELDS
from launch.terminal import plural, print_table, value_text
from recipes.catalog import RECIPES, Recipe
from recipes.errors import mistake

if TYPE_CHECKING:
    from recipes.run import Json, RunSpec, Setting

_NAME = "a shipped recipe, or the file of your own: mine.yaml, mine.py:function"


def add_parser(commands: Commands) -> None:
    listing = commands.add_parser("list", allow_abbrev=False)
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(run=list_recipes)

    shown = commands.add_parser(
        "show", allow_abbrev=False, epilog=_fields(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shown.add_argument("name", metavar="NAME", help=f"{_NAME}; or a run: its output folder, or run.json")
    shown.add_argument("--diff", metavar="OTHER", help="only what differs from another recipe or run")
    shown.add_argument(*spellings("num_processes"), type=count, help="processes in all, one per GPU [1]")
    shown.add_argument(*spellings("global_batch_size"), type=count, help="examples per optimizer step [16]")
    shown.add_argument("--json", action="store_true", help="for scripts; of a run, its record as it is")
    shown.set_defaults(run=show)

    copy = commands.add_parser("copy", allow_abbrev=False)
    copy.add_argument("name", metavar="NAME", help=_NAME)
    copy.add_argument("file", metavar="FILE")
    copy.set_defaults(run=copy_recipe)


def _fields() -> str:
    lines = [f"  {name:<20}{meaning}" for name, meaning in FIELDS.items()]
    return "\n".join(["fields of a run.json:", *lines, "and Trainer's own results, under its names"])


def list_recipes(options: argparse.Namespace, rest: list[str]) -> int:
    recipes = [build() for build in RECIPES.values()]
    if options.json:
        fields = ("name", "purpose", "engine", "micro_batch_cap")
        print(json.dumps([{name: getattr(recipe, name) for name in fields} for recipe in recipes], indent=2))
        return 0
    rows = [[recipe.name, recipe.engine, recipe.purpose] for recipe in recipes]
    print_table(["recipe", "accelerate_configs/", "what it is for"], rows)
    return 0


def show(options: argparse.Namespace, rest: list[str]) -> int:
    from launch.commands import named  # what is legal is read from the libraries: `recipes list` need not wait

    if options.diff:
        from launch.commands.diff import show_difference

        return show_difference([options.name, options.diff], options)
    if named.is_run(options.name):
        return _show_run(options)
    run = named.resolve_recipe(options.name, options.num_processes, options.global_batch_size)
    settings = {name: setting for name, setting in run.chosen().items() if name != "recipe"}
    if options.json:
        print(json.dumps(as_json(run, settings), indent=2, default=str))
        return 0
    named.print_heading(run)
    rows = [[name, setting.value, setting.source, setting.reason] for name, setting in settings.items()]
    _print_settings([*_of_the_recipe(run.recipe), *rows])
    return 0


def _of_the_recipe(recipe: Recipe) -> list[list]:
    """The rows of its two values that are no settings of train.py."""
    rows = []
    for name in ("engine", "micro_batch_cap"):
        value, reason = recipe.fixed(name)
        by, _ = recipe.stated(name) or (recipe, None)
        rows.append([name, value, by.source, reason])
    return rows


def _show_run(options: argparse.Namespace) -> int:
    from launch.commands import compare
    from recipes.run import LIBRARY, recorded

    record = recorded.read(options.name, "NAME")
    if options.num_processes or options.global_batch_size:
        raise mistake(
            "NAME",
            f"{options.name} is a run, which had its own processes and batch",
            "leave --num_processes and --global_batch_size out",
        )
    if options.json:
        print(json.dumps(record, indent=2))
        return 0
    world, hardware = plural(record.get("world_size") or 1, "process"), compare.hardware(record)
    error = f": {record['error']}" if "error" in record else ""
    print(f"{record.get('recipe')}, {record['status']}{error}")
    print(f"on {hardware}, {world}, {record.get('engine')}, started {record.get('started')}\n")
    if results := compare.result_rows([compare.Run("", Path(), record)]):
        print_table(["result", "value"], results)
        print()
    chosen = {name: entry for name, entry in record["settings"].items() if entry["source"] != LIBRARY}
    _print_settings(
        [[name, entry["value"], entry["source"], entry.get("reason", "")] for name, entry in chosen.items()]
    )
    return 0


def _print_settings(rows: list[list]) -> None:
    shown = [[name, value_text(value), *rest] for name, value, *rest in rows]
    print_table(["setting", "value", "from", "reason"], shown)


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


def _as_yaml(recipe: Recipe, given: str) -> str:
    """A file for --config: fixed settings as values, those that depend on the run as comments.

    `given` is what --recipe takes: the recipe's name, or the user's own file.
    """
    engine = Path("accelerate_configs", recipe.engine)  # a user's own YAML is an absolute path
    lines = [f"# {recipe.purpose}", f"# Engine: {engine}", f"recipe: {given}", ""]
    for name, setting in recipe.settings.items():
        if name in ("engine", "micro_batch_cap"):
            continue
        if callable(setting):
            decided_by = setting.__name__.replace("_", " ")
            lines += [f"# {name}: decided by the recipe for each machine and run ({decided_by})", ""]
        else:
            value, reason = setting
            lines += [f"# {reason}", f"{name}: {json.dumps(value)}", ""]  # JSON is YAML
    return "\n".join(lines).rstrip() + "\n"
