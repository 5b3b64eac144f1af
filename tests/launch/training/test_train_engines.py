"""Every engine really trains on a CPU: two ranks of DDP, ZeRO-2 and ZeRO-3 with offload."""

import json
import re
import shutil

import pytest

from tests.support.running import launch, launch_quickly, losses, model_flags, train_here

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its CPU Adam: needs g++")
STEPS = "--max_steps 6 --learning_rate 5e-3 --lr_scheduler_type constant --logging_steps 1".split()


@pytest.fixture(scope="module")
def one_process(tiny_model, texts, tmp_path_factory):
    """The same training in one process, at the same global batch."""
    return train_here(tiny_model, texts, tmp_path_factory.mktemp("one"), "--recipe", "standard", *STEPS)


@pytest.fixture(scope="module")
def two_ranks(tiny_model, texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("ddp")
    flags = model_flags(tiny_model, texts)
    return launch_quickly("--recipe", "standard", *flags, *STEPS, output=output, processes=2, config="standard.yaml")


def test_two_ranks_are_one_world(two_ranks):
    assert (two_ranks.code, two_ranks.record["world_size"], two_ranks.record["status"]) == (0, 2, "finished")


def test_two_ranks_with_accumulation_train_what_one_process_trains(one_process, two_ranks):
    assert losses(two_ranks) == pytest.approx(losses(one_process), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("end", [42, 36])
def test_an_evaluation_weighs_every_token_the_same_however_ranks_share_them(end, tiny_model, texts, tmp_path):
    """Of ten examples the first rank has eight, the second two; of four, the second has none."""
    split = f"--dataset_train_split train[:32] --dataset_test_split train[32:{end}] --eval_strategy epoch --max_steps 1"
    flags = [*model_flags(tiny_model, texts), *split.split(), "--learning_rate", "1e-12"]
    expected = launch_quickly(*flags, output=tmp_path / "summed").record["eval_loss"]
    own = launch_quickly(*flags, "--average_tokens_across_devices", "false", output=tmp_path / "own")
    assert own.record["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_the_threads_of_each_process_are_shown(two_ranks):
    engine = next(line for line in two_ranks.output.splitlines() if line.startswith("engine "))
    assert re.search(r"DDP, 2 processes on CPU, \d+ cores?: \d+ threads? each", engine), engine


@pytest.fixture(scope="module", params=["memory", "memory_zero3"])
def offloaded(request, tiny_model, texts, tmp_path_factory):
    """A ZeRO run of two ranks with its YAML, one of the two through the launcher itself."""
    output = tmp_path_factory.mktemp(request.param)
    flags = ["--recipe", request.param, *model_flags(tiny_model, texts)]
    config = f"{request.param}.yaml"
    start = launch if request.param == "memory_zero3" else launch_quickly
    return start(*flags, *STEPS, output=output, processes=2, config=config), flags, output, config


@pytest.mark.slow
@needs_compiler
def test_zero_with_offload_trains_on_two_ranks(offloaded):
    outcome = offloaded[0]
    assert (outcome.code, outcome.record["world_size"]) == (0, 2)


@pytest.mark.slow
@needs_compiler
def test_zero_in_bf16_follows_the_fp32_training(offloaded, one_process):
    assert losses(offloaded[0]) == pytest.approx(losses(one_process), rel=0.02)


@pytest.mark.slow
@needs_compiler
def test_zero_leaves_a_whole_model(offloaded):
    from safetensors import safe_open

    with safe_open(offloaded[2] / "model.safetensors", "pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    assert shapes and all(0 not in shape for shape in shapes)


@pytest.mark.slow
@needs_compiler
def test_zero_resumes_where_it_stopped(offloaded):
    _, flags, output, config = offloaded
    longer = [word if word != "6" else "8" for word in STEPS]
    whole = launch_quickly(*flags, *longer, output=output.with_name(f"{output.name}-whole"), config=config)
    resumed = launch_quickly(*flags, *longer, output=output, config=config)
    assert "resuming from" in resumed.output
    # a fresh optimizer would take a first step of full size
    assert losses(resumed)[6:] == pytest.approx(losses(whole)[6:], rel=2e-3)


@pytest.mark.slow
@needs_compiler
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
