"""Azure ML over the wire, to a workspace on this machine; and with one's own data."""

import json
import re
import shutil
import threading
from pathlib import Path

import pytest
import yaml
from transformers import BertConfig, BertForSequenceClassification

from launch.cli import main
from launch.jobs.azure import CODE
from launch.output import record
from recipes.run import resolve
from tests.support.azure import NAMES, loopback
from tests.support.azure_jobs import run_on_nodes, sent
from tests.support.models import SMALL, save
from tests.support.running import read_record

SUBMIT = "submit azureml --compute gpus".split()
MODEL = "--model_name_or_path somebody/model".split()
CLASSIFY = ["--task", "sequence_classification", *MODEL]
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
    pytest.importorskip("azure.ai.ml")
    Path("config.json").write_text(json.dumps(NAMES))
    with loopback(empty, monkeypatch) as workspace:
        workspace.assets = {"rows": "uri_file", "parts": "uri_folder", "table": "mltable"}
        yield workspace


# --- Over the wire --------------------------------------------------------------------------------


def test_the_job_that_is_sent_with_its_code_is_the_one_that_a_dry_run_writes(workspace):
    assert main(TWO_NODES) == 0
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


def test_status_and_logs_find_the_job_again(workspace, capsys):
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


def test_a_refusal_a_missing_login_and_a_missing_workspace_are_one_line(workspace, monkeypatch, capsys):
    def last_line() -> str:
        assert main(TWO_NODES) == 2
        return capsys.readouterr().err.splitlines()[-1]

    workspace.refuse = "Unknown compute target 'gpus'."
    assert "Azure says: (UserError) Unknown compute target 'gpus'" in last_line()
    monkeypatch.delenv("IDENTITY_ENDPOINT")
    assert "az login" in last_line()
    Path("config.json").unlink()
    assert "--workspace_name" in last_line()


# --- Every form of --data -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        (f"{STORE}/a/file.jsonl", "uri_file"),
        (f"{STORE}/a/FILE.PARQUET", "uri_file"),
        (f"{STORE}/a/v1.2", "uri_folder"),
        ("azureml://subscriptions/s/resourcegroups/g/workspaces/w/datastores/d/paths/x.csv", "uri_file"),
        ("wasbs://box@lab.blob.core.windows.net/parts", "uri_folder"),
    ],
)
def test_a_uris_own_form_says_whether_it_is_a_file(uri, kind, empty):
    data = sent(dry_run("--data", uri, training=MODEL))["inputs"]["data"]
    assert (data["jobInputType"], data["uri"]) == (kind, uri)


def test_a_recorded_run_can_be_sent(empty):
    record.write("out", record.started(resolve(["--output_dir", "out", "--dataset_name", "t.jsonl", *MODEL]), 1))
    data = sent(dry_run("--data", f"{STORE}/t.jsonl", training=["--config", "out/run.json"]))["inputs"]["data"]
    assert data["uri"] == f"{STORE}/t.jsonl"


def test_a_dry_run_says_what_it_assumes_of_an_asset(empty):
    text = dry_run("--data", "azureml:texts:1", training=CLASSIFY).read_text()
    assert text.startswith("# azureml:texts:1 is taken for a folder") and "--data_type" in text.splitlines()[0]
    assert yaml.safe_load(text)["inputs"]["data"] == {"type": "uri_folder", "path": "azureml:texts:1"}
    text = dry_run("--data", "azureml:texts:1", "--data_type", "uri_file", training=MODEL).read_text()
    assert not text.startswith("#") and yaml.safe_load(text)["inputs"]["data"]["type"] == "uri_file"


@pytest.mark.parametrize("words", ["azureml:", "azureml:texts:x:y", "azureml:texts@", "azureml::1", "hf://x"])
def test_what_azure_cannot_mount_is_refused(words, capsys):
    assert main([*SUBMIT, "--data", words, "--dry_run", "--", *MODEL]) == 2
    assert "is not a place in the cloud" in capsys.readouterr().err


def test_a_mixture_has_an_input_for_each_part_whose_type_the_workspace_knows(workspace):
    assert main([*SUBMIT, "--data", "azureml:rows@latest", "azureml:parts:1", f"{STORE}/a.csv", "--", *MODEL]) == 0
    (body,) = workspace.jobs.values()
    kinds = {name: entry["jobInputType"] for name, entry in body["inputs"].items() if name.startswith("data")}
    assert kinds == {"data": "uri_file", "data_2": "uri_folder", "data_3": "uri_file"}
    assert body["inputs"]["data"]["uri"].endswith("/data/rows/versions/1")
    assert "--dataset_name ${{inputs.data}} ${{inputs.data_2}} ${{inputs.data_3}}" in body["command"]


