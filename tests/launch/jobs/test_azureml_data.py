"""Azure ML over the wire, to a workspace on this machine; and with one's own data."""

import json
import re
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForSequenceClassification

from launch.cli import main
from launch.jobs.azure import CODE
from tests.support.azure import NAMES, Workspace, serving
from tests.support.azure_jobs import run_on_nodes, sent
from tests.support.models import SMALL, save, write_llama
from tests.support.running import read_record

SUBMIT = "submit azureml --compute gpus".split()
MODEL = "--model_name_or_path somebody/model".split()
STORE = "azureml://datastores/lab/paths"
TWO_NODES = [*SUBMIT, *"--recipe fast --nodes 2 --processes_per_node 8 -- --seed 1".split()]


def dry_run(*words: str, training: tuple[str, ...] | list[str] = ()) -> Path:
    """The YAML of a dry run, in the current folder, beside its code."""
    Path("mine.yaml").unlink(missing_ok=True)
    assert main([*SUBMIT, *words, "--dry_run", "--output", "mine.yaml", "--", *training]) == 0
    return Path("mine.yaml")


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def workspace(empty, monkeypatch):
    """The workspace. The environment points to it: a real client with a real login finds it."""
    Path("config.json").write_text(json.dumps(NAMES))
    workspace = Workspace()
    certificate = empty / "certificate.pem"
    openssl = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost"
    names = "subjectAltName=DNS:localhost,DNS:acct.blob.localhost,IP:127.0.0.1"
    words = [*openssl.split(), "-addext", names, "-keyout", empty / "key.pem", "-out", certificate]
    subprocess.run(words, check=True, capture_output=True)
    with serving(workspace, certificate, empty / "key.pem") as workspace.port:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        monkeypatch.setenv("ARM_CLOUD_METADATA_URL", f"{workspace.address}/metadata")
        monkeypatch.delenv("AZUREML_CURRENT_CLOUD", raising=False)  # the SDK sets it
        monkeypatch.setenv("IDENTITY_ENDPOINT", f"{workspace.address}/token")  # a managed identity's
        monkeypatch.setenv("IDENTITY_HEADER", "any")
        monkeypatch.setattr(socket, "getaddrinfo", _only_here)
        yield workspace


_real_getaddrinfo = socket.getaddrinfo


def _only_here(host: Any, *others: Any, **named: Any) -> Any:
    name = host.decode() if isinstance(host, bytes) else host
    if name == "127.0.0.1" or str(name).endswith("localhost"):
        return _real_getaddrinfo("127.0.0.1", *others, **named)
    raise socket.gaierror(f"{name} is not on this machine")


# --- Over the wire --------------------------------------------------------------------------------


def test_submit_azureml_sends_the_job_that_a_dry_run_shows_and_no_outputs_folder(workspace):
    Path("config.json").write_text(json.dumps({**NAMES, "workspace_name": "another"}))
    assert main([*TWO_NODES[:2], "--workspace_name", "lab", *TWO_NODES[2:]]) == 0
    (body,) = workspace.jobs.values()
    assert main([*TWO_NODES[:-3], "--dry_run", "--output", "mine.yaml", *TWO_NODES[-3:]]) == 0
    shown = sent(Path("mine.yaml"))
    for name in ("command", "distribution", "resources", "inputs", "outputs", "environmentVariables", "displayName"):
        assert body[name] == shown[name], name
    assert body["computeId"].endswith("/computes/gpus")
    assert "/environments/" in body["environmentId"] and "/codes/" in body["codeId"]
    names = [name.removeprefix(f"{CODE}/") for name in workspace.blobs]
    assert {"launch/train.py", "recipes/catalog.py", "accelerate_configs/fast.yaml"} <= set(names)
    assert any(name.endswith("environment/Dockerfile") for name in names)
    unwanted = re.compile(r"(^|/)(\.git|\.venv|tests|outputs)/|checkpoint-|safetensors|__pycache__")
    assert [name for name in names if unwanted.search(name)] == []


def test_status_and_logs_find_a_submitted_azureml_job(workspace, capsys):
    assert main(TWO_NODES) == 0
    (name,) = workspace.jobs
    folder = str(Path("outputs") / name)
    workspace.log = b"step 1/2 loss 3\n"
    assert main(["status"]) == 0 and "Running" in capsys.readouterr().out
    finish = lambda: workspace.log_was_read.wait() and setattr(workspace, "status", "Completed")  # noqa: E731
    threading.Thread(target=finish, daemon=True).start()
    assert main(["logs", "-f", folder]) == 0 and "step 1/2 loss 3" in capsys.readouterr().out
    workspace.blobs[f"ExperimentRun/dcid.{name}/user_logs/std_log.txt"] = b"step 2/2 loss 1\n"
    assert main(["logs", folder]) == 0 and "step 2/2 loss 1" in capsys.readouterr().out


