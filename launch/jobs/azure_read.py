"""Reading a job's YAML for Azure ML: the run that it starts, and everything wrong with either."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import yaml

from launch.jobs import azure_workspace
from launch.jobs.azure_check import training_in
from launch.jobs.job import ASSUMED_GPU, SCRIPT, Node
from recipes.errors import Problem, UserError, mistake
from recipes.rules.check import check
from recipes.run import Json, RunSpec, here, resolve
from recipes.run.hardware import Hardware

_PACKAGES = frozenset({"mlflow"})  # what azureml/environment/requirements.txt adds to our own requirements


def node(processes: int) -> Node:
    """A node on Azure, which cannot be looked at from here: one GPU per process is assumed."""
    return Node(Hardware((ASSUMED_GPU,) * processes, cores=8 * processes), processes, _PACKAGES)


def read(file: Path, rest: Sequence[str]) -> tuple[RunSpec, list[Problem]]:
    """The run that a job's YAML starts, and everything wrong with the YAML or the run.

    `rest` are train.py's flags beside the file: the YAML already holds them, so none is allowed.
    Raises `UserError` if the file holds no training.
    """
    if rest:
        raise mistake(rest[0], "stands in the command of the YAML", f"leave it out beside --azureml {file}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise mistake("azureml", f"{file} cannot be read: {error}", "a job's YAML") from None
    return read_text(text, file.resolve().parent)


def read_text(text: str, folder: Path) -> tuple[RunSpec, list[Problem]]:
    """The same for the text of a YAML whose relative paths start in `folder`."""
    problems = azure_workspace.problems_of(text, folder)
    if problems:
        raise UserError(*problems)
    content = yaml.safe_load(text)
    training = training_in(content)
    if training is None:
        raise mistake("command", "does not start launch/train.py", "as in azureml/fast.yaml")
    assumed = node(training.processes_per_node)
    with contextlib.chdir(_code(content, folder)):  # where the job's command runs
        run = resolve(
            training.flags,
            here(
                training.nodes * training.processes_per_node,
                local_world_size=training.processes_per_node,
                hardware=assumed.hardware,
                accelerate_config=training.config,
                packages=assumed.packages,
            ),
        )
        return run, check(run)


def _code(content: Json, folder: Path) -> Path:
    """The folder that the job uploads. Raises `UserError` if train.py is not in it."""
    code = str(content.get("code", ""))
    if code.startswith("azureml:") or "://" in code:  # uploaded already: taken for this package
        return SCRIPT.parents[1]
    found = (folder / code).resolve()
    if not (found / "launch" / SCRIPT.name).is_file():
        fix = "the folder that `recipes submit azureml --dry_run --output FILE` writes beside the YAML"
        raise mistake("code", f"there is no launch/train.py in {found}", fix)
    return found
