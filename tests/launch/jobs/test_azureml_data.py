"""Azure ML with one's own data: every form of `--data`, and what a node trains on it."""

import json
import shutil
from dataclasses import dataclass
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
CLASSIFY = "--task sequence_classification --model_name_or_path somebody/model".split()
STORE = "azureml://datastores/lab/paths"


def dry_run(*words: str, training: tuple[str, ...] | list[str] = ()) -> Path:
    """The YAML of a dry run, in the current folder, beside its code."""
    assert main([*SUBMIT, *words, "--dry_run", "--output", "mine.yaml", "--", *training]) == 0
    return Path("mine.yaml")


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("uri", "kind"),
    [
        (f"{STORE}/a/file.jsonl", "uri_file"),
        (f"{STORE}/a/FILE.PARQUET", "uri_file"),
        (f"{STORE}/a/v1.2", "uri_folder"),
        ("azureml://subscriptions/s/resourcegroups/g/workspaces/w/datastores/d/paths/x.csv", "uri_file"),
        ("https://lab.blob.core.windows.net/box/rows.json", "uri_file"),
        ("wasbs://box@lab.blob.core.windows.net/parts", "uri_folder"),
    ],
)
def test_a_uris_own_form_says_whether_it_is_a_file(uri, kind, empty):
    data = sent(dry_run("--data", uri))["inputs"]["data"]
    assert (data["jobInputType"], data["uri"]) == (kind, uri)


def test_a_mixture_has_an_input_for_each_part(empty):
    job = yaml.safe_load(dry_run("--data", f"{STORE}/a.jsonl", f"{STORE}/b/", f"{STORE}/c.jsonl.gz").read_text())
    inputs = {name: (entry["type"], entry["path"]) for name, entry in job["inputs"].items() if name.startswith("data")}
    assert inputs == {
        "data": ("uri_file", f"{STORE}/a.jsonl"),
        "data_2": ("uri_folder", f"{STORE}/b/"),
        "data_3": ("uri_file", f"{STORE}/c.jsonl.gz"),
    }
    assert "--dataset_name ${{inputs.data}} ${{inputs.data_2}} ${{inputs.data_3}}" in job["command"]


def test_a_recorded_run_can_be_sent(empty):
    record.write("out", record.started(resolve(["--output_dir", "out", "--dataset_name", "t.jsonl"]), 1))
    data = sent(dry_run("--data", f"{STORE}/t.jsonl", training=["--config", "out/run.json"]))["inputs"]["data"]
    assert data["uri"] == f"{STORE}/t.jsonl"


def test_a_dry_run_says_what_it_assumes_of_an_asset(empty):
    text = dry_run("--data", "azureml:texts:1").read_text()
    assert text.startswith("# azureml:texts:1 is taken for a folder") and "--data_type" in text.splitlines()[0]
    assert yaml.safe_load(text)["inputs"]["data"] == {"type": "uri_folder", "path": "azureml:texts:1"}
    Path("mine.yaml").unlink()
    text = dry_run("--data", "azureml:texts:1", "--data_type", "uri_file").read_text()
    assert not text.startswith("#") and yaml.safe_load(text)["inputs"]["data"]["type"] == "uri_file"


def test_data_counts_as_the_data_set_and_is_named_as_its_source(empty, capsys):
    dry_run("--data", "azureml:texts:1", training=CLASSIFY)
    assert main([*SUBMIT, "--dry_run", "--", *CLASSIFY]) == 2
    assert "needs labelled data" in capsys.readouterr().err
    words = ["--data", "azureml:texts:1", "--dry_run", "--", "--dataset-name=other/data"]
    assert main([*SUBMIT, *words]) == 2
    assert "data: is the job's data set, and so is --dataset_name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["azureml:", "azureml:texts:x:y", "azureml:texts@", "azureml::1", "hf://x", "s3://x/y"]
)
def test_what_azure_cannot_mount_is_refused(words, capsys):
    assert main([*SUBMIT, "--data", words, "--dry_run"]) == 2
    assert "is not a place in the cloud" in capsys.readouterr().err


# --- Assets of a workspace ------------------------------------------------------------------------


@pytest.fixture
def workspace(empty, monkeypatch):
    pytest.importorskip("azure.ai.ml")
    Path("config.json").write_text(json.dumps(NAMES))
    with loopback(empty, monkeypatch) as workspace:
        workspace.assets = {"rows": "uri_file", "parts": "uri_folder", "table": "mltable"}
        yield workspace


def test_the_workspace_is_asked_for_the_type_of_each_part(workspace):
    assert main([*SUBMIT, "--data", "azureml:rows@latest", "azureml:parts:1", f"{STORE}/a.csv"]) == 0
    (body,) = workspace.jobs.values()
    kinds = {name: entry["jobInputType"] for name, entry in body["inputs"].items() if name.startswith("data")}
    assert kinds == {"data": "uri_file", "data_2": "uri_folder", "data_3": "uri_file"}
    assert body["inputs"]["data"]["uri"].endswith("/data/rows/versions/1")


