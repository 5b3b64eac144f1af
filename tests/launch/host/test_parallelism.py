"""No door admits a parallelism that is not trained as asked: launcher, script, environment, job."""

import json

import pytest
from accelerate import ParallelismConfig

import recipes
from launch.cli import main
from recipes.errors import UserError
from recipes.rules.check import check
from recipes.run import here, resolve
from tests.support.running import launch_quickly
from tests.support.runs import TWO_GPUS, groups

AUTOTP = {"train_micro_batch_size_per_gpu": "auto", "tensor_parallel": {"autotp_size": 2}}
VARIABLES = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}


@pytest.fixture
def accelerate_yaml(tmp_path):
    def write(*words, **sizes):
        file = tmp_path / "accelerate.yaml"
        file.write_text(groups(*words, **sizes), encoding="utf-8")
        return str(file)

    return write


@pytest.mark.parametrize(
    ("type_", "sizes", "words"),
    [
        ("DEEPSPEED", {"sp": 2}, "2 is refused: sequence parallelism"),
        ("MULTI_GPU", {"cp": 2}, "2 is refused: context parallelism"),
        ("MULTI_GPU", {"tp": 2}, "2 is refused: it expects a model that was loaded in parts"),
        ("MULTI_GPU", {"dp_replicate": 2}, "ParallelismConfig is only compatible"),
        ("DEEPSPEED", {"tp": 3}, "2 cannot be divided by tensor parallel 3"),
    ],
)
def test_what_a_launch_exports(type_, sizes, words, accelerate_yaml, tmp_path):
    outcome = launch_quickly(output=tmp_path / "out", config=accelerate_yaml(type_, **sizes))
    assert outcome.code == 1 and not outcome.record
    assert words in " ".join(outcome.output.split()) and "Traceback" not in outcome.output


def test_variables_that_the_launcher_only_hands_on(tmp_path):
    outcome = launch_quickly(output=tmp_path, env=VARIABLES)
    assert outcome.code == 1 and "sequence parallelism" in outcome.output


@pytest.mark.parametrize("sizes", [{"sp_size": 2}, {"cp_size": 2}])
def test_a_config_in_a_script_on_a_cpu(sizes, tmp_path):
    with pytest.raises(UserError, match="is refused"):
        recipes.standard(str(tmp_path), num_processes=2, parallelism_config=ParallelismConfig(**sizes))


def test_a_script_on_gpus_may_load_a_model_in_parts():
    place = here(2, hardware=TWO_GPUS, environment={}, trained_by="script")
    run = resolve(place=place, settings={"parallelism_config": ParallelismConfig(tp_size=2)})
    assert not [problem for problem in check(run) if problem.severity == "error"]
    assert (run.data_parallel_size, run.batch.total) == (1, 16)


def test_a_script_under_a_launch(tmp_path, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="sequence parallelism"):
        recipes.standard(str(tmp_path), num_processes=2)


def test_a_script_with_a_deepspeed_json_gets_the_batch_that_trainer_counts(tmp_path):
    content = {**AUTOTP, "zero_optimization": {"stage": 2}}
    args = recipes.standard(str(tmp_path), num_processes=4, deepspeed=content, global_batch_size=16)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 2 == 16


@pytest.mark.parametrize("command", ["check", "submit"])
def test_a_deepspeed_json(command, tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**AUTOTP, "zero_optimization": {"stage": 3}}))
    flags = ["--deepspeed", str(file)]
    words = {"check": ["check", "--num_processes", "2", *flags]}
    words["submit"] = ["submit", "local", "--dry-run", "--processes_per_node", "2", "--", *flags]
    assert main(words[command]) == 2
    assert "cannot be combined with ZeRO stage 3" in " ".join(capsys.readouterr().err.split())


def test_the_planner_says_what_it_cannot_estimate(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**AUTOTP, "zero_optimization": {"stage": 2}}))
    words = ["--gpu", "A100 80GB", "--num_processes", "2", "--recipe", "standard", "--deepspeed", str(file)]
    assert main(["plan", "--model", "7B", *words]) == 2
    assert "how much of this model each process of a group holds" in " ".join(capsys.readouterr().err.split())
