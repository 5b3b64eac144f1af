"""`recipes check`: whether a run is legal, before anything starts."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from launch.commands.catalogue import run_as_json
from launch.flags import Commands, count, spellings
from launch.terminal import console, plural, print_problems
from recipes.errors import Problem, mistake
from recipes.rules.check import check
from recipes.rules.probe import probe_in_child
from recipes.run import FIT, RunSpec, here, resolve, with_fit
from recipes.run.hardware import Gpu, Hardware
from recipes.run.known_gpus import find


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "check",
        allow_abbrev=False,
        usage="recipes check [--recipe NAME] [--config FILE] [--accelerate_config FILE|NAME] [--num_processes N] "
        "[--gpu NAME] [--deep] [--json] [any train.py flags] | --azureml FILE",
    )
    parser.add_argument(
        *spellings("accelerate_config"), metavar="FILE", help="the Accelerate YAML, or the name of a shipped one"
    )
    parser.add_argument(*spellings("num_processes"), type=count, help="processes in all, one per GPU [1]")
    gpu = "judge for such cards, one per process, elsewhere: H100 80GB, L4, ... [this machine]"
    parser.add_argument("--gpu", metavar="NAME", help=gpu)
    parser.add_argument("--azureml", metavar="FILE", help="a job's YAML for Azure ML, and the training in it")
    parser.add_argument("--deep", action="store_true", help="also ask the installed libraries themselves (seconds)")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=check_run)


def check_run(options: argparse.Namespace, rest: list[str]) -> int:
    """Returns 0, or 2 if the run is not legal."""
    run, problems = _inspect(options, rest)
    errors = [problem for problem in problems if problem.severity == "error"]
    if options.deep and not errors:
        errors = probe_in_child(run)
        problems += errors
    if options.json:
        described = run_as_json(run, run.chosen())
        result = {"legal": not errors, "problems": [vars(problem) for problem in problems], **described}
        print(json.dumps(result, indent=2, default=str))
    else:
        _print_result(run, problems, len(errors))
    return 2 if errors else 0


def _inspect(options: argparse.Namespace, rest: list[str]) -> tuple[RunSpec, list[Problem]]:
    if options.azureml:
        if options.gpu:
            raise mistake("gpu", "is not for a job's YAML", f"leave it out beside --azureml {options.azureml}")
        from launch.jobs import azure

        return azure.read(Path(options.azureml), rest)
    place = here(options.num_processes, options.accelerate_config)
    if options.gpu is not None:
        place = replace(place, hardware=_cards(options.gpu, place.world_size), packages=frozenset())
    run = with_fit(resolve(rest, place))
    return run, check(run, accelerate_config_given=options.accelerate_config is not None)


def _cards(name: str, processes: int) -> Hardware:
    """A node with the named card for each process."""
    known = find(name)
    card = Gpu(known.name, known.capability, known.torch_bytes)
    return Hardware((card,) * processes, cores=8 * processes)


def _print_result(run: RunSpec, problems: list[Problem], errors: int) -> None:
    if problems:
        print_problems(problems, console(stderr=True))
    if errors:
        print(f"{plural(errors, 'error')}: this run would not start.", file=sys.stderr)
        return
    world = plural(run.world_size, "process")
    fitted = f": {run.batch.reason}" if run.batch.source == FIT else ""
    stray = run.engine.kind == "single" and run.world_size > 1  # the advice says so
    engine = "DDP if torchrun or another YAML starts it" if stray else run.engine_title
    print(f"legal: {run.recipe.name} on {engine}, {world}, batch {run.batch}{fitted}")
