"""Processes that share examples: read from every place that sets them, and never in the batch."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import Trainer

from recipes.errors import UserError
from recipes.rules.check import check
from recipes.run import resolve
from recipes.run.batch import data_parallel_size, split
from recipes.run.hardware import Hardware
from recipes.run.parallelism import Parallelism

sizes = st.integers(1, 8)
AUTOTP = {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}


def run_of(*argv, world=4, **keywords):
    keywords = {"environment": {}, "hardware": Hardware(cores=2), **keywords}
    return resolve([*argv], world_size=world, **keywords)


# --- The arithmetic -------------------------------------------------------------------------------


@given(tp=sizes, cp=sizes, sp=sizes, world=st.integers(1, 256))
def test_a_world_is_divided_by_all_that_share_examples_or_refused_with_worlds_that_can_be(tp, cp, sp, world):
    parallelism = Parallelism(tensor=tp, context=cp, sequence=sp)
    try:
        assert data_parallel_size(world, parallelism) * tp * cp * sp == world
    except UserError as error:
        nearest = [int(word) for word in error.problems[0].fix.split() if word.isdigit()]
        assert nearest and all(data_parallel_size(size, parallelism) >= 1 for size in nearest)
        assert min(abs(size - world) for size in nearest) < tp * cp * sp


def trainers_batch(micro: int, accumulation: int, world: int, parallelism: Parallelism) -> int:
    """What Trainer's own arithmetic makes of it: examples in an optimizer step."""
    trainer = Trainer.__new__(Trainer)
    config = SimpleNamespace(tp_size=parallelism.tensor, cp_size=parallelism.context, sp_size=parallelism.sequence)
    trainer.accelerator = SimpleNamespace(parallelism_config=config)
    trainer.model, trainer.is_deepspeed_enabled, trainer._train_batch_size = None, False, micro
    return trainer.get_total_train_batch_size(
        SimpleNamespace(gradient_accumulation_steps=accumulation, world_size=world)
    )


@given(tp=sizes, cp=sizes, sp=sizes, groups=st.integers(1, 8), share=st.integers(1, 256), cap=st.integers(1, 16))
def test_trainer_trains_the_batch_that_is_split(tp, cp, sp, groups, share, cap):
    parallelism, world = Parallelism(tensor=tp, context=cp, sequence=sp), groups * tp * cp * sp
    batch = split(share * groups, data_parallel_size(world, parallelism), cap)
    assert trainers_batch(batch.micro, batch.accumulation, world, parallelism) == batch.total == share * groups


@given(total=st.integers(1, 512), autotp=sizes, world=st.integers(1, 32), accumulation=st.none() | st.integers(1, 8))
def test_a_run_keeps_its_global_batch_or_says_why_not(total, autotp, world, accumulation):
    assume(autotp == 1 or world % autotp == 0)
    content = {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": autotp}}
    settings = {"deepspeed": content, "global_batch_size": total}
    run = run_of(
        settings=settings | ({"gradient_accumulation_steps": accumulation} if accumulation else {}), world=world
    )
    trained = run["per_device_train_batch_size"] * run["gradient_accumulation_steps"] * (world // autotp)
    assert run.problems or trained == total == run["global_batch_size"]


@given(replicate=sizes, shard=sizes)
def test_replicas_and_shards_all_have_examples_of_their_own(replicate, shard):
    assert data_parallel_size(replicate * shard, Parallelism(replicate=replicate, shard=shard)) == replicate * shard


# --- Every place that sets it ---------------------------------------------------------------------


@pytest.fixture
def autotp(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(AUTOTP), encoding="utf-8")
    return str(file)


def accelerate_yaml(folder, *lines):
    file = folder / "accelerate.yaml"
    file.write_text("\n".join(["compute_environment: LOCAL_MACHINE", "num_processes: 4", *lines]), encoding="utf-8")
    return str(file)


def test_an_accelerate_yaml(tmp_path):
    lines = ["distributed_type: DEEPSPEED", "parallelism_config:", "  parallelism_config_sp_size: 2"]
    run = run_of(accelerate_config=accelerate_yaml(tmp_path, *lines))
    assert (run.world_size, run.data_parallel_size, str(run.batch)) == (4, 2, "4 x 2 x 2 = 16")


def test_a_deepspeed_json_in_an_accelerate_yaml(tmp_path, autotp):
    lines = ["distributed_type: DEEPSPEED", "deepspeed_config:", f"  deepspeed_config_file: {autotp}"]
    run = run_of(accelerate_config=accelerate_yaml(tmp_path, *lines))
    assert (run.data_parallel_size, run.engine.title) == (2, "DeepSpeed ZeRO-2, tensor parallel 2")


def test_a_deepspeed_json_of_the_arguments(autotp):
    assert run_of("--deepspeed", autotp).data_parallel_size == 2


def test_what_accelerate_launch_exports(autotp):
    variables = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}
    assert run_of(environment=variables).data_parallel_size == 2
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": autotp}
    assert run_of(environment=deepspeed, launched=True).data_parallel_size == 2
    assert (
        run_of(environment={"PARALLELISM_CONFIG_CP_SIZE": "2"}).data_parallel_size == 4
    )  # accelerate does not read it


def test_a_parallelism_config_of_a_script():
    assert run_of(settings={"parallelism_config": ParallelismConfig(tp_size=2)}).data_parallel_size == 2


def test_text_is_not_a_parallelism_config():
    (problem,) = run_of("--parallelism_config", '{"sp_size": 2}').problems
    assert "takes accelerate's ParallelismConfig" in problem.what and "autotp_size" in problem.fix


def test_a_world_that_cannot_be_divided_is_refused_with_those_that_can(autotp):
    (problem,) = run_of("--deepspeed", autotp, world=3).problems
    assert (problem.subject, problem.fix) == ("num_processes", "--num_processes 2 or 4")


@pytest.mark.parametrize("size", ["sp_size", "cp_size"])
@pytest.mark.parametrize("world", [1, 4])
def test_a_size_that_is_refused_anyway_is_the_only_problem(size, world):
    run = run_of(settings={"parallelism_config": ParallelismConfig(**{size: 2})}, world=world)
    assert [problem.subject for problem in check(run) if problem.severity == "error"] == [size]
