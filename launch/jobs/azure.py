"""The target `azureml`: the YAML that `az ml job create -f` takes, and sending it.

The job has one process per node, which calls `accelerate launch`: Azure ML itself reads no
Accelerate YAML, and DeepSpeed and FSDP are chosen there.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from launch.jobs import azure_read, azure_workspace
from launch.jobs.azure_workspace import Workspace
from launch.jobs.job import SCRIPT, Job, Node, flag_lines, launch_yaml, refuse_fresh
from launch.output.submission import NAME, Submission, announce
from recipes.errors import UserError, mistake
from recipes.flags import flag
from recipes.run import Json
from recipes.run.engine import shipped

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

HELP = "Azure ML, through its SDK; --dry_run writes the YAML for `az ml job create`"
WRITES_HERE = False  # checkpoints stay in the datastore, only a note is here
_CHECKOUT = SCRIPT.parents[1]
FOLDER: Path | None = _CHECKOUT / "azureml"


@dataclass(frozen=True)
class Azure:
    """The flags of this target: where the job runs, what it reads and writes, and the workspace."""

    compute: str | None = flag(None, "name of a cluster")
    instance_type: str | None = flag(None, "a VM size, for serverless compute")
    spot: bool = flag(False, "spot (preemptible) serverless compute")
    data: str | None = flag(None, "data asset (azureml:NAME:VERSION) or uri; becomes --dataset_name")
    output_uri: str | None = flag(None, "datastore path for checkpoints, the same for every start of this run")
    environment: str | None = flag(None, "an environment's name, instead of azureml/environment")
    experiment_name: str = flag("accelerate-recipes", "[accelerate-recipes]")
    job_name: str | None = flag(None, "[the recipe]")
    shm_size: str = flag("16g", "size of /dev/shm [16g]")
    subscription_id: str | None = flag(None, "the workspace, with the next two [config.json here or in a folder above]")
    resource_group: str | None = flag(None, "")
    workspace_name: str | None = flag(None, "")


FLAGS: type = Azure

_LAUNCH = """\
accelerate launch --config_file {config}
--num_machines "$WORLD_SIZE" --num_processes "$((WORLD_SIZE * ${{{{inputs.processes_per_node}}}}))"
--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"
--rdzv_backend static --same_network {more}
launch/train.py"""


_PREFLIGHT = """\
python3 launch doctor
--nodes "$WORLD_SIZE" --num_processes "$((WORLD_SIZE * ${{inputs.processes_per_node}}))"
--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$((MASTER_PORT + 1))"
&& """


def node(azure: Azure, processes: int | None) -> Node:
    return azure_read.node(processes or 1)


def render(job: Job, azure: Azure) -> str:
    """The job as YAML for a file in azureml/: the environment's and the code's path start there."""
    return yaml.dump(body(job, azure), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def body(job: Job, azure: Azure) -> Json:
    """The job as data, in the order a reader expects."""
    refuse_fresh(job, "another --output_uri")
    name = azure.job_name or job.run.recipe.name
    if job.run.explicit("output_dir"):
        raise mistake("output_dir", "is a folder of the job, gone with it", "--output_uri with a datastore's path")
    if not azure.compute and not azure.instance_type:
        raise mistake("compute", "is not given", "--compute NAME of a cluster, or --instance_type for serverless")
    if azure.spot and azure.compute:
        raise mistake("spot", "is for serverless compute; a cluster has its own tier", "--instance_type, or no --spot")
    resources: Json = {"instance_count": job.nodes, "shm_size": azure.shm_size}
    resources |= {"instance_type": azure.instance_type} if azure.instance_type else {}
    return {
        "$schema": "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json",
        "type": "command",
        "display_name": name,
        "experiment_name": azure.experiment_name,
        "description": job.run.recipe.purpose,
        "code": "..",
        "command": _command(job, azure),
        "environment": _named(azure.environment) if azure.environment else {"build": {"path": "environment"}},
        **({"compute": _named(azure.compute)} if azure.compute else {}),
        **({"queue_settings": {"job_tier": "spot"}} if azure.spot else {}),
        "resources": resources,
        "distribution": {"type": "pytorch", "process_count_per_instance": 1},
        "environment_variables": {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.shutdown_seconds)},
        "inputs": {
            "processes_per_node": job.processes_per_node,
            **({"data": _input(azure.data)} if azure.data else {}),
        },
        "outputs": {"run": {"type": "uri_folder", "mode": "rw_mount", "path": output_of(job, azure)}},
    }


def output_of(job: Job, azure: Azure) -> str:
    """Where checkpoints go: the same command line resumes from there, another has its own place."""
    if azure.output_uri:
        return _remote("output_uri", azure.output_uri)
    name = azure.job_name or job.run.recipe.name
    words = [*(job.argv[:2] if job.run.recipe.files else ()), *job.argv[2:], *([azure.data] if azure.data else [])]
    words += [_config(job)] if job.config != str(launch_yaml(job.run)) else []
    if words and not azure.job_name:
        name += "-" + hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]
    return f"azureml://datastores/workspaceblobstore/paths/accelerate-recipes/{name}"


def _remote(name: str, uri: str) -> str:
    if re.match(r"azureml:|[a-z]+://", uri):
        return uri
    raise mistake(
        name, f"{uri} is not a place in the cloud", "azureml:NAME:VERSION, or a uri: azureml://datastores/..."
    )


def _command(job: Job, azure: Azure) -> str:
    more = "--deepspeed_multinode_launcher standard" if job.launched == "deepspeed" else ""
    text = (_PREFLIGHT if job.preflight else "") + _LAUNCH.format(config=_config(job), more=more)
    lines = [line.strip() for line in text.splitlines()]
    lines += flag_lines(job.command[1:], _quoted)
    lines += ["--dataset_name ${{inputs.data}}"] if azure.data else []
    lines += [] if job.run.explicit("report_to") else ["--report_to mlflow"]  # mlflow is installed there, not here
    lines += ["--output_dir ${{outputs.run}}"]
    return " \\\n  ".join(lines) + "\n"


def _config(job: Job) -> str:
    """The Accelerate YAML as the job finds it, whose folder is the checkout."""
    file = Path(job.config)
    return shlex.quote(str(file.relative_to(_CHECKOUT)) if file.is_relative_to(_CHECKOUT) else str(file))


def _quoted(word: str) -> str:
    """A word quoted for bash, without any `${{...}}` or old `{...}` that Azure would fill in."""
    quoted = shlex.quote(word)
    return re.sub(r"\$(?=\{\{)|\{(?=inputs|outputs|\{)", lambda found: found.group() + "''", quoted)


def _input(uri: str) -> dict[str, str]:
    """A data asset (azureml:NAME:VERSION), or a file or folder anywhere a job can mount."""
    _remote("data", uri)
    last = uri.rstrip("/").rpartition("/")[2]
    return {"type": "uri_file" if "." in last and not uri.startswith("azureml:") else "uri_folder", "path": uri}


def _named(name: str) -> str:
    """A resource of the workspace, as a YAML refers to it."""
    return f"azureml:{name.removeprefix('azureml:')}"


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, line by line."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


# --- Checking and sending -------------------------------------------------------------------------


def check(text: str, job: Job, azure: Azure) -> None:
    """What would be sent is read back as `recipes check --azureml` reads it.

    Raises `UserError` with every error.
    """
    assert FOLDER
    if not FOLDER.joinpath("environment").is_dir():
        what = "uploads a checkout, and this is an installed wheel"
        raise mistake("azureml", what, "run it in a clone of the project")
    _workspace(azure)
    _refuse_local_files(job)
    _, problems = azure_read.read_text(text, FOLDER)
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise UserError(*errors)


def submit(text: str, job: Job, azure: Azure) -> int:
    assert FOLDER
    client = azure_workspace.connected(_workspace(azure))
    name, address = azure_workspace.submit(client, text, FOLDER)
    workspace = asdict(azure_workspace.workspace_of(client))
    submission = Submission("azureml", job.title, address, name, workspace=workspace)
    found_at = {"studio": address, "output": f"{output_of(job, azure)}: submit the same job again to resume from there"}
    announce(Path("outputs") / name, submission, found_at, cancel=f"az ml job cancel --name {name}")
    return 0


def _workspace(azure: Azure) -> Workspace | None:
    """The workspace that the flags name; None if they name none.

    Raises `UserError` if they name a part of it.
    """
    names = {field.name: getattr(azure, field.name) for field in fields(Workspace)}
    if not any(names.values()):
        return None
    for name, value in names.items():
        if not value:
            raise mistake(name, "is missing beside the rest of the workspace", f"--{name}, or a config.json for all")
    return Workspace(**names)


def _refuse_local_files(job: Job) -> None:
    """Files that only this machine has will be missing when the job runs. Raises `UserError`."""
    run = job.run
    for name in ("config", "dataset_name", "model_name_or_path", "deepspeed", "resume_from_checkpoint"):
        value = run[name] if run.explicit(name) else None
        if not isinstance(value, str) or _CHECKOUT.joinpath(value).is_file():  # the checkout is uploaded
            continue
        if value.startswith((".", "/", "~")) or Path(value).exists():
            fixes = {"dataset_name": "--data with an asset or uri", "config": "its settings as flags after --"}
            fix = fixes.get(name, "a name on the Hub")
            raise mistake(name, f"{value} is on this machine only", fix, run.setting(name).source)
    for file in run.recipe.files:
        uploaded = (_CHECKOUT / file).resolve()
        if Path(file).is_absolute() or uploaded != Path(file).resolve() or not uploaded.is_relative_to(_CHECKOUT):
            fix = f"put it into {_CHECKOUT}, and submit there: --recipe mine.yaml"
            raise mistake("recipe", f"{file} is not in the checkout that is uploaded", fix)
    if run.recipe.files and not shipped(run.recipe.engine).is_relative_to(_CHECKOUT):
        raise mistake("engine", f"{run.recipe.engine} is on this machine only", f"put it into {_CHECKOUT}")
    if not Path(job.config).is_relative_to(_CHECKOUT):
        raise mistake("accelerate_config", f"{job.config} is on this machine only", f"put it into {_CHECKOUT}")


# --- A job that was submitted ---------------------------------------------------------------------


def state(submission: Submission) -> str:
    return azure_workspace.state(_client(submission), submission.job)


def is_over(state: str) -> bool:
    return azure_workspace.is_over(state)


def print_log(submission: Submission, folder: Path, following: bool) -> None:
    """The SDK streams the log of a running job only, and downloads the log of an ended one only."""
    client = _client(submission)
    state = azure_workspace.state(client, submission.job)
    if is_over(state):
        for file in azure_workspace.download_logs(client, submission.job, folder):
            print(file.read_text(encoding="utf-8", errors="replace"), end="")
        print(f"{state}: {submission.log}")
    elif following:
        azure_workspace.stream(client, submission.job)
    else:
        raise mistake("logs", f"job {submission.job} is {state}", f"recipes logs -f {folder}, or {submission.log}")


def last_line(submission: Submission) -> str:
    return submission.log  # the job's address: the log itself is not here


def _client(submission: Submission) -> MLClient:
    try:
        workspace = Workspace(**submission.workspace)
    except TypeError:
        raise mistake(NAME, "does not name the workspace of the job", f"look at {submission.log}") from None
    return azure_workspace.connected(workspace)
