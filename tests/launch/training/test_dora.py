"""DoRA learns, is saved, resumed and trained by several ranks; what peft refuses is one line."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.running import launch_quickly, losses, model_flags, train_here

STEPS = "--max_steps 4 --learning_rate 1e-3 --logging_steps 1".split()


@pytest.mark.parametrize("four_bits", [(), ("--load_in_4bit",)], ids=["dora", "qdora"])
def test_dora_trains_a_magnitude_for_each_output_and_resumes_bit_for_bit(four_bits, tiny_model, texts, tmp_path):
    flags = [*STEPS[2:], "--lr_scheduler_type", "constant", "--use_peft", "--use_dora", *four_bits]
    first = train_here(tiny_model, texts, tmp_path / "run", *flags, "--max_steps", "3")
    assert losses(first)[-1] < losses(first)[0]
    saved = load_file(tmp_path / "run" / "adapter_model.safetensors")
    magnitudes = {weight.shape for name, weight in saved.items() if "lora_magnitude_vector" in name}
    assert magnitudes == {(32,), (64,)}
    assert json.loads((tmp_path / "run" / "adapter_config.json").read_text())["use_dora"] is True
    resumed = train_here(tiny_model, texts, tmp_path / "run", *flags, "--max_steps", "6")
    whole = train_here(tiny_model, texts, tmp_path / "whole", *flags, "--max_steps", "6")
    assert "resuming from" in resumed.output and losses(resumed)[3:] == losses(whole)[3:]
    ends = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("run", "whole")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])
    learned = [name for name in saved if "magnitude" in name and not torch.equal(ends[0][name], saved[name])]
    assert len(learned) == 14  # seven linear layers in each of two blocks


def test_dora_trains_the_same_on_two_ranks(tiny_model, texts, tmp_path):
    flags = [*model_flags(tiny_model, texts), *STEPS, "--use_peft", "--use_dora", "--lora_dropout", "0"]
    alone = train_here(tiny_model, texts, tmp_path / "alone", *flags[6:])
    both = launch_quickly(*flags, output=tmp_path / "both", processes=2, config="standard.yaml")
    assert both.code == 0 and losses(both) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "more"), [("memory", ()), ("memory", ("--load_in_4bit",)), ("memory_zero3", ())])
def test_dora_trains_under_zero(recipe, more, tiny_model, texts, tmp_path):
    flags = ["--recipe", recipe, *model_flags(tiny_model, texts), *STEPS, "--use_peft", "--use_dora", *more]
    outcome = launch_quickly(*flags, output=tmp_path, processes=2, config=f"{recipe}.yaml")
    assert outcome.code == 0 and losses(outcome)[-1] < losses(outcome)[0]
