"""`recipes check`: whether a run is legal, before anything starts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from launch.commands.show import as_json
from launch.flags import Commands, count, spellings
from launch.terminal import console, plural, print_problems
from recipes.errors import Problem
from recipes.rules.check import check, check_deep
from recipes.run import FIT, RunSpec, resolve, with_fit


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "check",
        allow_abbrev=False,
        usage="recipes check [--recipe NAME] [--config FILE] [--accelerate_config FILE] [--num_processes N] [--deep] "
        "[--json] [any train.py flags] | --azureml FILE",
    )
    parser.add_argument(*spellings("accelerate_config"), metavar="FILE", help="the Accelerate YAML")
    parser.add_argument(*spellings("num_processes"), type=count, help="processes in all, one per GPU [1]")
    parser.add_argument("--azureml", metavar="FILE", help="a job's YAML for Azure ML, and the training in it")
    parser.add_argument("--deep", action="store_true", help="also build the real TrainingArguments (seconds)")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=check_run)


def check_run(options: argparse.Namespace, rest: list[str]) -> int:
    """Returns 0, or 2 if the run is not legal."""
    run, problems = _inspect(options, rest)
    errors = [problem for problem in problems if problem.severity == "error"]
    if options.deep and not errors:
        errors = check_deep(run)
        problems += errors
    if options.json:
        described = as_json(run, run.chosen())
        result = {"legal": not errors, "problems": [vars(problem) for problem in problems], **described}
        print(json.dumps(result, indent=2, default=str))
    else:
        _print_result(run, problems, len(errors))
    return 2 if errors else 0


def _inspect(options: argparse.Namespace, rest: list[str]) -> tuple[RunSpec, list[Problem]]:
    if options.azureml:
        from launch.jobs import azure_read

        return azure_read.read(Path(options.azureml), rest)
    run = with_fit(resolve(rest, world_size=options.num_processes, accelerate_config=options.accelerate_config))
    return run, check(run, accelerate_config_given=options.accelerate_config is not None)


def _print_result(run: RunSpec, problems: list[Problem], errors: int) -> None:
    if problems:
        print_problems(problems, console(stderr=True))
    if errors:
        print(f"{plural(errors, 'error')}: this run would not start.", file=sys.stderr)
        return
    world = plural(run.world_size, "process")
    fitted = f": {run.batch.reason}" if run.batch_source == FIT else ""
    print(f"legal: {run.recipe.name} on {run.engine_title}, {world}, batch {run.batch}{fitted}")
