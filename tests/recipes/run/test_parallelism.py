"""Processes that share examples: read from every place that sets them."""

import json

import pytest
from accelerate import ParallelismConfig

from recipes.rules.check import check
from tests.support.runs import TWO_GPUS, resolved


@pytest.fixture
def files(tmp_path, monkeypatch):
    """ds.json, which divides tensors by two, and YAMLs that do."""
    monkeypatch.chdir(tmp_path)
    content = {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    sections = {
        "ds.yaml": "deepspeed_config: {deepspeed_config_file: ds.json}",
        "tp.yaml": "parallelism_config: {parallelism_config_tp_size: 2}",
    }
    for name, section in sections.items():
        text = f"compute_environment: LOCAL_MACHINE\nnum_processes: 4\ndistributed_type: DEEPSPEED\n{section}\n"
        (tmp_path / name).write_text(text)


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


@pytest.mark.parametrize("name", PLACES)
def test_a_tensor_parallel_size_is_read_from_each_place_that_sets_it(name, files):
    argv, settings, place = PLACES[name]
    run = resolved(argv, None if "accelerate_config" in place else 4, settings, **place)
    assert (run.world_size, run.data_parallel_size, str(run.batch)) == (4, 2, "4 x 2 x 2 = 16")


def test_variables_that_accelerate_does_not_read_set_nothing():
    assert resolved("", 4, environment=TP).data_parallel_size == 4


def test_text_is_not_a_parallelism_config():
    (problem,) = resolved(["--parallelism_config", '{"sp_size": 2}']).problems
    assert "needs accelerate's ParallelismConfig" in problem.what and "autotp_size" in problem.fix


def test_a_world_that_cannot_be_divided_is_refused_with_those_that_can(files):
    (problem,) = resolved("--deepspeed ds.json", 3).problems
    assert (problem.subject, problem.fix) == ("num_processes", "--num_processes 2 or 4")


@pytest.mark.parametrize("size", ["sp_size", "cp_size"])
@pytest.mark.parametrize("world", [1, 4])
def test_a_refused_sequence_or_context_parallel_size_is_the_only_error(size, world):
    run = resolved("", world, {"parallelism_config": ParallelismConfig(**{size: 2})})
    assert [problem.subject for problem in check(run) if problem.severity == "error"] == [size]


def test_a_script_on_gpus_may_use_tensor_parallelism():
    place = dict(hardware=TWO_GPUS, trained_by="script")
    run = resolved("", 2, {"parallelism_config": ParallelismConfig(tp_size=2)}, **place)
    assert not [problem for problem in check(run) if problem.severity == "error"]
    assert (run.data_parallel_size, run.batch.total) == (1, 16)
