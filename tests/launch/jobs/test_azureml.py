"""Jobs for Azure ML, through Azure's own parser to the body that would be sent.

Nothing here has run on Azure.
"""

import json
import re
import shutil
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launch.cli import main
from launch.jobs import azure as azure_job
from launch.jobs.azure import CODE, INSTALL, Azure, training_in
from recipes.catalog import RECIPES
from tests.support.azure import NAMES, loopback
from tests.support.azure_jobs import run_on_nodes, sent, written
from tests.support.hostile import HOSTILE
from tests.support.jobs import job
from tests.support.running import ROOT, read_record

FOLDER = ROOT / "azureml"
SHIPPED = ["standard", "fast", "memory"]


@pytest.fixture
def rendered(tmp_path):
    """Writes a job and the code that it uploads. Returns its file."""
    return lambda job, azure: written(job, azure, tmp_path)


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_shipped_job_is_what_the_renderer_writes_and_its_comments(recipe, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "YOU")
    shipped = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())
    written = yaml.safe_load(Azure(compute="gpu-cluster").render(job(recipe, processes=4)))
    written |= {"code": "..", "environment": {"build": {"path": "environment"}}}  # they stand in the checkout
    assert shipped == written


@pytest.mark.parametrize("recipe", SHIPPED)
def test_azures_own_parser_takes_a_shipped_job(recipe):
    body = sent(FOLDER / f"{recipe}.yaml")
    assert body["distribution"] == {"distributionType": "PyTorch", "processCountPerInstance": 1}
    assert body["resources"]["shmSize"] == "16g"
    assert body["outputs"]["run"]["mode"] == "ReadWriteMount"


def test_a_shipped_job_grows_with_the_set_option_that_its_comment_names():
    azure = pytest.importorskip("azure.ai.ml")
    comment = " ".join(line.lstrip("# ") for line in (FOLDER / "fast.yaml").read_text().splitlines()[:8])
    words = dict(re.findall(r"([\w.]+)=(\S+)", comment))
    assert set(words) == {"compute", "resources.instance_count", "inputs.processes_per_node"}
    job = azure.load_job(str(FOLDER / "fast.yaml"), params_override=[{name: words[name]} for name in words])
    body = job._to_job()._to_rest_object().as_dict()["properties"]
    assert (body["resources"]["instanceCount"], body["inputs"]["processes_per_node"]["value"]) == (2, "8")


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"baseline"}))
def test_azures_own_parser_takes_a_rendered_job(recipe, rendered):
    azure = Azure(instance_type="Standard_NC24ads_A100_v4", spot=True, data=("azureml:texts:1",))
    body = sent(rendered(job(recipe, nodes=2), azure))
    assert body["resources"]["instanceCount"] == 2
    assert body["queueSettings"]["jobTier"] == "Spot"
    assert body["inputs"]["data"]["uri"].endswith("texts:1")


@pytest.mark.slow
def test_arguments_arrive_as_they_were_typed(rendered, tmp_path):
    body = sent(rendered(job(argv=HOSTILE), Azure(compute="c")))
    (tmp_path / CODE / "launch" / "train.py").write_text(
        "import json, sys, pathlib; pathlib.Path('words.json').write_text(json.dumps(sys.argv[1:]))"
    )
    assert run_on_nodes(body, tmp_path / CODE, Path("out"), nodes=1, processes_per_node=1) == [0]
    words = json.loads((tmp_path / CODE / "words.json").read_text())
    assert words[2 : 2 + len(HOSTILE)] == HOSTILE


def test_the_check_reads_a_command_as_bash_does():
    content = yaml.safe_load(Azure(compute="c").render(job(argv=HOSTILE)))
    assert training_in(content).flags[2 : 2 + len(HOSTILE)] == HOSTILE


def test_another_command_line_has_another_place_for_its_checkpoints():
    def place(*argv, **named):
        return Azure(compute="c", **named).output_of(job(argv=argv))

    assert place("--seed", "1") == place("--seed", "1") != place("--seed", "2")
    assert place(data=("azureml:a:1",)) != place(data=("azureml:b:1",))
    assert place("--seed", "1", job_name="mine") == place("--seed", "2", job_name="mine")
    another_engine = replace(job(), config=str(ROOT / "accelerate_configs" / "sharded.yaml"))
    assert Azure(compute="c").output_of(another_engine) != place()


def test_two_people_have_two_places_for_their_checkpoints(monkeypatch):
    for login, path in (("ada", "/ada/standard-"), ("DOMAIN\\bob", "/DOMAIN-bob/standard-")):
        monkeypatch.setenv("LOGNAME", login)
        assert path in Azure(compute="c").output_of(job(argv=["--seed", "1"]))


