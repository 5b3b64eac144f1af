"""Switches that work on any recipe: 8-bit Adam, LoRA, QLoRA, DoRA, precision, evaluation."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.running import launch_quickly, losses, model_flags, train_here

STEPS = "--max_steps 4 --learning_rate 1e-3 --logging_steps 1".split()
HELD_OUT = "--dataset_train_split train[:200] --dataset_test_split train[200:] --eval_strategy steps".split()
DORA = ["--use_peft", "--use_dora"]


@pytest.mark.parametrize(
    "switch", ["--optim adamw_bnb_8bit", "--use_peft --lora_r 2", "--use_peft --load_in_4bit --recipe fast"]
)
def test_the_loss_falls_with_8_bit_adam_with_lora_and_with_qlora(switch, tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path, *STEPS, *switch.split())
    assert losses(outcome)[-1] < losses(outcome)[0]
    adapts = "--use_peft" in switch
    assert (tmp_path / "adapter_model.safetensors").exists() == adapts
    assert (tmp_path / "model.safetensors").exists() != adapts


def test_dora_trains_one_magnitude_for_each_output_feature_of_a_linear_layer(tiny_model, texts, tmp_path):
    flags = [*STEPS[2:], "--lr_scheduler_type", "constant", *DORA, "--max_steps"]
    train_here(tiny_model, texts, tmp_path, *flags, "3")
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {tuple(weight.shape) for name, weight in saved.items() if "magnitude" in name} == {(32,), (64,)}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["use_dora"] is True
    resumed = train_here(tiny_model, texts, tmp_path, *flags, "6")
    assert losses(resumed)[-1] < losses(resumed)[0]
    end = load_file(tmp_path / "adapter_model.safetensors")
    learned = [name for name in saved if "magnitude" in name and not torch.equal(end[name], saved[name])]
    assert len(learned) == 14  # seven linear layers in each of two blocks


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "more"), [("memory", ()), ("memory", ("--load_in_4bit",)), ("memory_zero3", ())])
def test_dora_trains_under_deepspeed_zero(recipe, more, tiny_model, texts, tmp_path):
    flags = ["--recipe", recipe, *model_flags(tiny_model, texts), *STEPS, *DORA, *more]
    outcome = launch_quickly(*flags, output=tmp_path, config=f"{recipe}.yaml")
    assert outcome.code == 0 and losses(outcome)[-1] < losses(outcome)[0]


@pytest.mark.slow
@pytest.mark.parametrize("adapts", [False, True])
def test_regional_compilation_has_the_losses_and_weight_names_of_eager_training(adapts, tiny_model, texts, tmp_path):
    torch.compiler.reset()  # another test of this process may have compiled the same layers
    (counters := torch._dynamo.utils.counters).clear()
    flags = ["--recipe", "fast", *STEPS[2:], "--lr_scheduler_type", "constant", *["--use_peft"] * adapts, "--max_steps"]
    plain = train_here(tiny_model, texts, tmp_path / "plain", *flags, "4")
    for steps in ("2", "4"):
        compile_once = "--torch_compile", "--use_regional_compilation"
        compiled = train_here(tiny_model, texts, tmp_path / "compiled", *flags, steps, *compile_once)
    assert counters["stats"]["unique_graphs"] > 2  # a whole model is one graph
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4)
    file = "adapter_model.safetensors" if adapts else "model.safetensors"
    assert load_file(tmp_path / "compiled" / file).keys() == load_file(tmp_path / "plain" / file).keys()


def test_bf16_full_eval_leaves_the_saved_weights_in_float32(tiny_model, texts, tmp_path):
    train_here(tiny_model, texts, tmp_path, *HELD_OUT, *"--max_steps 2 --bf16_full_eval --eval_steps 2".split())
    assert {weight.dtype for weight in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


@pytest.mark.slow
def test_early_stopping_ends_the_run_and_tensorboard_events_are_written(tiny_model, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    flags = "--eval_steps 1 --save_steps 1 --load_best_model_at_end --early_stopping_patience 2 --max_steps 9"
    # A learning rate of zero never improves the loss.
    more = [*flags.split(), "--learning_rate", "0", "--report_to", "tensorboard"]
    outcome = train_here(tiny_model, texts, tmp_path / "out", *HELD_OUT, *more)
    assert outcome.record["global_step"] == 3 and "3 of 9, stopped early" in outcome.output
    assert list((tmp_path / "events").rglob("events.out.tfevents.*"))
