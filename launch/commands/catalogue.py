"""`recipes list` and `where`: print the recipes and the paths of files, without any run."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from launch.flags import Commands
from launch.terminal import print_table
from recipes.catalog import RECIPES

if TYPE_CHECKING:
    from recipes.run import Json, RunSpec


def add_parser(commands: Commands) -> None:
    commands.add_parser("list").takes(list_recipes, "")
    commands.add_parser("where").takes(show_where, "")


def list_recipes(options: argparse.Namespace, rest: list[str]) -> int:
    rows = [[recipe.name, recipe.engine, recipe.purpose] for recipe in (build() for build in RECIPES.values())]
    print_table(["recipe", "accelerate_configs/", "purpose"], rows)
    return 0


def show_where(options: argparse.Namespace, rest: list[str]) -> int:
    from launch.jobs.job import SCRIPT
    from recipes.run.files import shipped

    engines = sorted(shipped("fast.yaml").parent.glob("*.yaml"))
    jobs = sorted(shipped("fast.yaml", "azureml").parent.glob("*.yaml"))
    rows = [[path.name, str(path)] for path in [SCRIPT, *engines]]
    print_table(["name", "path"], [*rows, *([f"azureml/{path.name}", str(path)] for path in jobs)])
    return 0


def run_as_json(run: RunSpec) -> Json:
    """Return a run as JSON, with the settings that are not library defaults. Tokens are hidden."""
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
