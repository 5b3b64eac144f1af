"""`recipes train`: check the run here, then become the launcher of its processes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from launch.flags import Commands, count, spellings
from launch.host.signals import block_until_listening
from launch.jobs.here import this_node
from launch.jobs.job import job_of, launch_words, run_on
from launch.jobs.submit import refuse_while_in_use
from recipes.rules.check import require_legal
from recipes.run.engine_sources import from_yaml
from recipes.run.files import find_yaml, shipped


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        allow_abbrev=False,
        usage="recipes train [--recipe NAME] [--num_processes N] [--accelerate_config FILE|NAME] [train.py flags]",
        description="Check the run, then train here in this terminal: `accelerate launch` with the recipe's YAML. "
        '`python "$(recipes where train.py)" --help` lists the settings.',
    )
    parser.add_argument("--recipe", help="one of `recipes list`, or a file of your own [--config's, or standard]")
    processes = "[num_processes of an Accelerate YAML of your own, or one per GPU]"
    parser.add_argument(*spellings("num_processes"), type=count, metavar="N", help=processes)
    yaml = "instead of the recipe's own YAML"
    parser.add_argument(*spellings("accelerate_config"), metavar="FILE|NAME", help=yaml)
    parser.set_defaults(run=train_run)


def train_run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    train(options.recipe, argv, options.num_processes, options.accelerate_config)


def train(
    recipe: str | None, argv: Sequence[str], processes: int | None = None, accelerate_config: str | None = None
) -> NoReturn:
    """Replace this process by the launcher of the run, whose exit code is train.py's.

    Advice is left to train.py, whose output follows at once. Raises `UserError` with every problem.
    """
    node = this_node(processes or in_own_yaml(accelerate_config))
    run = run_on(node, recipe, argv, accelerate_config=accelerate_config)
    require_legal(run)
    job = job_of(run, 1, node.processes, argv, accelerate_config=accelerate_config, is_stored=False)
    refuse_while_in_use(job.folder)
    block_until_listening()  # the launcher handles them once it has imported what does
    os.execv(sys.executable, [*launch_words(job), *job.command])


def in_own_yaml(name: str | None) -> int | None:
    """The number of processes that an Accelerate YAML of the user's own says."""
    if name is None:
        return None
    file = find_yaml(name)
    return None if file.parent == shipped(file.name).parent else from_yaml(file).num_processes