def test_submit_azureml_exits_with_2_if_azure_refuses_or_login_or_workspace_is_missing(workspace, monkeypatch, capsys):
    def last_line() -> str:
        assert main(TWO_NODES) == 2
        return capsys.readouterr().err.splitlines()[-1]

    workspace.refuse = "Unknown compute target 'gpus'."
    assert "Azure reports: (UserError) Unknown compute target 'gpus'" in last_line()
    monkeypatch.delenv("IDENTITY_ENDPOINT")
    assert "az login" in last_line()
    Path("config.json").unlink()
    assert "--workspace_name" in last_line()


# --- Every form of --data -------------------------------------------------------------------------


def test_a_data_argument_becomes_a_uri_file_or_uri_folder_depending_on_its_path_or_on_data_type(workspace):
    parts = ["azureml:rows:1", f"{STORE}/a.csv", f"{STORE}/v1.2", "wasbs://box@lab.blob.core.windows.net/parts"]
    assert main([*SUBMIT, "--data", *parts, "--", *MODEL]) == 0
    (body,) = workspace.jobs.values()
    kinds = {name: entry["jobInputType"] for name, entry in body["inputs"].items() if name.startswith("data")}
    assert kinds == {"data": "uri_folder", "data_2": "uri_file", "data_3": "uri_folder", "data_4": "uri_folder"}
    assert body["inputs"]["data"]["uri"].endswith("/data/rows/versions/1")
    assert body["inputs"]["data_4"]["uri"] == parts[3]
    assert "--dataset_name ${{inputs.data}} ${{inputs.data_2}} ${{inputs.data_3}}" in body["command"]
    file = sent(dry_run("--data", "azureml:rows:1", "--data_type", "uri_file", training=MODEL))["inputs"]["data"]
    assert file["jobInputType"] == "uri_file"


def test_azureml_uploads_a_local_model_folder_and_local_data_and_output_dir_ends_the_outputs_path(workspace):
    write_llama(Path("own"), **SMALL)
    Path("rows").mkdir()
    Path("rows/a.jsonl").write_text('{"text": "Example"}\n')
    flags = "--model_name_or_path own --output_dir outputs/mine".split()
    assert main([*SUBMIT, "--data", "rows", "rows/a.jsonl", "--", *flags]) == 0
    (body,) = workspace.jobs.values()
    kinds = [body["inputs"][name]["jobInputType"] for name in ("model", "data", "data_2")]
    assert kinds == ["uri_folder", "uri_folder", "uri_file"]
    assert {"model.safetensors", "a.jsonl"} <= {name.rpartition("/")[2] for name in workspace.blobs}
    assert "--model_name_or_path ${{inputs.model}} " in body["command"] and "own" not in body["command"]
    assert body["outputs"]["run"]["uri"].endswith("/outputs/mine") and "mine" not in body["command"]


# --- The job's command, on two simulated nodes ----------------------------------------------------


@pytest.mark.slow
def test_two_nodes_train_a_classifier_on_a_mounted_model_and_data_and_resume_at_another_mount_path(empty):
    config = BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=128, num_labels=2)
    save(BertForSequenceClassification(config), empty / "bert")
    flags = "--task sequence_classification --model_name_or_path bert --max_length 64 --report_to none"
    words = "--nodes 2 --processes_per_node 2 --data azureml:rows:1 --data_type uri_file".split()
    body = sent(dry_run(*words, training=[*flags.split(), "--max_steps", "2"]))
    for start, steps in (("first", 2), ("second", 3)):
        body["command"] = body["command"].replace("--max_steps 2", f"--max_steps {steps}")
        there = empty / start / "wd" / "INPUT_data" / "rows.jsonl"  # a file keeps its name
        there.parent.mkdir(parents=True)
        rows = (f'{{"text": "Example {number} is {number % 2}.", "label": {number % 2}}}\n' for number in range(64))
        there.write_text("".join(rows))
        model = shutil.copytree("bert", there.parents[1] / "INPUT_model")
        assert run_on_nodes(body, Path(CODE), empty / "out", processes_per_node=2, data=there, model=model) == [0, 0]
        record = read_record(empty / "out")
        assert (record["world_size"], record["status"], record["global_step"]) == (4, "finished", steps)
        assert record["settings"]["dataset_name"]["value"] == str(there)
    assert [entry["step"] for entry in record["log_history"] if "loss" in entry][-1] == 3
