"""`recipes fit`: finding the largest micro-batch in real steps, in the world that would train."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from shlex import join

from launch.flags import Commands, count, spellings
from launch.host.secrets import without_secrets
from launch.jobs import here, local
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
    parser.set_defaults(run=fit_run)


def fit_run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    return fit(options.recipe, argv, options.num_processes)


def fit(recipe: str | None, argv: Sequence[str], processes: int | None = None) -> int:
    """Run train.py with --fit_only on this machine. Returns its exit code."""
    job = here.job_here(recipe, with_flags(argv, {"fit_only": True}), processes, says_advice=False)
    refuse_while_in_use(job.folder)
    code = here.run_script(without_secrets(local.render(job)), job)
    if code == 0:
        training = with_flags(argv, {"fit": None, "fit_only": None})
        chosen = ["--recipe", recipe] if recipe else []
        words = [*chosen, "--processes_per_node", str(job.processes_per_node), "--", *training]
        print(f"train with it: recipes submit local {join(words)}")
    return code
