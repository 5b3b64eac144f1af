"""`recipes check`: report the mistakes in a run, before anything starts."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from launch.data.columns import check_columns
from launch.flags import Commands
from launch.terminal import console, plural, print_problems
from recipes.errors import Problem, mistake
from recipes.rules.check import check
from recipes.rules.probe import probe_in_child
from recipes.run import FIT, RunSpec, here, resolve, with_fit
from recipes.run.hardware import Hardware
from recipes.run.known_gpus import find

_FLAGS = """
--accelerate_config FILE|NAME  Accelerate YAML in place of the recipe's own
--num_processes N              processes in all, one per GPU [num_processes of that YAML, or 1]
--gpu NAME                     check for a machine with this GPU for each process: H100 80GB, L4, ... [this machine]
--azureml FILE                 check the YAML of an Azure ML job, and the training that the job starts
--deep                         also let the installed libraries build the objects of the training (takes seconds)
"""


def add_parser(commands: Commands) -> None:
    commands.add_parser("check").takes(check_run, _FLAGS)


def check_run(options: argparse.Namespace, rest: list[str]) -> int:
    """Print the problems of a run. Return 0, or 2 if a problem is an error."""
    run, problems = _inspect(options, rest)
    errors = [problem for problem in problems if problem.severity == "error"]
    if options.deep and not errors:
        errors = probe_in_child(run)
        problems += errors
    if problems:
        print_problems(problems, console(stderr=True))
    if errors:
        print(f"{plural(len(errors), 'error')}: this run would not start.", file=sys.stderr)
        return 2
    fitted = f": {run.batch.reason}" if run.batch.source == FIT else ""
    world, more = plural(run.world_size, "process"), "" if options.deep else "; --deep asks the libraries too"
    print(f"legal: {run.recipe.name} on {run.engine_title}, {world}, batch {run.batch}{fitted}{more}")
    return 0


def _inspect(options: argparse.Namespace, rest: list[str]) -> tuple[RunSpec, list[Problem]]:
    if options.azureml:
        for name in ("gpu", "num_processes", "accelerate_config"):
            if getattr(options, name):
                fix = f"use --azureml {options.azureml} without --{name}"
                raise mistake(name, "cannot be combined with --azureml", fix)
        from launch.jobs import azure

        return azure.read(Path(options.azureml), rest)
    place = here(options.num_processes, options.accelerate_config)
    if options.gpu is not None:  # a node with one such GPU per process
        cards = (find(options.gpu),) * place.world_size
        place = replace(place, hardware=Hardware(cards, cores=8 * place.world_size), packages=frozenset())
    run = with_fit(resolve(rest, place))
    return run, [*check_columns(run), *check(run)]
