"""`recipes train`: check the run here, then become the launcher of its processes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from launch.flags import Commands, count, spellings
from launch.host.signals import block_until_listening
from launch.jobs.job import checked_job, launch_words
from launch.jobs.local import Local
from launch.jobs.submit import refuse_while_in_use
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
    parser.set_defaults(run=train)


def train(options: argparse.Namespace, argv: Sequence[str]) -> NoReturn:
    """Replace this process by the launcher of the run, whose exit code is train.py's.

    Advice is left to train.py, whose output follows at once. Raises `UserError` with every problem.
    """
    yaml = options.accelerate_config
    node = Local().node(options.num_processes or in_own_yaml(yaml))
    job = checked_job(options.recipe, argv, node, accelerate_config=yaml, says_advice=False, is_stored=False)
    refuse_while_in_use(job.folder)
    block_until_listening()  # the launcher handles them once it has imported what does
    os.execv(sys.executable, [*launch_words(job), *job.command])


def in_own_yaml(name: str | None) -> int | None:
    """The number of processes that an Accelerate YAML of the user's own says."""
    if name is None:
        return None
    file = find_yaml(name)
    return None if file.parent == shipped(file.name).parent else from_yaml(file).num_processes
