"""A script divides a model as the launch's variables and DeepSpeed's JSON ask, or refuses to."""

import pytest
from accelerate import ParallelismConfig

import recipes
from recipes.errors import UserError
from recipes.rules.check import check
from recipes.run import here, resolve
from tests.support.runs import TWO_GPUS

VARIABLES = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "2"}


def test_variables_of_a_launch_count_in_a_script(tmp_path, monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="sequence parallelism"):
        recipes.standard(str(tmp_path), num_processes=2)


def test_a_script_on_gpus_may_load_a_model_in_parts():
    place = here(2, hardware=TWO_GPUS, environment={}, trained_by="script")
    run = resolve(place=place, settings={"parallelism_config": ParallelismConfig(tp_size=2)})
    assert not [problem for problem in check(run) if problem.severity == "error"]
    assert (run.data_parallel_size, run.batch.total) == (1, 16)


def test_a_deepspeed_json_counts_in_a_script_as_trainer_counts(tmp_path):
    content = {"train_micro_batch_size_per_gpu": "auto", "tensor_parallel": {"autotp_size": 2}}
    content["zero_optimization"] = {"stage": 2}
    args = recipes.standard(str(tmp_path), num_processes=4, deepspeed=content, global_batch_size=16)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 2 == 16
