"""`recipes list` and `where`: the catalogue and its files. They resolve nothing."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from launch.flags import Commands
from launch.terminal import print_table
from recipes.catalog import RECIPES
from recipes.errors import mistake

if TYPE_CHECKING:
    from recipes.run import Json, RunSpec


def add_parser(commands: Commands) -> None:
    commands.add_parser("list").takes(list_recipes, "")
    description = 'The paths of train.py and of the YAMLs. With a NAME only its path: "$(recipes where train.py)".'
    where = commands.add_parser("where", description=description)
    where.takes(show_where, "[NAME]  train.py, fast.yaml, azureml/fast.yaml, ...")


def list_recipes(options: argparse.Namespace, rest: list[str]) -> int:
    rows = [[recipe.name, recipe.engine, recipe.purpose] for recipe in (build() for build in RECIPES.values())]
    print_table(["recipe", "accelerate_configs/", "what it is for"], rows)
    return 0


def show_where(options: argparse.Namespace, rest: list[str]) -> int:
    from launch.jobs.job import SCRIPT
    from recipes.run.files import nearest, shipped

    engines = sorted(shipped("fast.yaml").parent.glob("*.yaml"))
    jobs = sorted(shipped("fast.yaml", "azureml").parent.glob("*.yaml"))
    found = {path.name: path for path in [SCRIPT, *engines]} | {f"azureml/{path.name}": path for path in jobs}
    if options.name is None:
        print_table(["name", "path"], [[name, str(path)] for name, path in found.items()])
        return 0
    path = found.get(options.name) or found.get(f"{options.name}.yaml")
    if path is None:
        fix = nearest(options.name, found) or f"one of {', '.join(found)}"
        raise mistake("NAME", f"there is no {options.name}", fix)
    print(path)
    return 0


def run_as_json(run: RunSpec) -> Json:
    """A run and its chosen settings for scripts; tokens are hidden."""
    from recipes.run import shown

    return {
        "recipe": run.recipe.name,
        "purpose": run.recipe.purpose,
        "engine": run.recipe.engine,
        "num_processes": run.world_size,
        "data_parallel_size": run.data_parallel_size,
        "hardware": str(run.hardware),
        "settings": {name: {**vars(each), "value": shown(name, each.value)} for name, each in run.chosen().items()},
    }