def test_an_asset_that_cannot_be_trained_on_is_refused_in_one_line(workspace, capsys):
    refused = {
        "table:1": "is of type mltable",
        "nothing:1": "Azure says",
        "//registries/l/data/r/versions/1": "--data_",
    }
    for asset, advice in refused.items():
        assert main([*SUBMIT, "--data", f"azureml:{asset}", "--", *MODEL]) == 2
        assert advice in capsys.readouterr().err.splitlines()[-1]
    assert not workspace.jobs


# --- The job's command, on two simulated nodes ----------------------------------------------------


def mounted(folder: Path, kind: str) -> Path:
    """64 rows where Azure ML mounts them: a file keeps its name in a folder INPUT_data."""
    inside = folder / "wd" / "INPUT_data"
    inside.mkdir(parents=True)
    lines = [f'{{"text": "Example {number} is {number % 2}.", "label": {number % 2}}}\n' for number in range(64)]
    if kind == "uri_file":
        (inside / "rows.jsonl").write_text("".join(lines))
        return inside / "rows.jsonl"
    (inside / "part-0.jsonl").write_text("".join(lines[::2]))
    (inside / "part-1.jsonl").write_text("".join(lines[1::2]))
    return inside


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sequence_classification", "causal_lm"])
def test_two_nodes_train_on_mounted_data_and_resume_where_they_are_mounted_elsewhere(task, empty, tiny_model):
    """A classifier on a file, a language model on a folder."""
    data, model = (f"{STORE}/parts",), Path(tiny_model)
    if task == "sequence_classification":
        config = BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=128, num_labels=2)
        data, model = (
            ("azureml:rows:1", "--data_type", "uri_file"),
            save(BertForSequenceClassification(config), empty / "bert"),
        )
    flags = ["--task", task, "--model_name_or_path", "somebody/model", *"--max_length 64 --report_to none".split()]
    words = ["--nodes", "2", "--processes_per_node", "2", "--data", *data]
    body = sent(dry_run(*words, training=[*flags, "--max_steps", "2"]))
    shutil.copytree(model, Path(CODE) / "somebody" / "model")  # a local folder of that name stands for the Hub
    for start, steps in (("first", 2), ("second", 3)):
        body["command"] = body["command"].replace("--max_steps 2", f"--max_steps {steps}")
        there = mounted(empty / start, body["inputs"]["data"]["jobInputType"])
        assert run_on_nodes(body, Path(CODE), empty / "out", processes_per_node=2, data=there) == [0, 0]
        record = read_record(empty / "out")
        assert (record["world_size"], record["status"], record["global_step"]) == (4, "finished", steps)
        assert record["settings"]["dataset_name"]["value"] == str(there)
    assert [entry["step"] for entry in record["log_history"] if "loss" in entry][-1] == 3


# --- A secret of a key vault ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stored", [True, False], ids=["a secret", "no such secret"])
def test_a_secret_reaches_the_environment_of_the_training_and_nothing_else(stored, workspace, monkeypatch, capfd):
    value = "hf_" + "a1B2c3D4" * 4
    workspace.secrets = {"hf-token": value} if stored else {}
    monkeypatch.setenv("SSL_CERT_FILE", str(Path("certificate.pem").resolve()))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    address = f"https://localhost:{workspace.port}/secrets/hf-token"
    file = dry_run("--hf_token_secret", address)
    body = sent(file)
    assert body["identity"] == {"identityType": "Managed"} and value not in file.read_text()
    (Path(CODE) / "launch" / "train.py").write_text(
        "import json, os, sys; json.dump([os.environ.get('HF_TOKEN'), sys.argv], open('seen.json', 'w'))"
    )
    codes = run_on_nodes(body, Path(CODE), Path("out"), nodes=1, processes_per_node=1)
    printed = "".join(capfd.readouterr())
    assert value not in printed
    if stored:
        seen, argv = json.loads((Path(CODE) / "seen.json").read_text())
        assert (codes, seen) == ([0], value) and value not in str(argv)
    else:
        assert codes == [1] and f"{address} cannot be read: HTTP Error 404" in printed
        assert not (Path(CODE) / "seen.json").exists()
