"""The target `azureml`: the YAML that `az ml job create -f` takes, and sending it.

The job has one process per node, which calls `accelerate launch`: Azure ML itself reads no
Accelerate YAML, and DeepSpeed and FSDP are chosen there.
"""

from __future__ import annotations

import getpass
import hashlib
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from launch.jobs import azure_read, azure_stage, azure_workspace
from launch.jobs.azure_stage import CODE, ENVIRONMENT
from launch.jobs.azure_workspace import Workspace
from launch.jobs.job import Job, Node, flag_lines, refuse_fresh
from launch.output.submission import NAME, Submission, announce
from recipes.errors import UserError, mistake
from recipes.flags import flag
from recipes.rules.data_and_model import file_kind
from recipes.run import Json, with_flags
from recipes.run.engine import launch_yaml

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

HELP = "Azure ML, through its SDK; --dry_run writes the YAML for `az ml job create`"
WRITES_HERE = False  # checkpoints stay in the datastore, only a note is here
STAGE: Callable[[Job, Path], Path] | None = azure_stage.stage


def _one_of(choices: str, help: str) -> Any:
    return field(default=None, metadata={"choices": tuple(choices.split()), "help": help})


@dataclass(frozen=True)
class Azure:
    """The flags of this target: where the job runs, what it reads and writes, and the workspace.

    None of them has been tried on Azure: Azure's own parser takes them.
    """

    compute: str | None = flag(None, "name of a cluster")
    instance_type: str | None = flag(None, "a VM size, for serverless compute")
    spot: bool = flag(False, "spot (preemptible) serverless compute: --job_tier spot")
    job_tier: str | None = _one_of("spot basic standard premium", "of serverless compute")
    priority: str | None = _one_of("low medium high", "in the queue of the compute, where that has priorities")
    timeout: str | None = flag(None, "Azure ML cancels the job after this time: seconds, 90m, 12h, 2d or 1-12:00:00")
    data: tuple[str, ...] = flag((), "data asset (azureml:NAME:VERSION) or uri; becomes --dataset_name, several mix")
    data_type: str | None = _one_of(
        "uri_file uri_folder", "of --data [by the uri's suffix; submitting asks the workspace for an asset's]"
    )
    output_uri: str | None = flag(
        None,
        "datastore path for checkpoints; a start with the same path resumes [accelerate-recipes/LOGIN/NAME-HASH on "
        "workspaceblobstore: LOGIN is yours on this machine, HASH that of the flags of train.py and --data]",
    )
    environment: str | None = flag(None, "an environment's name, instead of azureml/environment")
    identity: str | None = _one_of("managed user_identity", "the compute's or your own, to read data and secrets")
    hf_token_secret: str | None = flag(
        None, "VAULT/SECRET: the job reads HF_TOKEN from this key vault, with --identity managed"
    )
    experiment_name: str = flag("accelerate-recipes", "[accelerate-recipes]")
    job_name: str | None = flag(None, "[the recipe]")
    tags: tuple[str, ...] = flag((), "KEY=VALUE ..., to find the job again in the studio")
    shm_size: str = flag("16g", "size of /dev/shm [16g]")
    docker_args: str | None = flag(None, "more arguments of `docker run`: --docker_args='--ipc=host'")
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

# The value goes through a pipe into the environment: into no file, log or argument.
_TOKEN = 'HF_TOKEN="$(python3 launch/host/key_vault.py {secret})" && export HF_TOKEN &&\n'


def node(azure: Azure, processes: int | None) -> Node:
    return replace(azure_read.node(processes or 1), data=azure.data)


