"""`recipes where`: the paths of files that other commands take, `accelerate launch` for one."""

from __future__ import annotations

import argparse
from pathlib import Path

from launch.flags import Commands
from launch.jobs.job import SCRIPT
from launch.terminal import print_table
from recipes.errors import mistake
from recipes.run.files import nearest, shipped


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "where",
        allow_abbrev=False,
        description='The paths of train.py and of the YAMLs. With a NAME only its path: "$(recipes where train.py)".',
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="train.py, fast.yaml, azureml/fast.yaml, ...")
    parser.set_defaults(run=show_where)


def show_where(options: argparse.Namespace, rest: list[str]) -> int:
    found = files()
    if options.name is None:
        print_table(["name", "path"], [[name, str(path)] for name, path in found.items()])
        return 0
    name = options.name if options.name in found else f"{options.name}.yaml"
    if name not in found:
        fix = nearest(options.name, found) or f"one of {', '.join(found)}"
        raise mistake("NAME", f"there is no {options.name}", fix)
    print(found[name])
    return 0


def files() -> dict[str, Path]:
    """By name: train.py, the Accelerate YAMLs, the jobs for Azure ML."""
    yamls = {path.name: path for path in sorted(shipped("fast.yaml").parent.glob("*.yaml"))}
    jobs = {f"azureml/{path.name}": path for path in sorted(shipped("fast.yaml", "azureml").parent.glob("*.yaml"))}
    return {"train.py": SCRIPT, **yamls, **jobs}
