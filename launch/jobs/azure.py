"""The target `azureml`: write and check the YAML of a job for `az ml job create -f`, send a job.

The job has one process per node, which calls `accelerate launch`, because only Accelerate reads the
YAML that chooses DeepSpeed or FSDP. Azure's SDK checks a job's YAML; this file checks only what the
SDK misses.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

import recipes
from launch.host.secrets import without_secrets
from launch.jobs.job import ASSUMED_GPU, SCRIPT, Job, Target, flag_lines, one_of
from launch.output.submission import Submission, announce
from recipes.errors import Problem, mistake, raise_errors
from recipes.flags import flag
from recipes.mixture import parts_of, paths_of
from recipes.quiet import silence
from recipes.rules.check import check
from recipes.rules.data_and_model import file_kind, the_folder_holds_a_model
from recipes.rules.facts import mapping
from recipes.rules.local_model import model_folder
from recipes.run import Json, RunSpec, here, resolve, with_flags
from recipes.run.files import existing_path, read_yaml, shipped
from recipes.run.hardware import Hardware
from recipes.run.place import Place, launch_yaml

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Job as SdkJob

INSTALL = "pip install azure-ai-ml==1.35.2 azure-identity"  # the extra `azureml` of pyproject.toml
CODE = "recipes-code"  # the folder of the job's code, beside the job's YAML
ENVIRONMENT = "azureml/environment"
_LEFT_OUT = ("__pycache__", "*.pyc", ".*", "accelerate_configs", "azureml")  # a wheel has the last two in recipes/
_PACKAGES = frozenset({"mlflow"})  # azureml/environment/requirements.txt adds them to our requirements
_WORKSPACE = ("subscription_id", "resource_group", "workspace_name")  # the keys of the studio's config.json

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


@dataclass(frozen=True)
class Azure(Target):
    """The flags of this target: the job's machines, inputs and outputs, and the workspace.

    No flag has been tried on Azure itself; Azure's own parser accepts all of them.
    """

    HELP = "Azure ML, through its SDK; --dry_run prints the YAML for `az ml job create`"
    WRITES_HERE = False  # checkpoints go to the datastore; only submission.json is written here

    compute: str | None = flag(None, "name of a cluster")
    instance_type: str | None = flag(None, "a VM size, for serverless compute")
    spot: bool = flag(False, "use spot (preemptible) serverless compute")
    timeout: int | None = flag(None, "seconds after which Azure ML cancels the job")
    data: tuple[str, ...] = flag(
        (), "data asset (azureml:NAME:VERSION), uri, or local path (uploaded), for --dataset_name; several are mixed"
    )
    data_type: str | None = one_of("uri_file uri_folder", "type of --data [a path's own; uri: by suffix; else folder]")
    output_uri: str | None = flag(
        None,
        "datastore path for checkpoints; a job with the same path resumes [accelerate-recipes/LOGIN/NAME on "
        "workspaceblobstore; LOGIN: your login; NAME: --output_dir or --job_name, else the recipe with a hash of "
        "the flags, --data and your own YAML]",
    )
    environment: str | None = flag(None, "name of an environment to use instead of azureml/environment")
    identity: str | None = one_of("managed user_identity", "read data with the rights of the compute, or with yours")
    experiment_name: str = flag("accelerate-recipes", "name of the experiment [accelerate-recipes]")
    job_name: str | None = flag(None, "name of the job [the recipe]")
    shm_size: str = flag("16g", "size of /dev/shm [16g]")
    subscription_id: str | None = flag(None, "subscription of the workspace [from config.json, here or further up]")
    resource_group: str | None = flag(None, "resource group of the workspace [from the same config.json]")
    workspace_name: str | None = flag(None, "name of the workspace [from the same config.json]")

    def place(self, processes: int | None, nodes: int = 1, accelerate_config: str | None = None) -> Place:
        """Return the job's nodes, which are not visible here, with one assumed GPU per process."""
        processes = processes or 1
        hardware = Hardware((ASSUMED_GPU,) * processes, cores=8 * processes)
        return here(nodes * processes, accelerate_config, processes, hardware=hardware, packages=_PACKAGES)

    def render(self, job: Job) -> str:
        """Return the job as YAML, whose relative paths point to the code that `stage` writes.
        Raises `UserError` for flags that are missing or contradict each other.
        """
        found: list[tuple[str, str, str]] = []
        if self.data and with_flags(job.argv, {"dataset_name": None}) != list(job.argv):
            found.append(("data", "names the job's data set, and so does --dataset_name", "give only one of them"))
        folder = _output_dir(job)
        if folder and self.output_uri:
            found.append(("output_dir", "names an output path, and so does --output_uri", "give only one of them"))
        elif folder.startswith(("/", "~", "..")):
            found.append(("output_dir", "lies outside the job's datastore path", "use a path such as outputs/mine"))
        if not self.compute and not self.instance_type:
            found.append(("compute", "is not given", "use --compute NAME for a cluster, or --instance_type"))
        if self.spot and self.compute:  # a cluster has its own tier: Azure would ignore --spot, and charge for the tier
            found.append(("spot", "needs serverless compute", "replace --compute by --instance_type, or omit --spot"))
        own_files(job, [Problem(*words) for words in found])
        inputs = self._inputs(job)
        content = {
            "$schema": "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json",
            "type": "command",
            "display_name": self.job_name or job.run.recipe.name,
            "experiment_name": self.experiment_name,
            "description": job.run.recipe.purpose,
            "code": CODE,
            "command": self._command(job, inputs),
            "environment": _named(self.environment) or {"build": {"path": f"{CODE}/{ENVIRONMENT}"}},
            "compute": _named(self.compute),
            "queue_settings": _present({"job_tier": self.spot and "spot"}),
            "identity": _present({"type": self.identity}),
            "limits": _present({"timeout": self.timeout}),
            "resources": {
                "instance_count": job.nodes,
                "shm_size": self.shm_size,
                **_present({"instance_type": self.instance_type}),
            },
            "distribution": {"type": "pytorch", "process_count_per_instance": 1},
            "environment_variables": {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110"},
            "inputs": {"processes_per_node": job.run.local_world_size, **inputs},
            "outputs": {"run": {"type": "uri_folder", "mode": "rw_mount", "path": self.output_of(job)}},
        }
        return yaml.dump(_present(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)

    def output_of(self, job: Job) -> str:
        """Return the datastore path of the checkpoints. The same command line by the same person
        gets the same path, so the job resumes. Other flags of train.py, other `--data` or another
        Accelerate YAML get another path, unless a flag names the path, the folder or the job.
        """
        if self.output_uri:
            return _remote("output_uri", self.output_uri)
        named = re.sub(r"[^\w./-]", "-", _output_dir(job)) or self.job_name
        name = named or job.run.recipe.name
        words = [*(job.argv[:2] if job.run.recipe.file else ()), *job.argv[2:], *self.data]
        words += [_config(job)] if job.config != str(launch_yaml(job.run.recipe, job.run["deepspeed"])) else []
        if words and not named:
            name += "-" + hashlib.sha256("\0".join(words).encode(errors="backslashreplace")).hexdigest()[:8]
        user = os.environ.get("LOGNAME") or os.environ.get("USER") or str(os.getuid())
        login = re.sub(r"[^\w.-]", "-", user)
        return f"azureml://datastores/workspaceblobstore/paths/accelerate-recipes/{login}/{name}"

    def _command(self, job: Job, inputs: Mapping[str, Any]) -> str:
        more = "--deepspeed_multinode_launcher standard" if job.launched == "deepspeed" else ""
        text = (_PREFLIGHT if job.preflight else "") + _LAUNCH.format(config=shlex.quote(_config(job)), more=more)
        lines = [line.strip() for line in text.splitlines()]
        own = with_flags(job.argv, dict.fromkeys(["output_dir"] + ["model_name_or_path"] * ("model" in inputs)))
        lines += flag_lines(replace(job, argv=tuple(own)).command[1:], _quoted)
        lines += ["--model_name_or_path ${{inputs.model}}"] * ("model" in inputs)
        mounted = [f"${{{{inputs.{name}}}}}" for name in inputs if name != "model"]
        lines += [" ".join(["--dataset_name", *mounted])] if mounted else []
        lines += [] if job.run.explicit("report_to") else ["--report_to mlflow"]  # mlflow is only in the job's image
        lines += ["--output_dir ${{outputs.run}}"]
        return " \\\n  ".join(lines) + "\n"

    def _inputs(self, job: Job) -> dict[str, dict[str, str]]:
        """Return the job's inputs by name: `data`, `data_2` and so on for `--data`, `model` for a
        local model folder. Azure's SDK uploads local files and folders.
        """
        inputs = {}
        for number, data in enumerate(self.data, start=1):
            uri = str(local.resolve()) if (local := existing_path(data)) else _remote("data", data)
            is_file = local.is_file() if local else file_kind(PurePosixPath(uri.partition("?")[0]))
            kind = self.data_type or ("uri_file" if is_file else "uri_folder")
            inputs["data" if number == 1 else f"data_{number}"] = {"type": kind, "path": uri}
        if model := model_folder(job.run["model_name_or_path"]):
            inputs["model"] = {"type": "uri_folder", "path": str(model.resolve())}
        return inputs

    def stage(self, job: Job, folder: Path) -> Path:
        """Write this package, and the user's files that the run names, beside the job's YAML.

        The user's files keep their paths relative to the current folder, so that the command line
        is valid in the job. Jobs whose YAMLs lie in one folder share the code; each job writes the
        code again. Raises `UserError` for a file that cannot be uploaded.
        """
        code, own = folder / CODE, own_files(job)
        sources = {"launch": SCRIPT.parent, "recipes": Path(recipes.__file__).parent}
        sources |= {"accelerate_configs": shipped(""), ENVIRONMENT: shipped("environment", "azureml")}
        for name, source in sources.items():
            shutil.copytree(source, code / name, ignore=shutil.ignore_patterns(*_LEFT_OUT), dirs_exist_ok=True)
        for file in own:
            (code / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, code / file)
        return code

    def check(self, text: str, job: Job) -> None:
        """Raise `UserError` for a secret, a file that cannot be uploaded, or the SDK's refusal."""
        without_secrets(text)
        with tempfile.TemporaryDirectory() as folder:
            self.stage(job, Path(folder))
            if sdk_is_installed():
                load(text, Path(folder))

    def send(self, text: str, job: Job) -> int:
        client = connected({name: value for name in _WORKSPACE if (value := getattr(self, name))})
        with tempfile.TemporaryDirectory() as folder:
            self.stage(job, Path(folder))
            sdk_job = load(text, Path(folder))
            with silence(), _asking():
                created = client.jobs.create_or_update(sdk_job)
        name, address = str(created.name), str(created.studio_url or "")
        workspace = client.subscription_id, client.resource_group_name, client.workspace_name
        names = {name: str(value) for name, value in zip(_WORKSPACE, workspace, strict=True)}
        submission = Submission("azureml", job.title, address, name, workspace=names)
        output = f"{self.output_of(job)}: submit the same job again to resume from there"
        cancel = f"az ml job cancel --name {name}"
        announce(Path("outputs") / name, submission, {"studio": address, "output": output}, cancel)
        return 0

    @classmethod
    def state(cls, submission: Submission) -> str:
        """Return Azure ML's status: Queued, Preparing, Running, Completed, Failed, ..."""
        client = connected(submission.workspace)
        with silence(), _asking():
            status = client.jobs.get(submission.job).status
        return str(getattr(status, "value", status))

    @classmethod
    def is_over(cls, state: str) -> bool:
        return state in ("Completed", "Failed", "Canceled", "NotResponding", "Paused")

    @classmethod
    def print_log(cls, submission: Submission, folder: Path, following: bool) -> None:
        """Print an ended job's log; stream a live job's if `following`, else raise `UserError`."""
        name, state = submission.job, cls.state(submission)
        if not cls.is_over(state) and not following:
            raise mistake("logs", f"the job is still {state}", f"recipes logs -f {folder}, or open {submission.log}")
        jobs = connected(submission.workspace).jobs
        with silence(), _asking():
            jobs.download(name, download_path=folder) if cls.is_over(state) else jobs.stream(name)
        if cls.is_over(state):
            for file in sorted(folder.rglob("std_log*.txt")):
                print(file.read_text(encoding="utf-8", errors="replace"), end="")
            print(f"{state}: {submission.log}")


# A data asset, or a uri of the storage that Azure ML's documentation lists.
_REMOTE = re.compile(
    r"azureml:[^:@/\s]+[:@][^:@/\s]+|azureml:/subscriptions/.+|(azureml|https?|wasbs?|abfss?|adl)://.+"
)


def _remote(name: str, uri: str) -> str:
    """Return `uri`. Raise `UserError` if it is not in the cloud."""
    if _REMOTE.fullmatch(uri):
        return uri
    fix = "use azureml:NAME:VERSION, azureml:NAME@latest, or a uri: azureml://datastores/..."
    what = "is not a data asset or a uri of storage" + ", nor a local path" * (name == "data")
    raise mistake(name, f"{uri} {what}", fix)


def _output_dir(job: Job) -> str:
    """Return the output folder if the user named one, else an empty text."""
    return os.path.normpath(job.run["output_dir"]) if job.run.explicit("output_dir") else ""


def _present(content: Json) -> Json:
    return {name: value for name, value in content.items() if value}


def _named(name: str | None) -> str | None:
    """Return the name by which a YAML refers to a resource of the workspace."""
    return f"azureml:{name.removeprefix('azureml:')}" if name else None


def _quoted(word: str) -> str:
    """Quote a word for bash, and keep Azure from replacing `${{...}}` or the old `{...}` in it."""
    quoted = shlex.quote(word)
    return re.sub(r"\$(?=\{\{)|\{(?=inputs|outputs|\{)", lambda found: found.group() + "''", quoted)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes text of several lines as a block."""

    def represent_scalar(self, tag: str, value: Any, style: str | None = None) -> yaml.ScalarNode:
        return super().represent_scalar(tag, value, "|" if "\n" in value else style)


# --- The files that a job uploads -----------------------------------------------------------------


def _is_shipped(config: Path) -> bool:
    return config.resolve().parent == shipped("").resolve()


def _config(job: Job) -> str:
    """Return the Accelerate YAML's path in the staged code."""
    config = Path(job.config)
    return f"accelerate_configs/{config.name}" if _is_shipped(config) else os.path.relpath(config.resolve())


def own_files(job: Job, found: Sequence[Problem] = ()) -> list[Path]:
    """Return the user's files that the job reads, relative to the current folder.

    Raises `UserError` with all problems: those in `found`, and each file that the nodes would lack.
    """
    run, files = job.run, []
    problems = [*found, *the_folder_holds_a_model(replace(run, place=replace(run.place, packages=None)))]
    named = [("recipe", run.recipe.file)] if run.recipe.file else []
    yamls = [Path(job.config), *([shipped(run.recipe.engine)] if run.recipe.file else [])]
    named += [("accelerate_config", os.path.relpath(file.resolve())) for file in yamls if not _is_shipped(file)]
    if "dataset_name" in run.given and run.given["dataset_name"].source != "--data":
        named += [("dataset_name", part.name) for part in parts_of(run["dataset_name"])]
    settings = "config deepspeed fsdp_config accelerator_config model_name_or_path resume_from_checkpoint"
    named += [(name, run[name]) for name in filter(run.explicit, settings.split()) if isinstance(run[name], str)]
    for name, text in named:
        path, is_data = Path(os.path.normpath(text)), name == "dataset_name"
        is_rows = is_data and (paths_of(text) or (file_kind(path) and ":" not in text))  # a uri has a colon
        if os.path.isfile(text) and not path.is_absolute() and path.parts[0] != "..":  # noqa: PTH113, of any text
            files.append(path)
        elif is_rows or text.startswith((".", "/", "~")) or existing_path(text):
            if name == "model_name_or_path" and model_folder(text):
                continue  # an input of the job
            fix = f"copy the file into the current folder, and give --{name} {path.name}"
            fix = f"use --data {text}, which uploads it" if is_data and existing_path(text) else fix
            what = f"{text} is not a file in the current folder: only such files are uploaded with the code"
            problems.append(Problem(name, what, fix))
    raise_errors(problems)
    return files


# --- Reading a job's YAML -------------------------------------------------------------------------


class Training(NamedTuple):
    """A job's training: train.py's flags, the Accelerate YAML if any, nodes and processes."""

    flags: list[str]
    config: str | None
    nodes: int
    processes_per_node: int


def read(file: Path, rest: Sequence[str]) -> tuple[RunSpec, list[Problem]]:
    """Return the run that a job's YAML starts, and the problems of that run.

    `rest` holds train.py's flags on the command line, and must be empty: such flags belong in
    the YAML. Raises `UserError` if the YAML itself is wrong.
    """
    if rest:
        raise mistake(rest[0], "belongs in the YAML's command", f"move the flag into the command of {file}")
    content, folder = read_yaml(file, "azureml"), file.resolve().parent
    text = without_secrets(file.read_text(encoding="utf-8"))
    if sdk_is_installed():
        load(text, folder)
    training = training_in(content)
    raise_errors(list(_missed_by_azure(content, training)))
    code = (folder / str(content.get("code", ""))).resolve()
    if not (code / "launch" / SCRIPT.name).is_file():
        fix = "use the folder that `recipes submit azureml --dry_run --output FILE` writes beside the YAML"
        raise mistake("code", f"there is no launch/train.py in {code}", fix)
    with contextlib.chdir(code):  # where the job's command runs
        run = resolve(training.flags, Azure().place(training.processes_per_node, training.nodes, training.config))
        return run, check(run)


def _missed_by_azure(content: Json, training: Training) -> Iterator[Problem]:
    """Yield problems that Azure's SDK misses, and that make a run hang or lose its output."""
    distribution = {"process_count_per_instance": 1, **(content.get("distribution") or {})}
    if training.config and distribution != {"type": "pytorch", "process_count_per_instance": 1}:
        what = "must be pytorch with one process per node, because accelerate launch starts the others"
        yield Problem("distribution", what, "type: pytorch, process_count_per_instance: 1")
    name = next((word.split("/")[3] for word in training.flags if word.startswith("/mnt/outputs/")), "")
    if not name or mapping(mapping(content.get("outputs")).get(name)).get("mode", "rw_mount") != "rw_mount":
        what = "loses everything if the job is preempted" if name else "writes to a folder that is deleted with the job"
        fix = "use --output_dir ${{outputs.run}}, and write mode: rw_mount below outputs.run"
        yield Problem(f"outputs.{name}.mode" if name else "command", what, fix)


def training_in(content: Json) -> Training:
    """Return a command's training, with its inputs' values. Raises `UserError` if there is none."""
    inputs, outputs = mapping(content.get("inputs")), mapping(content.get("outputs"))
    values = {f"outputs.{name}": f"/mnt/outputs/{name}" for name in outputs}
    for name, given in inputs.items():
        values[f"inputs.{name}"] = f"/mnt/inputs/{name}" if isinstance(given, dict) else str(given)
    command = str(content.get("command", "")).replace("\\\n", " ")
    line = next((line for line in command.split("\n") if "launch/train.py" in line), "")
    with contextlib.suppress(ValueError):  # a quotation mark is not closed, or no word is the script
        words = shlex.split(re.sub(r"\$\{\{\s*([\w.]+)\s*}}", lambda found: values.get(found[1], found[0]), line))
        script = [word.endswith("launch/train.py") for word in words].index(True)
        before = [part for word in words[:script] for part in (word.split("=", 1) if word[:2] == "--" else [word])]
        config = before[before.index("--config_file") + 1] if "--config_file" in before[:-1] else None
        elastic = not (config or "").endswith("single.yaml")  # `Job.command` doubles each $
        flags = [word.replace("$$", "$") if elastic else word for word in words[script + 1 :]]
        counts = mapping(content.get("resources")).get("instance_count"), inputs.get("processes_per_node")
        nodes, processes = (int(str(count)) if str(count).isdecimal() else 1 for count in counts)
        return Training(flags, config, nodes or 1, processes or 1)
    raise mistake("command", "does not start launch/train.py", "copy the command of azureml/fast.yaml")


# --- Azure's SDK ----------------------------------------------------------------------------------


def sdk_is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("azure", "azure.ai", "azure.ai.ml", "azure.identity"))


def load(text: str, folder: Path) -> SdkJob:
    """Return the job that Azure's SDK reads from a YAML, whose relative paths start in `folder`.

    Raises `UserError` with the message of Azure's parser, for whatever exception the parser raises.
    Only private methods of the SDK build the body of the request, so the SDK's version is pinned.
    """
    with silence():
        from azure.ai.ml import load_job

        try:
            job = load_job(io.StringIO(text), relative_origin=str(folder / "job.yaml"))
            job._to_job()._to_rest_object()  # type: ignore[attr-defined]
        except Exception as error:
            what = f"Azure's parser reports: {_sentence(str(error))}"
            raise mistake("azureml", what, "compare the YAML with azureml/fast.yaml") from None
    return job


def _sentence(text: str) -> str:
    """Return a message of Azure's parser or service on one line, without its JSON and advice."""
    found = re.search(r"JobSchema failed:(.+?)If you are|\(x\) ([^\n]+)", text, re.DOTALL)
    words = found[found.lastindex or 0] if found else text.strip().partition("\n")[0]
    return " ".join(re.sub(r'\\n|\x1b\[\d+m|[][{}"\\]', "", words).split()).rstrip(".:")


def connected(workspace: Mapping[str, str]) -> MLClient:
    """Return a client with the login of `az login`, of a managed identity, or of the environment.

    The client connects at the first request. Names that `workspace` lacks are read from config.json
    in this folder or above. Raises `UserError` without such a file, or if the SDK is missing.
    """
    if not sdk_is_installed():
        fix = f"{INSTALL}; or use --dry_run --output mine.yaml and `az ml job create -f mine.yaml`"
        raise mistake("azureml", "Azure's SDK, azure-ai-ml, is not installed", fix)
    with silence(), _asking():
        from azure.ai.ml import MLClient
        from azure.identity import DefaultAzureCredential

        login = DefaultAzureCredential()
        if not workspace.keys() >= {*_WORKSPACE}:
            found = MLClient.from_config(login)
            names = map(str, (found.subscription_id, found.resource_group_name, found.workspace_name))
            workspace = {**dict(zip(_WORKSPACE, names, strict=True)), **workspace}
        return MLClient(login, *map(workspace.get, _WORKSPACE))


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Turn an error of the login or of Azure ML into a `UserError`."""
    from azure.core.exceptions import AzureError, ClientAuthenticationError

    try:
        yield
    except ClientAuthenticationError:
        fix = "run az login, or set DefaultAzureCredential's variables (AZURE_CLIENT_ID and others)"
        raise mistake("azureml", "you are not logged in to Azure, or cannot access this workspace", fix) from None
    except (AzureError, ValueError) as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C while a log is streamed
            raise KeyboardInterrupt from None
        named = "config.json" in str(error)
        fix = "give --subscription_id, --resource_group and --workspace_name" if named else "correct what Azure reports"
        raise mistake("azureml", f"Azure reports: {_sentence(str(error))}", fix) from None
