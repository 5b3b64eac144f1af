"""Jobs for Azure ML, through Azure's own parser to the body that would be sent.

Nothing here has run on Azure.
"""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from launch.cli import main
from launch.jobs import azure as azure_job
from launch.jobs.azure import CODE, INSTALL, Azure
from launch.jobs.job import Job
from recipes.catalog import RECIPES
from tests.support.azure_jobs import run_on_nodes, sent
from tests.support.hostile import HOSTILE
from tests.support.jobs import job
from tests.support.running import ROOT

FOLDER = ROOT / "azureml"
SHIPPED = ["standard", "fast", "memory"]
SUBMIT = "submit azureml --compute c --processes_per_node 2 --dry_run".split()


@pytest.mark.parametrize("recipe", SHIPPED)
def test_a_shipped_azureml_yaml_equals_the_rendered_job_and_passes_azures_parser_and_check(recipe, monkeypatch, capsys):
    monkeypatch.setenv("LOGNAME", "YOU")
    shipped = yaml.safe_load((FOLDER / f"{recipe}.yaml").read_text())
    rendered = yaml.safe_load(Azure(compute="gpu-cluster").render(job(recipe, processes=4)))
    rendered |= {"code": "..", "environment": {"build": {"path": "environment"}}}  # they stand in the checkout
    assert shipped == rendered
    body = sent(FOLDER / f"{recipe}.yaml")
    assert body["distribution"] == {"distributionType": "PyTorch", "processCountPerInstance": 1}
    assert (body["resources"]["shmSize"], body["outputs"]["run"]["mode"]) == ("16g", "ReadWriteMount")
    assert main(["check", "--azureml", str(FOLDER / f"{recipe}.yaml")]) == 0
    assert f"legal: {recipe}" in capsys.readouterr().out


def written(training: Job, flags: Azure, folder: Path) -> Path:
    """The job's YAML in a folder, beside the code that it uploads; without files of its own, since
    a test's model may be anywhere.
    """
    file = folder / "job.yaml"
    file.write_text(flags.render(training), encoding="utf-8")
    flags.stage(job(), folder)
    return file


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"baseline"}))
def test_the_azureml_sdk_reads_nodes_data_spot_tier_timeout_and_identity_of_a_rendered_job(recipe, tmp_path):
    azure = Azure(instance_type="Standard_NC24ads_A100_v4", spot=True, data=("azureml:texts:1",), timeout=129600)
    body = sent(written(job(recipe, nodes=2), replace(azure, identity="user_identity"), tmp_path))
    assert body["resources"]["instanceCount"] == 2 and body["inputs"]["data"]["uri"].endswith("texts:1")
    assert (body["queueSettings"], body["limits"]["timeout"]) == ({"jobTier": "Spot"}, "P1DT12H")
    assert body["identity"] == {"identityType": "UserIdentity"}


@pytest.mark.slow
def test_train_py_gets_special_characters_unchanged_in_an_azureml_job(tmp_path):
    body = sent(written(job(argv=HOSTILE), Azure(compute="c"), tmp_path))
    (tmp_path / CODE / "launch" / "train.py").write_text(
        "import json, sys, pathlib; pathlib.Path('words.json').write_text(json.dumps(sys.argv[1:]))"
    )
    assert run_on_nodes(body, tmp_path / CODE, Path("out"), nodes=1, processes_per_node=1) == [0]
    words = json.loads((tmp_path / CODE / "words.json").read_text())
    assert words[2 : 2 + len(HOSTILE)] == HOSTILE


def test_an_azureml_output_path_has_the_user_and_the_job_name_or_else_a_hash_of_flags_and_data(monkeypatch):
    def place(*argv, **named):
        return Azure(compute="c", **named).output_of(job(argv=argv))

    assert place("--seed", "1") == place("--seed", "1") != place("--seed", "2")
    assert place(data=("azureml:a:1",)) != place(data=("azureml:b:1",))
    assert place("--seed", "1", job_name="mine") == place("--seed", "2", job_name="mine")
    another_engine = replace(job(), config=str(ROOT / "accelerate_configs" / "sharded.yaml"))
    assert Azure(compute="c").output_of(another_engine) != place()
    monkeypatch.setenv("LOGNAME", "DOMAIN\\bob")
    assert "/DOMAIN-bob/standard-" in place("--seed", "1")


def test_the_azureml_upload_holds_the_code_without_git_venv_outputs_and_tests():
    assets = pytest.importorskip("azure.ai.ml._utils._asset_utils")
    ignore = assets.get_ignore_file(str(ROOT))
    left_out = (".git/HEAD", ".venv/bin/python", "outputs/a/checkpoint-2/model.safetensors", "tests/support/running.py")
    sent_along = ("launch/train.py", "recipes/catalog.py", "accelerate_configs/fast.yaml")
    assert all(ignore.is_file_excluded(str(ROOT / path)) == (path in left_out) for path in (*left_out, *sent_along))


