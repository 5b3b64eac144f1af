"""`recipes submit`: the same run on this machine, on Slurm or on Azure ML. Everything is checked before it goes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import azure_job, local_job, slurm_job
from launch.azure_job import Azure
from launch.job import SCRIPT, Job, job_of
from launch.slurm_job import Slurm
from recipes.check import require_legal
from recipes.engine import shipped
from recipes.errors import Problem, mistake
from recipes.hardware import Gpu, Hardware
from recipes.hardware import read as read_hardware
from recipes.run import RunSpec, resolve

# A node that cannot be looked at from here. train.py checks again on the node itself.
_ASSUMED_GPU = Gpu("GPU of compute capability 8.0", (8, 0), 80 << 30)


def add_parser(commands: Any, count: Any) -> None:
    parser = commands.add_parser(
        "submit",
        help="run a recipe here, on Slurm or on Azure ML",
        allow_abbrev=False,
        usage="recipes submit local|slurm|azureml [--recipe NAME] [--nodes N] [--processes_per_node G] [--dry_run] "
        "[--output FILE] [target flags] -- [train.py flags]",
    )
    targets = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    for name, words, run in (
        ("local", "this machine", submit_local),
        ("slurm", "a Slurm cluster, through sbatch", submit_slurm),
        ("azureml", "Azure ML: writes the YAML for `az ml job create`", submit_azureml),
    ):
        target = targets.add_parser(name, help=words, allow_abbrev=False)
        target.add_argument("--recipe", default="standard", help="baseline, standard, fast, memory, ... [standard]")
        target.add_argument("--nodes", type=count, default=1, help="[1]")
        target.add_argument("--processes_per_node", "--processes-per-node", type=count, help="one a GPU")
        target.add_argument(
            "--dry_run", "--dry-run", action="store_true", help="print what would be sent, send nothing"
        )
        target.add_argument("--output", metavar="FILE", help="with --dry_run: write it to a file")
        target.set_defaults(run=run)
        if name != "local":
            _add_target_flags(target, Slurm if name == "slurm" else Azure)


def _add_target_flags(parser: argparse.ArgumentParser, target: type) -> None:
    helps = {
        "time": "time limit, as Slurm writes it (2-12:00:00)",
        "gpus_per_node": "a count or type:count; also the processes of a node, unless they are given",
        "module": "environment modules to load, in this order",
        "venv": "virtual environment to activate on the nodes",
        "container_image": "image for srun --container-image (pyxis)",
        "signal_seconds": "how long before the time limit the run is told to stop [120]",
        "max_restarts": "how often a preempted or timed-out run is requeued [10]",
        "job_name": "[the recipe]",
        "compute": "name of a cluster",
        "instance_type": "a VM size, for serverless compute",
        "spot": "serverless compute that may be taken away",
        "data": "data asset (azureml:NAME:VERSION) or uri; becomes --dataset_name",
        "output_uri": "datastore path for checkpoints, the same for every start of this run",
        "environment": "an environment's name, instead of azureml/environment",
        "shm_size": "size of /dev/shm [16g]",
    }
    for field in dataclasses.fields(target):
        kind = int if "int" in str(field.type) else str
        options: dict[str, Any] = {"nargs": "+"} if field.name == "module" else {"type": kind}
        if field.type == "bool":
            options = {"action": "store_true"}
        names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        parser.add_argument(*names, default=field.default, help=helps.get(field.name), **options)


def submit_local(options: argparse.Namespace, argv: Sequence[str]) -> int:
    hardware = read_hardware()
    job = _job(options, argv, hardware, options.processes_per_node or max(1, len(hardware.gpus)))
    text = local_job.render(job)
    if options.dry_run:
        return _show(text, options.output)
    if not hardware.cuda:
        print(f"no GPU here: {job.processes} process{'es' * (job.processes > 1)} on {hardware}", flush=True)
    return local_job.submit(text)


def submit_slurm(options: argparse.Namespace, argv: Sequence[str]) -> int:
    slurm = Slurm(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Slurm)})
    gpus = _gpu_count(slurm.gpus_per_node)
    processes = options.processes_per_node or max(1, gpus)
    hardware = Hardware((_ASSUMED_GPU,) * gpus, cores=slurm.cpus_per_task or processes)
    job = _job(options, argv, hardware, processes)
    text = slurm_job.render(job, slurm)
    if options.dry_run:
        return _show(text, options.output)
    job_id = slurm_job.submit(text)
    print(f"submitted job {job_id}: {job.title}")
    print(f"log     {slurm_job.log_path(job, slurm, job_id)}")
    print(f"follow  squeue --jobs {job_id}; tail -F the log")
    print(f"cancel  scancel {job_id}")
    return 0


def submit_azureml(options: argparse.Namespace, argv: Sequence[str]) -> int:
    if not SCRIPT.parents[1].joinpath("azureml", "environment").is_dir():
        raise mistake(
            "azureml", "uploads a checkout, and this is an installed wheel", "run it in a clone of the project"
        )
    azure = Azure(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Azure)})
    processes = options.processes_per_node or 1
    job = _job(options, argv, Hardware((_ASSUMED_GPU,) * processes, cores=8 * processes), processes)
    text = azure_job.render(job, azure)
    if options.dry_run:
        return _show(text, options.output)
    fix = "--dry_run --output azureml/mine.yaml, then `az ml job create -f azureml/mine.yaml`"
    raise mistake("azureml", "is submitted by az, which has your login", fix)


def _gpu_count(text: str | None) -> int:
    """2 of `2` and of `a100:2`."""
    count = (text or "0").rpartition(":")[2]
    if not count.isdigit():
        raise mistake("gpus_per_node", f"{text!r} is no count of GPUs", "--gpus_per_node 4, or a100:4")
    return int(count)


def _job(options: argparse.Namespace, argv: Sequence[str], hardware: Hardware, processes_per_node: int) -> Job:
    """The checked job. Raises `UserError` with every error; advice is printed."""
    run = _resolved(options, argv, hardware, processes_per_node)
    _print(require_legal(run))
    return job_of(run, options.nodes, processes_per_node, argv)


def _resolved(options: argparse.Namespace, argv: Sequence[str], hardware: Hardware, processes_per_node: int) -> RunSpec:
    from recipes.catalog import RECIPES

    recipe = RECIPES.get(options.recipe, RECIPES["standard"])()
    return resolve(
        ["--recipe", options.recipe, *argv],
        world_size=options.nodes * processes_per_node,
        local_world_size=processes_per_node,
        hardware=hardware,
        accelerate_config=str(shipped(recipe.engine)),
    )


def _print(problems: list[Problem]) -> None:
    if problems:
        from launch.report import console, print_problems

        print_problems(problems, console(stderr=True))


def _show(text: str, file: str | None) -> int:
    if file is None:
        sys.stdout.write(text)
        return 0
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise mistake("output", f"{file} cannot be written: {error.strerror}", "a file in a folder that can") from None
    print(f"written to {file}")
    return 0
