"""`recipes submit`: the same run on this machine, on Slurm or on Azure ML. Everything is checked before it goes."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import join as quote_words
from shlex import quote
from typing import Any

import yaml

from launch.host.signals import EXIT_CODE
from launch.jobs import azure as azure_job
from launch.jobs import azure_workspace
from launch.jobs import local as local_job
from launch.jobs import slurm as slurm_job
from launch.jobs.azure import Azure
from launch.jobs.azure_check import training_in
from launch.jobs.azure_workspace import Workspace
from launch.jobs.job import SCRIPT, Job, job_of, without_secrets
from launch.jobs.slurm import Slurm
from launch.output import record
from launch.output.submission import LOCAL_LOG, Submission, note, noted
from launch.training import out_of_memory
from recipes.errors import Problem, UserError, mistake
from recipes.rules.check import check, require_legal
from recipes.run import RunSpec, resolve, with_fit, with_flags
from recipes.run.engine import shipped
from recipes.run.hardware import Gpu, Hardware
from recipes.run.hardware import read as read_hardware

AZUREML = SCRIPT.parents[1] / "azureml"
_IN_THE_IMAGE = frozenset({"mlflow"})  # what azureml/environment/requirements.txt adds to our own requirements
# A node that cannot be looked at from here. train.py checks again on the node itself.
_ASSUMED_GPU = Gpu("GPU of compute capability 8.0", (8, 0), 80 << 30)
_TARGET_FLAGS: dict[str, tuple[type, ...]] = {"local": (), "slurm": (Slurm,), "azureml": (Azure, Workspace)}


def add_parser(commands: Any, count: Any) -> None:
    parser = commands.add_parser(
        "submit",
        help="run a recipe here, on Slurm or on Azure ML",
        allow_abbrev=False,
        usage="recipes submit local|slurm|azureml [--recipe NAME] [--nodes N] [--processes_per_node G] [--dry_run] "
        "[--output FILE] [target flags] -- [train.py flags]",
    )
    targets = parser.add_subparsers(dest="target", required=True, metavar="TARGET")
    for name, words, send in (
        ("local", "this machine", submit_local),
        ("slurm", "a Slurm cluster, through sbatch", submit_slurm),
        ("azureml", "Azure ML, through its SDK; --dry_run writes the YAML for `az ml job create`", submit_azureml),
    ):
        usage = f"recipes submit {name} [flags] -- [train.py flags]"
        target = targets.add_parser(
            name, prog=f"recipes submit {name}", help=words, description=words, usage=usage, allow_abbrev=False
        )
        target.add_argument("--recipe", help="baseline, standard, fast, memory, ... [--config's, or standard]")
        target.add_argument("--nodes", type=count, default=1, help="[1]")
        target.add_argument("--processes_per_node", "--processes-per-node", type=count, help="one a GPU")
        target.add_argument(
            "--dry_run", "--dry-run", action="store_true", help="print what would be sent, send nothing"
        )
        target.add_argument("--output", metavar="FILE", help="with --dry_run: write it to a file")
        target.add_argument(
            "--preflight", action="store_true", help="`recipes doctor` on every node first: a sick one ends the job"
        )
        target.set_defaults(run=submit, send=send)
        for flags in _TARGET_FLAGS[name]:
            _add_target_flags(target, flags, count)
        if name == "local":
            target.add_argument(
                "--on_oom",
                "--on-oom",
                choices=("next", "stop"),
                default="stop",
                help="out of memory: go on with the next smaller micro-batch, or only say which that is [stop]",
            )
    fitting = commands.add_parser(
        "fit",
        help="find the largest micro-batch that really runs here",
        allow_abbrev=False,
        usage="recipes fit [--recipe NAME] [--num_processes N] [any train.py flags]",
    )
    fitting.add_argument("--recipe", help="[--config's, or standard]")
    fitting.add_argument("--num_processes", "--num-processes", type=count, help="processes here [one a GPU]")
    fitting.set_defaults(run=fit_local, preflight=False)


def _add_target_flags(parser: argparse.ArgumentParser, target: type, count: Any) -> None:
    helps = {
        **dict.fromkeys(("partition", "account", "qos", "mem", "constraint", "reservation"), "as sbatch takes it"),
        "cpus_per_task": "cores of a node for its processes and their data loading [the cluster's default, often 1]",
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
        "subscription_id": "the workspace, with the next two [config.json here or in a folder above]",
        "resource_group": "",
        "workspace_name": "",
    }
    for field in dataclasses.fields(target):
        kind = count if "int" in str(field.type) else str
        options: dict[str, Any] = {"nargs": "+"} if field.name == "module" else {"type": kind}
        if field.type == "bool":
            options = {"action": "store_true"}
        names = dict.fromkeys((f"--{field.name}", f"--{field.name.replace('_', '-')}"))
        default = None if field.default is dataclasses.MISSING else field.default
        parser.add_argument(*names, default=default, help=helps.get(field.name), **options)


def submit(options: argparse.Namespace, argv: Sequence[str]) -> int:
    if options.output and not options.dry_run:
        raise mistake("output", "is for a dry run; this would be submitted, not written", "--dry_run, or no --output")
    if options.target != "local" and any(word.partition("=")[0] == "--fresh" for word in argv):
        what = "would move the run aside again whenever it is started again"
        raise mistake("fresh", what, "another --output_dir (Azure ML: --output_uri)")
    return options.send(options, argv)


def submit_local(options: argparse.Namespace, argv: Sequence[str]) -> int:
    hardware = read_hardware()
    job = _job(options, argv, hardware, options.processes_per_node or max(1, len(hardware.gpus)))
    text = without_secrets(local_job.render(job))
    if options.dry_run:
        return _show(text, options.output)
    _refuse_while_in_use(job.folder)
    if not hardware.cuda:
        print(f"no GPU here: {job.processes} process{'es' * (job.processes > 1)} on {hardware}", flush=True)
    code = _run_here(job)
    tried: list[dict[str, Any]] = []
    while options.on_oom == "next" and code not in (0, EXIT_CODE):
        rung = out_of_memory.next_flags(job.folder)
        if rung is None or rung in tried:
            if tried:
                print("\nno rung is left that goes on with the same training", file=sys.stderr)
            break
        tried.append(rung)
        argv = with_flags(argv, rung)
        job = _job(options, argv, hardware, job.processes_per_node)
        print(f"\nout of memory: again, with batch {job.run.batch}: {quote_words(with_flags([], rung))}", flush=True)
        code = _run_here(job)
    return code


def _run_here(job: Job) -> int:
    record.forget_out_of_memory(job.folder)  # what an earlier run left says nothing about this one
    return local_job.submit(without_secrets(local_job.render(job)), job)


def job_here(recipe: str | None, argv: Sequence[str], processes: int) -> Job:
    """The checked job of a training on this machine. Raises `UserError` with every error; advice is printed."""
    options = argparse.Namespace(recipe=recipe, nodes=1, preflight=False)
    return _job(options, argv, read_hardware(), processes)


def fit_local(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """The fitting alone, in the world that would train."""
    processes = options.num_processes or max(1, len(read_hardware().gpus))
    job = job_here(options.recipe, with_flags(argv, {"fit_only": True}), processes)
    _refuse_while_in_use(job.folder)
    code = local_job.submit(without_secrets(local_job.render(job)), job)
    if code == 0:
        recipe = ["--recipe", options.recipe] if options.recipe else []
        words = [
            *recipe,
            "--processes_per_node",
            str(processes),
            "--",
            *with_flags(argv, {"fit": None, "fit_only": None}),
        ]
        print(f"train with it: recipes submit local {quote_words(words)}")
    return code


def submit_slurm(options: argparse.Namespace, argv: Sequence[str]) -> int:
    slurm = Slurm(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Slurm)})
    gpus = _gpu_count(slurm.gpus_per_node)
    processes = options.processes_per_node or max(1, gpus)
    hardware = Hardware((_ASSUMED_GPU,) * gpus, slurm.cpus_per_task or processes, liger=read_hardware().liger)
    job = _job(options, argv, hardware, processes, elsewhere=frozenset() if slurm.prepares else None)
    text = without_secrets(slurm_job.render(job, slurm))
    if options.dry_run:
        return _show(text, options.output)
    _refuse_while_in_use(job.folder)
    job_id = slurm_job.submit(text)
    log = slurm_job.log_path(job, slurm, job_id)
    _note(job.folder, Submission("slurm", job.title, str(log), job_id))
    print(f"submitted job {job_id}: {job.title}")
    print(f"log     {log}")
    print(f"status  recipes status {quote(str(job.folder))}")
    print(f"follow  recipes logs -f {quote(str(job.folder))}")
    print(f"cancel  scancel {job_id}")
    return 0


def submit_azureml(options: argparse.Namespace, argv: Sequence[str]) -> int:
    if not AZUREML.joinpath("environment").is_dir():
        raise mistake(
            "azureml", "uploads a checkout, and this is an installed wheel", "run it in a clone of the project"
        )
    if options.output and Path(options.output).resolve().parent != AZUREML:
        raise mistake("output", "the job's paths start in azureml/", f"--output {AZUREML / 'mine.yaml'}")
    azure = Azure(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Azure)})
    workspace = _workspace(options)
    processes = options.processes_per_node or 1
    job = _job(options, argv, _azure_hardware(processes), processes, elsewhere=_IN_THE_IMAGE)
    text = azure_job.render(job, azure)
    _refuse_local_files(job.run)
    _, wrong = _read_azureml(text, AZUREML)  # what is sent is what is checked: some words are the renderer's own
    errors = [problem for problem in wrong if problem.severity == "error"]
    if errors:
        raise UserError(*errors)
    if options.dry_run:
        return _show(text, options.output)
    client = azure_workspace.connected(workspace)
    name, address = azure_workspace.submit(client, text, AZUREML)
    folder = Path("outputs") / name  # checkpoints stay in the datastore: here is only the note
    used = dataclasses.asdict(azure_workspace.workspace_of(client))
    _note(folder, Submission("azureml", job.title, address, name, workspace=used))
    print(f"submitted job {name}: {job.title}")
    print(f"studio  {address}")
    print(f"output  {azure_job.output_of(job, azure)}: submitted again, it goes on from there")
    print(f"status  recipes status {quote(str(folder))}")
    print(f"follow  recipes logs -f {quote(str(folder))}")
    print(f"cancel  az ml job cancel --name {name}")
    return 0


def read_azureml(file: Path, rest: Sequence[str]) -> tuple[RunSpec, list[Problem]]:
    """The run that a job's YAML starts, and everything wrong with the YAML or the run. Raises `UserError`."""
    if rest:
        raise mistake(rest[0], "stands in the command of the YAML", f"leave it out beside --azureml {file}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise mistake("azureml", f"{file} cannot be read: {error}", "a job's YAML") from None
    return _read_azureml(text, file.resolve().parent)


def _read_azureml(text: str, folder: Path) -> tuple[RunSpec, list[Problem]]:
    problems = azure_workspace.problems_of(text, folder)
    training = training_in(yaml.safe_load(text)) if not problems else None
    if training is None:
        raise UserError(*problems or [Problem("command", "starts no launch/train.py", "as in azureml/fast.yaml")])
    config = SCRIPT.parents[1] / training.config if training.config else None
    run = resolve(
        training.flags,
        world_size=training.nodes * training.processes_per_node,
        local_world_size=training.processes_per_node,
        hardware=_azure_hardware(training.processes_per_node),
        accelerate_config=str(config) if config else None,
        elsewhere=_IN_THE_IMAGE,
    )
    return run, check(run)


def _azure_hardware(processes_per_node: int) -> Hardware:
    return Hardware((_ASSUMED_GPU,) * processes_per_node, cores=8 * processes_per_node)


def _workspace(options: argparse.Namespace) -> Workspace | None:
    """The workspace that is named, None where none is. Raises `UserError` where it is named in part."""
    names = {field.name: getattr(options, field.name) for field in dataclasses.fields(Workspace)}
    if not any(names.values()):
        return None
    for name, value in names.items():
        if not value:
            raise mistake(name, "is missing beside the rest of the workspace", f"--{name}, or a config.json for all")
    return Workspace(**names)


def _refuse_local_files(run: RunSpec) -> None:
    """What only this machine has is not there when the job runs. Raises `UserError`."""
    for name in ("config", "dataset_name", "model_name_or_path", "deepspeed", "resume_from_checkpoint"):
        value = run[name] if run.explicit(name) else None
        if (
            not isinstance(value, str) or SCRIPT.parents[1].joinpath(value).is_file()
        ):  # a file of the checkout goes along
            continue
        if value.startswith((".", "/", "~")) or Path(value).exists():
            fixes = {"dataset_name": "--data with an asset or uri", "config": "its settings as flags after --"}
            fix = fixes.get(name, "a name on the Hub")
            raise mistake(name, f"{value} is on this machine only", fix, run.setting(name).source)


def _refuse_while_in_use(folder: Path) -> None:
    """Two runs must not write to one folder: the second would only fail, hours later perhaps. Raises `UserError`."""
    if local_job.running(folder / LOCAL_LOG):
        fix = f"another --output_dir, or wait: recipes logs -f {quote(str(folder))}"
        raise mistake("output_dir", f"another run is writing to {folder}", fix)
    earlier = noted(folder)
    if earlier and earlier.target == "slurm" and slurm_job.going_on(slurm_job.state(earlier.job)):
        what = f"job {earlier.job}, which is still to end, writes to {folder}"
        raise mistake("output_dir", what, f"another --output_dir, or first scancel {earlier.job}")


def _note(folder: Path, submission: Submission) -> None:
    """Once it is submitted nothing may look like a failure: what cannot be noted is said."""
    try:
        note(folder, submission)
    except OSError as error:
        print(f"not noted in {folder} ({error.strerror}): `recipes status` will not know it", file=sys.stderr)


def _gpu_count(text: str | None) -> int:
    """2 of `2` and of `a100:2`."""
    count = (text or "0").rpartition(":")[2]
    if not count.isdigit():
        raise mistake("gpus_per_node", f"{text!r} is no count of GPUs", "--gpus_per_node 4, or a100:4")
    return int(count)


def _job(
    options: argparse.Namespace,
    argv: Sequence[str],
    hardware: Hardware,
    processes_per_node: int,
    elsewhere: frozenset[str] | None = None,
) -> Job:
    """The checked job. Raises `UserError` with every error; advice is printed."""
    words = ["--recipe", options.recipe, *argv] if options.recipe else list(argv)
    run = _resolved(options, words, hardware, processes_per_node, elsewhere)
    _print(require_legal(run))
    return job_of(run, options.nodes, processes_per_node, argv, options.preflight)


def _resolved(
    options: argparse.Namespace,
    argv: Sequence[str],
    hardware: Hardware,
    processes_per_node: int,
    elsewhere: frozenset[str] | None,
) -> RunSpec:
    recipe = resolve(argv, hardware=hardware).recipe  # --recipe's, or that of --config's file
    run = resolve(
        argv,
        world_size=options.nodes * processes_per_node,
        local_world_size=processes_per_node,
        hardware=hardware,
        accelerate_config=str(shipped(recipe.engine)),
        elsewhere=elsewhere,
    )
    return with_fit(run)


def _print(problems: list[Problem]) -> None:
    if problems:
        from launch.terminal import console, print_problems

        print_problems(problems, console(stderr=True))


def _show(text: str, file: str | None) -> int:
    if file is None:
        sys.stdout.write(text)
        return 0
    try:
        with Path(file).open("x", encoding="utf-8") as stream:  # "x": an existing file is never overwritten
            stream.write(text)
    except FileExistsError:
        raise mistake("output", f"{file} exists already", "another name") from None
    except OSError as error:
        raise mistake("output", f"{file} cannot be written: {error.strerror}", "a file in a folder that can") from None
    print(f"written to {file}")
    return 0
