"""Azure ML through its own SDK: reading a job's YAML, sending it, its state and its log."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.jobs.azure_check import BUILD, as_problems, missed_by_azure, misshapen
from recipes.errors import Problem, UserError, mistake
from recipes.quiet import silence
from recipes.run import Json
from recipes.run.files import yaml_content

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Job

_IN_CHECKOUT = (Path(__file__).resolve().parents[2] / "pyproject.toml").is_file()
_EXTRA = "azure-ai-ml==1.35.2 azure-identity"  # the extra `azureml` of pyproject.toml
INSTALL = "pip install -e '.[azureml]' in the checkout" if _IN_CHECKOUT else f"pip install {_EXTRA}"
_OVER = ("Completed", "Failed", "Canceled", "NotResponding", "Paused")


@dataclass(frozen=True)
class Workspace:
    """The names of a workspace, as in the config.json that Azure ML's studio hands out."""

    subscription_id: str
    resource_group: str
    workspace_name: str


def sdk_is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("azure", "azure.ai", "azure.ai.ml", "azure.identity"))


def require_sdk() -> None:
    if not sdk_is_installed():
        fix = f"{INSTALL}; or --dry_run --output mine.yaml and `az ml job create -f mine.yaml`"
        raise mistake("azureml", "Azure's SDK, azure-ai-ml, is not installed", fix)


def problems_of(text: str, folder: Path) -> list[Problem]:
    """Everything wrong with a job's YAML, also by Azure's parser if it is installed.

    `folder` is where the YAML's relative paths start.
    """
    try:
        content = yaml_content(text, "the job", "azureml")
    except UserError as error:
        return list(error.problems)
    if not isinstance(content, dict):
        return [Problem("azureml", "is not a job: a mapping of names to values is expected", "as in azureml/fast.yaml")]
    found = misshapen(content)
    if found:
        return found
    found = missed_by_azure(content, folder)
    if sdk_is_installed():
        known = {problem.subject for problem in found}
        if known & {"type", BUILD}:  # it would judge a job of another kind, or read another folder for hours
            return found
        found += [problem for problem in _refused_by_azure(text, folder) if problem.subject not in known]
    return found


def _refused_by_azure(text: str, folder: Path) -> list[Problem]:
    try:
        body(load(text, folder))
    except UserError as error:
        return list(error.problems)
    return []


def load(text: str, folder: Path) -> Job:
    """A YAML as Azure's SDK reads it. Raises `UserError` with each error of Azure's parser."""
    with silence(), _parsing():
        from azure.ai.ml import load_job

        return load_job(io.StringIO(text), relative_origin=str(folder / "job.yaml"))


def body(job: Job) -> Json:
    """The properties of the request that would be sent.

    Only private names lead there: the SDK's version is pinned.
    """
    with silence(), _parsing():
        return job._to_job()._to_rest_object().as_dict()["properties"]  # type: ignore[attr-defined]


def connected(workspace: Workspace | None) -> MLClient:
    """A client with the login of `az login`, of a managed identity, or of the environment.

    It connects lazily. Without `workspace`, a config.json here or in a folder above names it.
    """
    require_sdk()
    with silence(), _asking():
        from azure.ai.ml import MLClient
        from azure.identity import DefaultAzureCredential

        if workspace is None:
            return MLClient.from_config(DefaultAzureCredential())
        names = asdict(workspace)
        return MLClient(DefaultAzureCredential(), resource_group_name=names.pop("resource_group"), **names)


def workspace_of(client: MLClient) -> Workspace:
    return Workspace(client.subscription_id, client.resource_group_name, client.workspace_name or "")


def data_type(client: MLClient, asset: str) -> str:
    """What a data asset is, uri_file or uri_folder, as the workspace says.

    Raises `UserError` for an mltable, which train.py does not read, and for an asset elsewhere.
    """
    named = re.fullmatch(r"azureml:([^:@/]+)(?::([^:@/]+)|@([^:@/]+))", asset)
    if named is None:
        raise mistake("data", f"{asset} is not an asset of this workspace", "--data_type uri_file or uri_folder")
    name, version, label = named.groups()
    with silence(), _asking():
        kind = str(client.data.get(name, version=version, label=label).type)
    if kind not in ("uri_file", "uri_folder"):
        raise mistake("data", f"{asset} is of type {kind}, which train.py cannot read", "a uri_file or uri_folder")
    return kind


def submit(client: MLClient, text: str, folder: Path) -> tuple[str, str]:
    """Upload the code and create the job. Returns its name and its address in Azure ML's studio."""
    job = load(text, folder)
    with silence(), _asking():
        created = client.jobs.create_or_update(job)
    return str(created.name), str(created.studio_url or "")


def state(client: MLClient, name: str) -> str:
    """Azure ML's own word: Queued, Preparing, Running, Completed, Failed, Canceled, ..."""
    with silence(), _asking():
        status = client.jobs.get(name).status
    return str(getattr(status, "value", status))


def is_over(state: str) -> bool:
    return state in _OVER


def stream(client: MLClient, name: str) -> None:
    """Print the job's log as it is written, until the job has ended.

    Ctrl-C stays KeyboardInterrupt.
    """
    with silence(), _asking():
        from azure.ai.ml.exceptions import JobException

        try:
            client.jobs.stream(name)
        except JobException as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


def download_logs(client: MLClient, name: str, folder: Path) -> list[Path]:
    """The logs of an ended job, copied into the folder."""
    with silence(), _asking():
        client.jobs.download(name, download_path=folder)
    return sorted(folder.rglob("std_log*.txt"))


# --- The SDK's errors -----------------------------------------------------------------------------


@contextlib.contextmanager
def _parsing() -> Iterator[None]:
    """Turns what the SDK's parser raises into `UserError`: it stops at some mistakes with a
    TypeError or the like.
    """
    try:
        yield
    except Exception as error:
        raise UserError(*as_problems(error, _legal_at)) from None


def _legal_at(path: Sequence[str]) -> list[str]:
    """The names that the SDK's own schema knows at a place in a job's YAML; empty if unknown."""
    from azure.ai.ml._schema.job.command_job import CommandJobSchema
    from azure.ai.ml.constants._common import BASE_PATH_CONTEXT_KEY

    schema = CommandJobSchema(context={BASE_PATH_CONTEXT_KEY: Path()})
    for name in path:
        nested = getattr(schema.fields.get(name), "schema", None)
        if nested is None:
            return []
        schema = nested
    return [name for name, field in schema.fields.items() if not field.dump_only and name != "schema_ignored"]


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Turns what the login or the service refuses into `UserError`."""
    from azure.core.exceptions import AzureError, ClientAuthenticationError, ServiceRequestError

    try:
        yield
    except ClientAuthenticationError:
        fix = "az login, or the variables of DefaultAzureCredential (AZURE_CLIENT_ID and others)"
        raise mistake("azureml", "there is no login to Azure, or none for this workspace", fix) from None
    except ServiceRequestError as error:
        raise mistake("azureml", f"Azure cannot be reached: {_first_line(error)}", "check the network") from None
    except (AzureError, ValueError) as error:
        named = "config.json" in str(error)
        fix = "--subscription_id, --resource_group and --workspace_name" if named else "correct what it names"
        raise mistake("azureml", f"Azure says: {_first_line(error)}", fix) from None


def _first_line(error: Exception) -> str:
    text = re.sub(r"\x1b\[\d+m", "", str(error)).strip()
    return text.partition("\n")[0].rstrip(".")