@pytest.mark.parametrize(
    ("asset", "advice"),
    [
        ("azureml:table:1", "is of type mltable"),
        ("azureml:nothing:1", "Azure says"),
        ("azureml://registries/lab/data/rows/versions/1", "--data_type"),
    ],
)
def test_an_asset_that_cannot_be_trained_on_is_refused_in_one_line(asset, advice, workspace, capsys):
    assert main([*SUBMIT, "--data", asset]) == 2
    assert advice in capsys.readouterr().err.splitlines()[-1]
    assert not workspace.jobs


# --- The job's command, on two simulated nodes ----------------------------------------------------


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    config = BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=128, num_labels=2)
    return save(BertForSequenceClassification(config), tmp_path_factory.mktemp("classifier"))


def mounted(folder: Path, kind: str, rows: list[dict]) -> Path:
    """Data where Azure ML mounts them: a file keeps its name in a folder INPUT_data."""
    inside = folder / "wd" / "INPUT_data"
    inside.mkdir(parents=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    if kind == "uri_file":
        (inside / "rows.jsonl").write_text("".join(lines))
        return inside / "rows.jsonl"
    (inside / "part-0.jsonl").write_text("".join(lines[::2]))
    (inside / "part-1.jsonl").write_text("".join(lines[1::2]))
    return inside


ROWS = [
    {"text": f"Example {number} is {'good' if number % 2 else 'bad'}.", "label": number % 2} for number in range(64)
]


@dataclass
class Training:
    """A job of two nodes on data of its own, as Azure ML runs it."""

    body: dict
    folder: Path

    def run(self, start: str) -> dict:
        """Runs it on data that are mounted in the folder `start`. Returns run.json."""
        there = mounted(self.folder / start, self.body["inputs"]["data"]["jobInputType"], ROWS)
        output = self.folder / "out"
        assert run_on_nodes(self.body, Path(CODE), output, processes_per_node=1, data=there) == [0, 0]
        record = read_record(output)
        assert (record["world_size"], record["status"]) == (2, "finished")
        assert record["settings"]["dataset_name"]["value"] == str(there)
        return record


def two_nodes(folder: Path, data: tuple[str, ...], task: str, model: Path) -> Training:
    flags = ["--task", task, "--model_name_or_path", "somebody/model", *"--max_length 64 --report_to none".split()]
    words = ["--nodes", "2", "--processes_per_node", "1", "--data", *data]
    body = sent(dry_run(*words, training=[*flags, "--max_steps", "2"]))
    shutil.copytree(model, Path(CODE) / "somebody" / "model")  # a local folder of that name stands for the Hub
    return Training(body, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "task"),
    [
        ((f"{STORE}/rows.jsonl",), "sequence_classification"),
        (("azureml:rows:1", "--data_type", "uri_file"), "causal_lm"),
        (("azureml:parts@latest",), "sequence_classification"),
    ],
    ids=["file", "asset that is a file", "asset that is a folder"],
)
def test_two_nodes_train_on_mounted_data(data, task, empty, classifier, tiny_model):
    model = Path(classifier if task == "sequence_classification" else tiny_model)
    assert two_nodes(empty, data, task, model).run("wd")["global_step"] == 2


@pytest.mark.slow
def test_a_job_resumes_where_its_data_are_mounted_elsewhere(empty, tiny_model):
    training = two_nodes(empty, (f"{STORE}/parts",), "causal_lm", tiny_model)
    training.run("first")
    training.body["command"] = training.body["command"].replace("--max_steps 2", "--max_steps 3")
    record = training.run("second")
    assert [entry["step"] for entry in record["log_history"] if "loss" in entry][-1] == record["global_step"] == 3


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


# --- More of a job's fields -----------------------------------------------------------------------


def test_fields_of_a_job_reach_the_body_of_the_request(empty):
    words = "--timeout 129600 --tags team=nlp run=7 --identity user_identity --priority high".split()
    body = sent(dry_run(*words, "--docker_args=--ipc=host --cap-add SYS_PTRACE"))
    assert body["limits"]["timeout"] == "P1DT12H"
    assert body["tags"] == {"team": "nlp", "run": "7"}
    assert body["identity"] == {"identityType": "UserIdentity"}
    assert body["queueSettings"] == {"priority": 3}
    assert body["resources"]["dockerArgs"] == "--ipc=host --cap-add SYS_PTRACE"


def test_serverless_compute_takes_a_tier(empty):
    words = "submit azureml --instance_type Standard_NC24ads_A100_v4 --spot --dry_run --output mine.yaml"
    assert main(words.split()) == 0
    assert sent(Path("mine.yaml"))["queueSettings"] == {"jobTier": "Spot"}