def render(job: Job, azure: Azure, kinds: Mapping[str, str] | None = None) -> str:
    """The job as YAML. Its relative paths are those of the code that `STAGE` writes beside it.

    `kinds` are the types of data assets as the workspace says; None if it was not asked.
    """
    text = yaml.dump(body(job, azure, kinds or {}), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    for asset in _untold(azure) if kinds is None else ():
        text = f"# {asset} is taken for a folder: --data_type says otherwise, submitting asks.\n{text}"
    return text


def _untold(azure: Azure) -> list[str]:
    """The data assets of which nobody said whether they are files."""
    return [] if azure.data_type else [data for data in azure.data if _is_asset(data)]


def body(job: Job, azure: Azure, kinds: Mapping[str, str] = MappingProxyType({})) -> Json:
    """The job as data, in the order a reader expects."""
    refuse_fresh(job, "another --output_uri")
    name = azure.job_name or job.run.recipe.name
    if azure.data and with_flags(job.argv, {"dataset_name": None}) != list(job.argv):
        raise mistake("data", "is the job's data set, and so is --dataset_name", "one of them")
    if job.run.explicit("output_dir"):
        raise mistake("output_dir", "is a folder of the job, gone with it", "--output_uri with a datastore's path")
    if not azure.compute and not azure.instance_type:
        raise mistake("compute", "is not given", "--compute NAME of a cluster, or --instance_type for serverless")
    build = {"build": {"path": f"{CODE}/{ENVIRONMENT}"}}
    identity = azure.identity or ("managed" if azure.hf_token_secret else None)
    return {
        "$schema": "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json",
        "type": "command",
        "display_name": name,
        "experiment_name": azure.experiment_name,
        "description": job.run.recipe.purpose,
        **_if_any("tags", _tags(azure.tags)),
        "code": CODE,
        "command": _command(job, azure),
        "environment": _named(azure.environment) if azure.environment else build,
        **_if_any("compute", _named(azure.compute) if azure.compute else None),
        **_if_any("queue_settings", _if_any("job_tier", _tier(azure)) | _if_any("priority", azure.priority)),
        **_if_any("identity", {"type": identity} if identity else None),
        **_if_any("limits", {"timeout": seconds(azure.timeout)} if azure.timeout else None),
        "resources": {
            "instance_count": job.nodes,
            "shm_size": azure.shm_size,
            **_if_any("instance_type", azure.instance_type),
            **_if_any("docker_args", azure.docker_args),
        },
        "distribution": {"type": "pytorch", "process_count_per_instance": 1},
        "environment_variables": {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.shutdown_seconds)},
        "inputs": {"processes_per_node": job.processes_per_node, **_inputs(azure, kinds)},
        "outputs": {"run": {"type": "uri_folder", "mode": "rw_mount", "path": output_of(job, azure)}},
    }


def _if_any(name: str, value: Any) -> Json:
    return {name: value} if value else {}


def _tier(azure: Azure) -> str | None:
    """The tier of serverless compute. A cluster has its own."""
    tier = azure.job_tier or ("spot" if azure.spot else None)
    if azure.spot and tier != "spot":
        raise mistake("spot", f"is a tier, and so is --job_tier {tier}", "one of them")
    if tier and azure.compute:
        flag = "spot" if azure.spot else "job_tier"
        raise mistake(flag, "is for serverless compute; a cluster has its own tier", f"--instance_type, or no --{flag}")
    return tier


def _tags(pairs: tuple[str, ...]) -> dict[str, str]:
    tags: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise mistake("tags", f"{pair!r} is not a key with its value", f"--tags {key or 'KEY'}=VALUE")
        if key in tags:
            raise mistake("tags", f"{key} is given twice", "write it once")
        tags[key] = value
    return tags


def seconds(time: str) -> int:
    """Seconds of a time limit.

    Raises `UserError` for what is none, or could be read in two ways: Slurm's 30:00 is minutes.
    """
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
    if found := re.fullmatch(r"(\d+)([smhd]?)", time):
        total = int(found[1]) * units[found[2]]
    elif found := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", time):
        days, hours, minutes, rest = (int(part or 0) for part in found.groups())
        total = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        total = 0
    if not total:
        raise mistake("timeout", f"{time!r} is not a time", "seconds, 90m, 12h, 2d, HH:MM:SS or D-HH:MM:SS")
    return total


def output_of(job: Job, azure: Azure) -> str:
    """Where checkpoints go: the same command line of the same person resumes from there, any other
    has its own place.
    """
    if azure.output_uri:
        return _remote("output_uri", azure.output_uri)
    name = azure.job_name or job.run.recipe.name
    words = [*(job.argv[:2] if job.run.recipe.files else ()), *job.argv[2:], *azure.data]
    words += (
        [azure_stage.config_path(job)] if job.config != str(launch_yaml(job.run.recipe, job.run["deepspeed"])) else []
    )
    if words and not azure.job_name:
        name += "-" + hashlib.sha256("\0".join(words).encode(errors="backslashreplace")).hexdigest()[:8]
    return f"azureml://datastores/workspaceblobstore/paths/accelerate-recipes/{_login()}/{name}"


def _login() -> str:
    """The name of whoever submits, as a path takes it."""
    try:
        return re.sub(r"[^\w.-]", "-", getpass.getuser())
    except (KeyError, OSError):  # a container's user without a name
        what = "has a default under your login name, which this machine does not know"
        raise mistake("output_uri", what, "--output_uri with a datastore's path, or USER=you") from None


