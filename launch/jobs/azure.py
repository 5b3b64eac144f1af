"""A job for Azure ML: the YAML that `az ml job create -f` takes, with one process a node and `accelerate launch` in it.

Only that form applies an Accelerate YAML: DeepSpeed and FSDP come from it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from launch.jobs.job import Job, flag_lines
from recipes.errors import mistake


@dataclass(frozen=True)
class Azure:
    """Where the job runs, and what it reads and writes."""

    compute: str | None = None
    instance_type: str | None = None
    spot: bool = False
    data: str | None = None
    output_uri: str | None = None
    environment: str | None = None
    experiment_name: str = "accelerate-recipes"
    job_name: str | None = None
    shm_size: str = "16g"


_LAUNCH = """\
accelerate launch --config_file accelerate_configs/{config}
--num_machines "$WORLD_SIZE" --num_processes "$((WORLD_SIZE * ${{{{inputs.processes_per_node}}}}))"
--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"
--rdzv_backend static --same_network {more}
launch/train.py"""


_PREFLIGHT = """\
python3 launch doctor
--nodes "$WORLD_SIZE" --num_processes "$((WORLD_SIZE * ${{inputs.processes_per_node}}))"
--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$((MASTER_PORT + 1))"
&& """


def render(job: Job, azure: Azure) -> str:
    """The job as YAML. It is to lie in azureml/, beside environment/ and below the code it uploads."""
    return yaml.dump(body(job, azure), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def body(job: Job, azure: Azure) -> dict[str, Any]:
    """The job as data, in the order a reader expects."""
    name = azure.job_name or job.run.recipe.name
    if job.run.explicit("output_dir"):
        raise mistake("output_dir", "is a folder of the job, gone with it", "--output_uri with a datastore's path")
    if not azure.compute and not azure.instance_type:
        raise mistake("compute", "is not given", "--compute NAME of a cluster, or --instance_type for serverless")
    if azure.spot and azure.compute:
        raise mistake("spot", "is for serverless compute; a cluster has its own tier", "--instance_type, or no --spot")
    resources: dict[str, Any] = {"instance_count": job.nodes, "shm_size": azure.shm_size}
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
    """Where checkpoints go: the same for the same words, so that the run resumes there; another one's for others."""
    if azure.output_uri:
        return _remote("output_uri", azure.output_uri)
    name = azure.job_name or job.run.recipe.name
    words = [*job.argv[2:], *([azure.data] if azure.data else [])]
    if words and not azure.job_name:
        name += "-" + hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]
    return f"azureml://datastores/workspaceblobstore/paths/accelerate-recipes/{name}"


def _remote(name: str, uri: str) -> str:
    if re.match(r"azureml:|[a-z]+://", uri):
        return uri
    raise mistake(name, f"{uri} is no place in the cloud", "azureml:NAME:VERSION, or a uri: azureml://datastores/...")


def _command(job: Job, azure: Azure) -> str:
    more = "--deepspeed_multinode_launcher standard" if job.run.engine.kind == "deepspeed" else ""
    text = (_PREFLIGHT if job.preflight else "") + _LAUNCH.format(config=job.run.recipe.engine, more=more)
    lines = [line.strip() for line in text.splitlines()]
    lines += flag_lines(job.words[1:], _quoted)
    lines += ["--dataset_name ${{inputs.data}}"] if azure.data else []
    lines += [] if job.run.explicit("report_to") else ["--report_to mlflow"]  # installed there, not here
    lines += ["--output_dir ${{outputs.run}}"]
    return " \\\n  ".join(lines) + "\n"


def _quoted(word: str) -> str:
    """A word for bash, in which Azure finds none of its `${{...}}`, nor of the old `{...}`, to fill in."""
    quoted = shlex.quote(word)
    return re.sub(r"\$(?=\{\{)|\{(?=inputs|outputs|\{)", lambda found: found.group() + "''", quoted)


def _input(uri: str) -> dict[str, str]:
    """A data asset (azureml:NAME:VERSION), or a file or folder anywhere a job can mount."""
    _remote("data", uri)
    last = uri.rstrip("/").rpartition("/")[2]
    return {"type": "uri_file" if "." in last and not uri.startswith("azureml:") else "uri_folder", "path": uri}


def _named(name: str) -> str:
    """A thing of the workspace, as a YAML refers to it."""
    return f"azureml:{name.removeprefix('azureml:')}"


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stay lines."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