def test_azureml_requirements_match_constraints_txt_and_install_advice_matches_pyproject():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.partition("==")[0].lower(): line.strip() for line in lines}
    for line in (FOLDER / "environment" / "requirements.txt").read_text().splitlines():
        assert line.startswith("#") or line == pins[line.partition("==")[0].lower()]
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["azureml"]
    assert INSTALL.split()[2:] == [line.partition(">=")[0] for line in extra]


def test_submit_azureml_without_the_azure_sdk_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(azure_job, "sdk_is_installed", lambda: False)
    assert main([*SUBMIT[:-1], "--", "--seed", "1"]) == 2
    assert INSTALL in capsys.readouterr().err


# --- Files of the user's --------------------------------------------------------------------------

RECIPE = (
    'base: fast\npurpose: Ours.\nengine: our YAMLs/ours.yaml\nchanges: {learning_rate: [2.0e-5, "the best of three"]}\n'
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A user's folder, far from any checkout: a recipe, an engine and settings of their own."""
    monkeypatch.chdir(tmp_path)
    Path("our YAMLs").mkdir()
    shutil.copy(ROOT / "accelerate_configs" / "fast.yaml", "our YAMLs/ours.yaml")
    Path("ours.yaml").write_text(RECIPE)
    Path("settings.yaml").write_text("weight_decay: 0.1\n")
    return tmp_path


def test_an_azureml_job_includes_the_users_recipe_config_and_accelerate_yaml(project, capsys):
    words = ["--recipe", "ours.yaml", "--accelerate_config", "our YAMLs/ours.yaml", "--output", "mine.yaml"]
    assert main([*SUBMIT, *words, "--", "--config", "settings.yaml"]) == 0
    for name in ("ours.yaml", "our YAMLs/ours.yaml", "settings.yaml"):
        assert (project / CODE / name).read_text() == (project / name).read_text()
    text = Path("mine.yaml").read_text()
    assert "--config_file 'our YAMLs/ours.yaml' " in text and "--recipe ours.yaml" in text
    assert main(["check", "--azureml", "mine.yaml"]) == 0
    assert "legal: ours" in capsys.readouterr().out


def test_submit_azureml_refuses_a_recipe_data_file_or_output_dir_outside_the_job(project, monkeypatch, capsys):
    monkeypatch.chdir(project / "our YAMLs")
    assert main([*SUBMIT, "--recipe", "../ours.yaml"]) == 2
    assert "copy the file into the current folder, and give --recipe ours.yaml" in capsys.readouterr().err
    flags = "-- --model_name_or_path . --dataset_name absent.jsonl --output_dir /outputs".split()
    assert main([*SUBMIT, *flags]) == 2
    said = capsys.readouterr().err
    assert "copy the file into the current folder, and give --dataset_name absent" in said
    assert "use a path such as outputs/mine" in said and "has no config.json" in said


# --- A YAML that was edited: what Azure accepts and should not, and what it reports ---------------


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        # Azure's SDK sends all but the last, which it reports over many lines.
        ("per_instance: 1", "per_instance: 4", "distribution: must be pytorch with one process per"),
        ("mode: rw_mount", "mode: upload", "loses everything if the job is preempted"),
        ("variables:\n", f"variables:\n  HF_TOKEN: hf_{'a1B2c3D4' * 4}\n", "looks like a secret"),
        ("--recipe fast", "--recipe fast --lerning_rate 1", "--learning_rate"),
        ("processes_per_node: 4", "processes_per_node: '3'", "global_batch_size"),
        ("launch/train.py", "my_own.py", "does not start launch/train.py"),
        ("--report_to mlflow \\", "--report_to mlflow", "--output_dir ${{outputs.run}}"),  # a line ends it
        ("code: ..\n", "code: ./environment\n", "there is no launch/train.py"),
        ("resources:\n", "resources:\n  instance_cnt: 2\n", "resources: instance_cnt: Unknown field"),
    ],
)
def test_check_names_an_error_in_an_edited_azure_job(old, new, what, tmp_path, capsys):
    text = (FOLDER / "fast.yaml").read_text().replace(old, new)
    shutil.copytree(FOLDER / "environment", tmp_path / "environment")
    (tmp_path / "mine.yaml").write_text(text.replace("code: ..\n", f"code: {ROOT}\n"))
    assert main(["check", "--azureml", str(tmp_path / "mine.yaml")]) == 2
    assert what in " ".join(capsys.readouterr().err.split())
