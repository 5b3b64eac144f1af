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
def test_a_launchs_yaml(type_, sizes, words, tmp_path):
    (tmp_path / "accelerate.yaml").write_text(groups(type_, **sizes), encoding="utf-8")
    outcome = launch_quickly(output=tmp_path / "out", config=str(tmp_path / "accelerate.yaml"))
    assert outcome.code == 1 and not outcome.record
    assert words in " ".join(outcome.output.split()) and "Traceback" not in outcome.output


def test_variables_of_a_launch(tmp_path, monkeypatch):
    outcome = launch_quickly(output=tmp_path, env=VARIABLES)
    assert outcome.code == 1 and "sequence parallelism" in outcome.output
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="sequence parallelism"):
        recipes.standard(str(tmp_path), num_processes=2)


@pytest.mark.parametrize("sizes", [{"sp_size": 2}, {"cp_size": 2}])
def test_a_config_in_a_script_on_a_cpu(sizes, tmp_path):
    with pytest.raises(UserError, match="is refused"):
        recipes.standard(str(tmp_path), num_processes=2, parallelism_config=ParallelismConfig(**sizes))


def test_a_script_on_gpus_may_load_a_model_in_parts():
    place = here(2, hardware=TWO_GPUS, environment={}, trained_by="script")
    run = resolve(place=place, settings={"parallelism_config": ParallelismConfig(tp_size=2)})
    assert not [problem for problem in check(run) if problem.severity == "error"]
    assert (run.data_parallel_size, run.batch.total) == (1, 16)


def test_a_deepspeed_json_counts_in_a_script_as_trainer_counts(tmp_path):
    content = {**AUTOTP, "zero_optimization": {"stage": 2}}
    args = recipes.standard(str(tmp_path), num_processes=4, deepspeed=content, global_batch_size=16)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 2 == 16


@pytest.mark.parametrize(
    ("stage", "command", "words"),
    [
        (3, "check --num_processes 2", "cannot be combined with ZeRO stage 3"),
        (3, "submit local --dry-run --processes_per_node 2 --", "cannot be combined with ZeRO stage 3"),
        (
            2,
            "plan --model 7B --gpu A100=80GB --num_processes 2 --recipe standard",
            "how much of this model each process",
        ),
    ],
)
def test_a_deepspeed_json(stage, command, words, tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**AUTOTP, "zero_optimization": {"stage": stage}}))
    argv = [word.replace("=", " ") for word in command.split()]
    assert main([*argv, "--deepspeed", str(file)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
