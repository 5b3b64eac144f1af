"""`recipes list` and `recipes copy`: the catalogue. They answer at once: nothing is resolved."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from launch.flags import Commands
from launch.terminal import print_table
from recipes.catalog import RECIPES, Recipe
from recipes.errors import mistake

if TYPE_CHECKING:
    from recipes.run import Json, RunSpec, Setting

RECIPE = "a shipped recipe, or the file of your own: mine.yaml, mine.py:function"


def add_parser(commands: Commands) -> None:
    listing = commands.add_parser("list", allow_abbrev=False)
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(run=list_recipes)

    copy = commands.add_parser("copy", allow_abbrev=False)
    copy.add_argument("name", metavar="NAME", help=RECIPE)
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


def run_as_json(run: RunSpec, settings: dict[str, Setting]) -> Json:
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