@pytest.mark.slow
def test_a_job_of_two_nodes_with_two_processes_each_trains_as_one_world(rendered, tiny_model, texts, tmp_path):
    flags = ["--model_name_or_path", str(tiny_model), *"--max_length 64 --max_steps 2 --report_to none".split()]
    training = job(nodes=2, processes=2, argv=[*flags, "--dataset_name", str(texts)])
    body = sent(rendered(training, Azure(compute="c")))
    assert run_on_nodes(body, tmp_path / CODE, tmp_path / "out", processes_per_node=2) == [0, 0]
    assert (read_record(tmp_path / "out")["world_size"], read_record(tmp_path / "out")["status"]) == (4, "finished")


def test_the_upload_holds_the_code_and_nothing_else(tmp_path):
    assets = pytest.importorskip("azure.ai.ml._utils._asset_utils")
    ignore = assets.get_ignore_file(str(ROOT))
    for path in (
        ".git/HEAD",
        ".venv/bin/python",
        "outputs/fast/checkpoint-2/model.safetensors",
        "tests/support/running.py",
    ):
        assert ignore.is_file_excluded(str(ROOT / path)), path
    for path in ("launch/train.py", "recipes/catalog.py", "accelerate_configs/fast.yaml"):
        assert not ignore.is_file_excluded(str(ROOT / path)), path


def test_the_environment_pins_what_ci_tests():
    pins = {
        line.partition("==")[0].lower(): line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    for line in (FOLDER / "environment" / "requirements.txt").read_text().splitlines():
        name = line.partition("==")[0].lower()
        assert line.startswith("#") or line == pins[name]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("", "--compute NAME"),
        ("--compute c --spot", "neither --job_tier nor --spot"),
        ("--compute c -- --output_dir out", "--output_uri"),
        ("--compute c --environment two&words", "azureml:"),
        ("--compute c --workspace_name lab", "--subscription_id"),
        ("--compute c --tags team", "--tags team=VALUE"),
        ("--compute c --tags key=hf_a1B2c3D4a1B2c3D4a1B2c3D4", "looks like a secret"),
        ("--compute c --data azureml:texts", "azureml:NAME@latest"),
        ("--compute c --hf_token_secret just-a-name", "VAULT/SECRET"),
        ("--compute c --hf_token_secret vault/hf --identity user_identity", "--identity managed"),
        (f"--compute c --dry_run --output {FOLDER}/fast.yaml", "another name"),
        ("--compute c --output_uri ./here", "azureml://datastores"),
        ("--compute c -- --dataset_name ./here.jsonl", "--data with an asset or uri"),
        ("--compute c -- --model_name_or_path ~/model", "on this machine only"),
        ("--compute c -- --fresh", "--output_uri"),
    ],
)
def test_a_mistake_is_one_line(words, advice, capsys):
    assert main(["submit", "azureml", *words.split()]) == 2
    assert advice in capsys.readouterr().err


# --- What Azure accepts and should not, and what it reports ---------------------------------------


def changed(path: str, value: object) -> str:
    """azureml/fast.yaml with one value changed, or taken out where it is None."""
    content = yaml.safe_load((FOLDER / "fast.yaml").read_text())
    *folders, last = path.split(".")
    section = content
    for name in folders:
        section = section.setdefault(name, {})
    section[last] = value
    if value is None:
        del section[last]
    return yaml.safe_dump(content)


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        # Azure's SDK sends these.
        ("distribution.process_count_per_instance", 4, "distribution: accelerate launch starts the processes"),
        ("distribution", None, "type: pytorch"),
        ("outputs.run.mode", "upload", "keeps nothing if the job is preempted"),
        ("environment_variables.HF_TOKEN", "hf_" + "a1B2c3D4" * 4, "looks like a secret"),
        # Azure's SDK reports these, over many lines.
        ("resources.instance_cnt", 2, "resources: instance_cnt: Unknown field"),
        ("limits.timeout", "2h", "limits: timeout: Not a valid integer"),
        ("outputs.run", 7, "Azure's parser says"),
        ("queue_settings", {"job_tier": "cheap"}, "'cheap' passed is not in set 'spot', 'basic'"),
        ("code", "nowhere", "Can't find directory or file"),
        ("command", "cat ${{inputs.data}}", "does not contain 'data' referenced in command"),
        ("environment", {"image": "a", "build": {"path": "environment"}}, "should be provided not both"),
        ("code", "./environment", "there is no launch/train.py"),
    ],
)
def test_an_error_in_a_job_is_one_line(path, value, what, tmp_path, capsys):
    pytest.importorskip("azure.ai.ml")
    shutil.copytree(FOLDER / "environment", tmp_path / "environment")
    text = changed(path, value).replace("code: ..\n", f"code: {ROOT}\n")
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["check", "--azureml", str(tmp_path / "mine.yaml")]) == 2
    assert what in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_shipped_job_and_the_training_in_it_are_legal(recipe, capsys):
    assert main(["check", "--azureml", str(FOLDER / f"{recipe}.yaml")]) == 0
    assert f"legal: {recipe}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "advice"),
    [
        ("--recipe fast", "--recipe fast --lerning_rate 1", "--learning_rate"),
        ("instance_count: 1", "instance_count: 3", "global_batch_size"),
        ("launch/train.py", "my_own.py", "does not start launch/train.py"),
        ("type: command", "type: [", "not valid YAML"),
        (
            "--report_to mlflow \\",
            "--report_to mlflow",
            "--output_dir ${{outputs.run}}",
        ),  # a line's end ends the command
        ("processes_per_node: 4", "processes_per_node: '3'", "global_batch_size"),
    ],
)
def test_a_mistake_in_an_edited_job_is_found(old, new, advice, tmp_path, capsys):
    text = (
        (FOLDER / "fast.yaml").read_text().replace(old, new).replace("path: environment", f"path: {FOLDER}/environment")
    )
    text = text.replace("code: ..", f"code: {ROOT}")
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["check", "--azureml", str(tmp_path / "mine.yaml")]) == 2
    assert advice in capsys.readouterr().err


