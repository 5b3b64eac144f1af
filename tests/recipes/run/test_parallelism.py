"""Processes that share examples: read from every place that sets them."""

import json

import pytest
from accelerate import ParallelismConfig

from recipes.rules.check import check
from tests.support.runs import TWO_GPUS, deepspeed, groups, resolved


@pytest.fixture
def files(tmp_path, monkeypatch):
    """ds.json, which divides tensors by two, and YAMLs that do."""
    monkeypatch.chdir(tmp_path)
    content = {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    (tmp_path / "ds.yaml").write_text(deepspeed("deepspeed_config_file: ds.json"))
    (tmp_path / "tp.yaml").write_text(groups("DEEPSPEED", tp=2))


TP = {"PARALLELISM_CONFIG_TP_SIZE": "2"}
EXPORTED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}
PLACES = {
    "an Accelerate YAML": ("", None, {"accelerate_config": "tp.yaml"}),
    "a JSON in an Accelerate YAML": ("", None, {"accelerate_config": "ds.yaml"}),
    "a JSON of the arguments": ("--deepspeed ds.json", None, {}),
    "variables": ("", None, {"environment": {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **TP}}),
    "a launched JSON": ("", None, {"environment": EXPORTED, "launched": True}),
    "an argument": ("", {"parallelism_config": ParallelismConfig(tp_size=2)}, {}),
}


@pytest.mark.parametrize(("argv", "settings", "place"), PLACES.values(), ids=PLACES)
def test_the_tensor_parallel_size_is_read_from_yaml_json_variables_and_arguments(argv, settings, place, files):
    run = resolved(argv, 4, settings, **place)
    assert (run.batch.data_parallel, str(run.batch)) == (2, "4 x 2 x 2 = 16")


def test_the_tp_size_variable_is_ignored_without_accelerate_use_parallelism_config():
    assert resolved("", 4, environment=TP).batch.data_parallel == 4


def test_a_parallelism_config_given_as_text_is_refused():
    (problem,) = resolved(["--parallelism_config", '{"sp_size": 2}']).problems
    assert "needs accelerate's ParallelismConfig" in problem.what and "autotp_size" in problem.fix


def test_num_processes_not_divisible_by_the_tensor_parallel_size_is_refused_with_valid_numbers(files):
    (problem,) = resolved("--deepspeed ds.json", 3).problems
    assert (problem.subject, problem.fix) == ("num_processes", "--num_processes 2 or 4")


@pytest.mark.parametrize("size", ["sp_size", "cp_size"])
@pytest.mark.parametrize("world", [1, 4])
def test_sp_size_and_cp_size_are_each_refused_with_exactly_one_error(size, world):
    run = resolved("", world, {"parallelism_config": ParallelismConfig(**{size: 2})})
    assert [problem.subject for problem in check(run) if problem.severity == "error"] == [size]


def test_a_users_own_script_may_use_tensor_parallelism_on_gpus():
    place = dict(hardware=TWO_GPUS, trained_by="script")
    run = resolved("", 2, {"parallelism_config": ParallelismConfig(tp_size=2)}, **place)
    assert not [problem for problem in check(run) if problem.severity == "error"]
    assert (run.batch.data_parallel, run.batch.total) == (1, 16)
