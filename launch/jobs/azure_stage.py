"""The code that a job on Azure ML uploads: this package, and the user's files that the run names.

It is staged from the installed package, so a clone and a wheel upload the same. The user's files
keep their paths, relative to the current folder, so that the command line holds there too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import recipes
from launch.jobs.job import SCRIPT, Job
from recipes.errors import Problem, UserError, mistake
from recipes.mixture import parts_of, paths_of
from recipes.run.files import shipped

CODE = "recipes-code"  # the folder beside the job's YAML, which names it
ENVIRONMENT = "azureml/environment"
_PACKAGE = Path(recipes.__file__).parent
_LEFT_OUT = ("__pycache__", "*.pyc", ".*", "accelerate_configs", "azureml")
_MOST_BYTES = 100 << 20  # code is uploaded and copied to every node; data of that size are not code


def shipped_jobs() -> Path:
    """The folder azureml/: in the installed package, or beside it in a checkout."""
    inside = _PACKAGE / "azureml"
    return inside if inside.exists() else _PACKAGE.parent / "azureml"


def stage(job: Job, folder: Path) -> Path:
    """Write what the job uploads into a folder beside its YAML. Returns that folder.

    Raises `UserError` for a file that cannot be taken along, or if something else is in the way.
    """
    code = folder / CODE
    with tempfile.TemporaryDirectory() as scratch:
        new = Path(scratch) / CODE
        _copy_package(new)
        for file in own_files(job):
            _copy_own(file, new)
        if not code.exists():
            shutil.copytree(new, code)
        elif _content(code) != _content(new):
            raise mistake("output", f"{code} holds something else than this job's code", "another folder")
    return code


def _copy_package(code: Path) -> None:
    left_out = shutil.ignore_patterns(*_LEFT_OUT)
    shutil.copytree(SCRIPT.parent, code / "launch", ignore=left_out)
    shutil.copytree(_PACKAGE, code / "recipes", ignore=left_out)
    shutil.copytree(shipped(""), code / "accelerate_configs", ignore=shutil.ignore_patterns(".*"))
    shutil.copytree(shipped_jobs() / "environment", code / ENVIRONMENT)


def _copy_own(file: Path, code: Path) -> None:
    staged = code / file
    if staged.exists() and staged.read_bytes() != file.read_bytes():
        raise mistake(str(file), "has the path of a file of this package, which the job needs", "another name for it")
    staged.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, staged)


def _content(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def config_path(job: Job) -> str:
    """The Accelerate YAML's path in the staged code."""
    config = Path(job.config)
    return f"accelerate_configs/{config.name}" if _is_shipped(config) else _from_here(job.config)


def own_files(job: Job) -> list[Path]:
    """The user's files that the job reads, relative to the current folder.

    Raises `UserError` with each one that would be missing on the nodes.
    """
    files, problems = [], []
    for found in _named_files(job):
        if isinstance(found, Problem):
            problems.append(found)
        else:
            files.append(found)
    if problems:
        raise UserError(*problems)
    return files


def _named_files(job: Job) -> Iterator[Path | Problem]:
    run = job.run
    for file in run.recipe.files:
        yield _taken_along("recipe", file)
    engine = shipped(run.recipe.engine)
    if run.recipe.files and not _is_shipped(engine):
        yield _taken_along("engine", _from_here(str(engine)))
    if not _is_shipped(Path(job.config)):
        yield _taken_along("accelerate_config", _from_here(job.config))
    for name in ("config", "deepspeed", "fsdp_config", "accelerator_config", "dataset_name"):
        value = run[name] if run.explicit(name) else None
        named = [part.name for part in parts_of(value)] if name == "dataset_name" else [value]
        for path in named:
            if isinstance(path, str) and os.path.isfile(path):  # noqa: PTH113, Path.is_file raises for a long JSON
                yield _taken_along(name, path)
            elif isinstance(path, str) and (_is_here(path) or (name == "dataset_name" and paths_of(path))):
                yield _missing_there(name, path, "--data with an asset or uri")
    for name in ("model_name_or_path", "resume_from_checkpoint"):
        value = run[name] if run.explicit(name) else None
        if isinstance(value, str) and _is_here(value):
            yield _missing_there(name, value, "a name on the Hub")


def _taken_along(name: str, file: str) -> Path | Problem:
    path = Path(os.path.normpath(file))
    if path.is_absolute() or path.parts[0] == "..":
        what = "is not in the current folder, from which the job takes its files"
        return Problem(name, f"{file} {what}", f"copy it here, and name it {path.name}")
    if path.stat().st_size > _MOST_BYTES:
        return Problem(name, f"{file} is too large to be uploaded as code", "--data with an asset or uri")
    return path


def _missing_there(name: str, value: str, fix: str) -> Problem:
    return Problem(name, f"{value} is on this machine only", fix)


def _is_here(value: str) -> bool:
    """Whether it is, or is meant to be, a path on this machine."""
    return value.startswith((".", "/", "~")) or os.path.exists(value)  # noqa: PTH110, as above


def _is_shipped(config: Path) -> bool:
    return config.resolve().parent == shipped("").resolve()


def _from_here(file: str) -> str:
    return os.path.relpath(Path(file).resolve(), Path.cwd().resolve())
