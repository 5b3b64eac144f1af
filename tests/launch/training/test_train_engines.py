"""Every engine really trains on a CPU: two ranks of DDP, ZeRO-2 and ZeRO-3 with offload."""

import json
import re

import pytest
from safetensors.torch import load_file

from tests.launch.training.test_every_recipe import NEEDS_COMPILER
from tests.support.running import launch, launch_quickly, losses, model_flags, train_here

STEPS = "--max_steps 6 --learning_rate 5e-3 --lr_scheduler_type constant --logging_steps 1".split()


@pytest.fixture(scope="module")
def one_process(tiny_model, texts, tmp_path_factory):
    """The same training in one process, at the same global batch."""
    return train_here(tiny_model, texts, tmp_path_factory.mktemp("one"), "--recipe", "standard", *STEPS)


def test_two_ranks_are_one_world_and_train_what_one_process_trains(one_process, tiny_model, texts, tmp_path):
    outcome = launch_quickly("--recipe", "standard", *model_flags(tiny_model, texts), *STEPS, output=tmp_path)
    assert (outcome.code, outcome.record["world_size"], outcome.record["status"]) == (0, 2, "finished")
    assert losses(outcome) == pytest.approx(losses(one_process), rel=1e-4)
    engine = next(line for line in outcome.output.splitlines() if line.startswith("engine "))
    assert re.search(r"DDP, 2 processes on CPU, \d+ cores?: \d+ threads? each", engine), engine


@pytest.mark.slow
@pytest.mark.parametrize("end", [42, 36])
def test_an_evaluation_weighs_every_token_the_same_however_ranks_share_them(end, tiny_model, texts, tmp_path):
    """Of ten examples the first rank has eight, the second two; of four, the second has none."""
    split = f"--dataset_train_split train[:32] --dataset_test_split train[32:{end}] --eval_strategy epoch --max_steps 1"
    flags = [*model_flags(tiny_model, texts), *split.split(), "--learning_rate", "1e-12"]
    expected = launch_quickly(*flags, output=tmp_path / "summed").record["eval_loss"]
    own = launch_quickly(*flags, "--average_tokens_across_devices", "false", output=tmp_path / "own")
    assert own.record["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param(name, marks=NEEDS_COMPILER) for name in ("memory", "memory_zero3")])
def test_zero_with_offload_trains_what_fp32_trains_saves_a_whole_model_and_resumes(
    recipe, one_process, tiny_model, texts, tmp_path
):
    flags = ["--recipe", recipe, *model_flags(tiny_model, texts), *STEPS]
    how = dict(processes=2, config=f"{recipe}.yaml")
    start = launch if recipe == "memory_zero3" else launch_quickly  # one of the two through the launcher itself
    outcome = start(*flags, output=tmp_path / "run", **how)
    assert (outcome.code, outcome.record["world_size"]) == (0, 2), outcome.output
    assert losses(outcome) == pytest.approx(losses(one_process), rel=0.02)
    assert all(weight.numel() for weight in load_file(tmp_path / "run" / "model.safetensors").values())
    longer = [word if word != "6" else "8" for word in flags]
    whole = launch_quickly(*longer, output=tmp_path / "whole", **how)
    resumed = launch_quickly(*longer, output=tmp_path / "run", **how)
    assert "resuming from" in resumed.output
    # A fresh optimizer would take a first step of full size.
    assert losses(resumed)[6:] == pytest.approx(losses(whole)[6:], rel=2e-3)


@pytest.mark.slow
@NEEDS_COMPILER[0]
def test_a_memory_recipe_under_plain_torchrun_starts_its_own_engine(tiny_model, texts, tmp_path):
    flags = ["--recipe", "memory", *model_flags(tiny_model, texts), *STEPS]
    outcome = launch(*flags, output=tmp_path, processes=1, config="standard.yaml")
    assert outcome.record["engine"] == "DeepSpeed ZeRO-2, optimizer offload"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_deepspeed_json_under_plain_ddp_trains_what_one_process_trains(
    stage, one_process, tiny_model, texts, tmp_path
):
    """On a CPU nobody else tells ZeRO-3 of the processes before the model is loaded."""
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    config = {"zero_optimization": {"stage": stage}, **dict.fromkeys(sizes, "auto")}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    flags = [*model_flags(tiny_model, texts), *STEPS, "--deepspeed", str(tmp_path / "ds.json")]
    outcome = launch_quickly(*flags, output=tmp_path / "out", processes=2, config="standard.yaml")
    assert losses(outcome) == pytest.approx(losses(one_process), rel=1e-4)