# --- Over the wire, to a workspace on this machine ------------------------------------------------


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    pytest.importorskip("azure.ai.ml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(NAMES))
    with loopback(tmp_path, monkeypatch) as workspace:
        yield workspace


SUBMIT = "submit azureml --recipe fast --nodes 2 --processes_per_node 8 --compute gpus -- --seed 1".split()


def submitted(workspace) -> str:
    """The name of the job that was submitted."""
    assert main(SUBMIT) == 0
    return next(iter(workspace.jobs))


def test_the_job_that_is_sent_is_the_one_that_a_dry_run_writes(workspace):
    body = workspace.jobs[submitted(workspace)]
    main([*SUBMIT[:-3], "--dry_run", "--output", "mine.yaml", *SUBMIT[-3:]])
    shown = sent(Path("mine.yaml"))
    for name in ("command", "distribution", "resources", "inputs", "outputs", "environmentVariables", "displayName"):
        assert body[name] == shown[name], name
    assert body["computeId"].endswith("/computes/gpus")
    assert "/environments/" in body["environmentId"] and "/codes/" in body["codeId"]


def test_the_code_is_uploaded_and_nothing_else(workspace):
    submitted(workspace)
    names = [name.removeprefix(f"{CODE}/") for name in workspace.blobs]
    assert {"launch/train.py", "recipes/catalog.py", "accelerate_configs/fast.yaml"} <= set(names)
    assert any(name.endswith("environment/Dockerfile") for name in names)
    unwanted = re.compile(r"(^|/)(\.git|\.venv|tests|outputs)/|checkpoint-|safetensors|__pycache__")
    assert [name for name in names if unwanted.search(name)] == []


def test_status_and_logs_find_the_job_again(workspace, capsys):
    name = submitted(workspace)
    folder = str(Path("outputs") / name)
    workspace.log = b"step 1/2 loss 3\n"
    assert main(["status"]) == 0 and "Running" in capsys.readouterr().out
    finish = lambda: workspace.log_was_read.wait() and setattr(workspace, "status", "Completed")  # noqa: E731
    ends = threading.Thread(target=finish, daemon=True)
    ends.start()
    assert main(["logs", "-f", folder]) == 0 and "step 1/2 loss 3" in capsys.readouterr().out
    workspace.blobs[f"ExperimentRun/dcid.{name}/user_logs/std_log.txt"] = b"step 2/2 loss 1\n"
    assert main(["logs", folder]) == 0 and "step 2/2 loss 1" in capsys.readouterr().out


def test_a_refusal_of_the_service_is_one_line(workspace, capsys):
    workspace.refuse = "Unknown compute target 'gpus'."
    assert main(SUBMIT) == 2
    assert "Azure says: (UserError) Unknown compute target 'gpus'" in capsys.readouterr().err.splitlines()[-1]


def test_without_a_login_the_message_says_how_to_log_in(workspace, monkeypatch, capsys):
    monkeypatch.delenv("IDENTITY_ENDPOINT")
    assert main(SUBMIT) == 2
    assert "az login" in capsys.readouterr().err.splitlines()[-1]


def test_without_a_workspace_the_message_says_how_to_name_one(workspace, capsys):
    Path("config.json").unlink()
    assert main(SUBMIT) == 2
    assert "--workspace_name" in capsys.readouterr().err.splitlines()[-1]


def test_without_the_sdk_the_message_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(azure_job, "sdk_is_installed", lambda: False)
    assert main(SUBMIT) == 2
    assert INSTALL in capsys.readouterr().err


def test_what_to_install_is_the_extra_of_this_package():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["azureml"]
    assert INSTALL.split()[2:] == [line.partition(">=")[0] for line in extra]
