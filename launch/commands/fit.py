"""`recipes fit`: finding the largest micro-batch in real steps, in the world that would train."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from shlex import join

from launch.flags import Commands, count, spellings
from launch.host.secrets import without_secrets
from launch.jobs.job import checked_job
from launch.jobs.local import Local, run_script
from launch.jobs.submit import refuse_while_in_use
from recipes.run import with_flags


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "fit",
        allow_abbrev=False,
        usage="recipes fit [--recipe NAME] [--num_processes N] [any train.py flags]",
    )
    parser.add_argument("--recipe", help="[--config's, or standard]")
    parser.add_argument(*spellings("num_processes"), type=count, help="processes here [one per GPU]")
    parser.set_defaults(run=fit)


def fit(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run train.py with --fit_only on this machine. Returns its exit code."""
    recipe = options.recipe
    node = Local().node(options.num_processes)
    job = checked_job(recipe, with_flags(argv, {"fit_only": True}), node, says_advice=False)
    refuse_while_in_use(job.folder)
    code = run_script(without_secrets(Local().render(job)), job)
    if code == 0:
        training = with_flags(argv, {"fit": None, "fit_only": None})
        words = ["--recipe", recipe] * bool(recipe) + ["--processes_per_node", str(job.processes_per_node)]
        print(f"train with it: recipes submit local {join([*words, '--', *training])}")
    return code
