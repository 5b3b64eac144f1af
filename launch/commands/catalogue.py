"""`recipes list` and `where`: print the recipes and the paths of files, without any run."""

import argparse

from launch.flags import Commands
from launch.terminal import print_table
from recipes.catalog import RECIPES


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

    files = {path.name: path for path in (SCRIPT, *sorted(shipped("").glob("*.yaml")))}
    files |= {f"azureml/{path.name}": path for path in sorted(shipped("", "azureml").glob("*.yaml"))}
    print_table(["name", "path"], [[name, str(path)] for name, path in files.items()])
    return 0