_ASSET = re.compile(r"azureml:([^:@/\s]+[:@][^:@/\s]+|/subscriptions/.+)")
_URI = re.compile(r"(azureml|https?|wasbs?|abfss?|adl)://.+")  # the storage that Azure ML's documentation names


def _remote(name: str, uri: str) -> str:
    if _ASSET.fullmatch(uri) or _URI.fullmatch(uri):
        return uri
    raise mistake(
        name, f"{uri} is not a place in the cloud", "azureml:NAME:VERSION, or a uri: azureml://datastores/..."
    )


def _command(job: Job, azure: Azure) -> str:
    more = "--deepspeed_multinode_launcher standard" if job.launched == "deepspeed" else ""
    text = _LAUNCH.format(config=shlex.quote(azure_stage.config_path(job)), more=more)
    if azure.hf_token_secret:
        text = _TOKEN.format(secret=_secret(azure)) + text
    text = (_PREFLIGHT if job.preflight else "") + text
    lines = [line.strip() for line in text.splitlines()]
    lines += flag_lines(job.command[1:], _quoted)
    mounted = [f"${{{{inputs.{name}}}}}" for name in _inputs(azure, {})]
    lines += [" ".join(["--dataset_name", *mounted])] if mounted else []
    lines += [] if job.run.explicit("report_to") else ["--report_to mlflow"]  # mlflow is installed there, not here
    lines += ["--output_dir ${{outputs.run}}"]
    return " \\\n  ".join(lines) + "\n"


def _quoted(word: str) -> str:
    """A word quoted for bash, without any `${{...}}` or old `{...}` that Azure would fill in."""
    quoted = shlex.quote(word)
    return re.sub(r"\$(?=\{\{)|\{(?=inputs|outputs|\{)", lambda found: found.group() + "''", quoted)


def _inputs(azure: Azure, kinds: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The data as the job mounts it, files under their own names, or folders: `data`, and for the
    other parts of a mixture `data_2` and so on.
    """
    names = ["data", *(f"data_{number}" for number in range(2, len(azure.data) + 1))]
    return {name: _input(data, azure.data_type or kinds.get(data)) for name, data in zip(names, azure.data)}  # noqa: B905


def _input(data: str, kind: str | None) -> dict[str, str]:
    if re.fullmatch(r"azureml:[^:@/\s]+", data):
        what = f"{data} is not a version of a data asset"
        raise mistake("data", what, f"{data}:VERSION or {data}@latest")
    uri = _remote("data", data)
    is_file = not _is_asset(uri) and file_kind(PurePosixPath(uri.partition("?")[0]))
    return {"type": kind or ("uri_file" if is_file else "uri_folder"), "path": uri}


def _is_asset(uri: str) -> bool:
    """Whether the workspace alone knows what it is: an asset, by its name or its id."""
    return uri.startswith("azureml:") and not re.match(r"azureml://(subscriptions/.*/)?datastores/", uri)


def _secret(azure: Azure) -> str:
    """The address of a secret.

    Raises `UserError`, which never shows what was given: it may be the token itself.
    """
    if azure.identity == "user_identity":
        what = "is read with the identity of the compute, which the image can use"
        raise mistake("hf_token_secret", what, "--identity managed")
    given = azure.hf_token_secret or ""
    if found := re.fullmatch(r"([A-Za-z][A-Za-z0-9-]{1,22}[A-Za-z0-9])/([A-Za-z0-9-]{1,127})", given):
        return f"https://{found[1]}.vault.azure.net/secrets/{found[2]}"
    if re.fullmatch(r"https://[\w.-]+(:\d+)?/secrets/[A-Za-z0-9-]+(/\w+)?", given):
        return given
    what = "is not a key vault and the name of a secret in it"
    raise mistake("hf_token_secret", what, "VAULT/SECRET, or the secret's identifier: https://VAULT.../secrets/SECRET")


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
    _workspace(azure)
    with tempfile.TemporaryDirectory() as folder:
        azure_stage.stage(job, Path(folder))
        _, problems = azure_read.read_text(text, Path(folder))
    errors = [problem for problem in problems if problem.severity == "error"]
    if errors:
        raise UserError(*errors)


def submit(text: str, job: Job, azure: Azure) -> int:
    client = azure_workspace.connected(_workspace(azure))
    if assets := _untold(azure):
        text = render(job, azure, {asset: azure_workspace.data_type(client, asset) for asset in assets})
    with tempfile.TemporaryDirectory() as folder:
        azure_stage.stage(job, Path(folder))
        name, address = azure_workspace.submit(client, text, Path(folder))
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
