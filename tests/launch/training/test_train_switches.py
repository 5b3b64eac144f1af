"""Switches that work on any recipe: 8-bit Adam, LoRA, QLoRA, precision, packing, evaluation.

One rank, in process.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from launch.data.demo import demo_tokenizer
from tests.support.models import save
from tests.support.running import launch_quickly, losses, model_flags, train_here

STEPS = "--max_steps 4 --learning_rate 1e-3 --logging_steps 1".split()


def test_eight_bit_adam_trains(tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path, *STEPS, "--optim", "adamw_bnb_8bit")
    assert losses(outcome)[-1] < losses(outcome)[0]


def test_lora_trains_a_small_part_and_saves_adapters(tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path, *STEPS, "--use_peft", "--lora_r", "2")
    assert losses(outcome)[-1] < losses(outcome)[0]
    assert (tmp_path / "adapter_model.safetensors").exists() and not (tmp_path / "model.safetensors").exists()


def test_qlora_trains_on_four_bit_weights(tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path, *STEPS, "--use_peft", "--load_in_4bit", "--recipe", "fast")
    assert losses(outcome)[-1] < losses(outcome)[0]


def test_qlora_with_eight_bit_adam_trains_on_two_ranks(tiny_model, texts, tmp_path):
    flags = [*model_flags(tiny_model, texts), *STEPS, "--use_peft", "--load_in_4bit", "--optim", "adamw_bnb_8bit"]
    outcome = launch_quickly(*flags, output=tmp_path, processes=2, config="standard.yaml")
    assert (outcome.code, outcome.record["world_size"]) == (0, 2)


def test_on_a_cpu_layer_norm_mixes_no_16_bit_types_and_rms_norm_does(tiny_model, texts, tmp_path):
    config = GPT2Config(vocab_size=260, n_positions=256, n_embd=16, n_layer=1, n_head=2)
    demo_tokenizer().save_pretrained(save(GPT2LMHeadModel(config), tmp_path / "gpt2"))
    mixed = ["--dtype", "float16", "--bf16", "--max_steps", "1"]
    assert train_here(tiny_model, texts, tmp_path / "llama", *mixed).code == 0
    refused = train_here(tmp_path / "gpt2", texts, tmp_path / "out", *mixed)
    assert refused.code == 2 and "dtype: mixed dtype (CPU)" in refused.output
    assert train_here(tmp_path / "gpt2", texts, tmp_path / "out", *mixed[2:]).code == 0  # with float32, as advised


@pytest.mark.slow
def test_fast_trains_on_two_ranks_with_its_static_graph(tiny_model, texts, tmp_path):
    flags = ["--recipe", "fast", *model_flags(tiny_model, texts), *STEPS]
    outcome = launch_quickly(*flags, output=tmp_path, processes=2, config="fast.yaml")
    assert outcome.record["settings"]["ddp_static_graph"]["value"] is True
    assert losses(outcome)[-1] < losses(outcome)[0]


@pytest.mark.slow
def test_gradient_compression_reaches_ddp(tiny_model, texts, tmp_path):
    flags = [*model_flags(tiny_model, texts), *STEPS, "--ddp_comm_hook", "fp16"]
    outcome = launch_quickly(*flags, output=tmp_path, processes=2, config="standard.yaml")
    assert (outcome.code, outcome.record["world_size"]) == (0, 2)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    file = tmp_path_factory.mktemp("reviews") / "reviews.jsonl"
    rows = [{"text": f"{'good' if n % 2 else 'bad'} number {n}", "label": "pos" if n % 2 else "neg"} for n in range(64)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def first_step(outcome):
    entry = next(entry for entry in outcome.record["log_history"] if "loss" in entry)
    return entry["loss"], entry["grad_norm"]


@pytest.mark.slow
def test_classification_has_one_loss_and_one_gradient_however_the_batch_is_split(tiny_model, reviews, tmp_path):
    flags = [*"--task sequence_classification --max_steps 1 --logging_steps 1".split()]
    whole = train_here(tiny_model, reviews, tmp_path / "16x1", *flags, "--per_device_train_batch_size", "16")
    split = train_here(tiny_model, reviews, tmp_path / "4x4", *flags, "--per_device_train_batch_size", "4")
    ranks = launch_quickly(
        *model_flags(tiny_model, reviews), *flags, output=tmp_path / "2", processes=2, config="standard.yaml"
    )
    assert first_step(split) == pytest.approx(first_step(whole), rel=1e-4)
    assert first_step(ranks) == pytest.approx(first_step(whole), rel=1e-4)


def test_an_evaluation_in_sixteen_bits_leaves_the_saved_weights_alone(tiny_model, texts, tmp_path):
    flags = "--max_steps 2 --bf16_full_eval --eval_strategy steps --eval_steps 2".split()
    slices = ["--dataset_train_split", "train[:200]", "--dataset_test_split", "train[200:]"]
    train_here(tiny_model, texts, tmp_path, *flags, *slices)
    weights = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.slow
def test_early_stopping_stops(tiny_model, texts, tmp_path):
    flags = "--eval_strategy steps --eval_steps 1 --save_steps 1 --load_best_model_at_end --early_stopping_patience 2"
    slices = ["--dataset_train_split", "train[:200]", "--dataset_test_split", "train[200:]"]
    # a learning rate of zero never improves the loss
    outcome = train_here(tiny_model, texts, tmp_path, *flags.split(), *slices, "--learning_rate=0", "--max_steps=9")
    assert outcome.record["global_step"] == 3


@pytest.mark.slow
def test_tensorboard_gets_the_losses(tiny_model, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    train_here(tiny_model, texts, tmp_path / "out", *STEPS, "--report_to", "tensorboard")
    assert list((tmp_path / "events").rglob("events.out.tfevents.*"))


@pytest.mark.slow
def test_activations_are_recomputed_without_changing_the_loss(tiny_model, texts, tmp_path):
    plain = train_here(tiny_model, texts, tmp_path / "plain", *STEPS)
    recomputed = train_here(tiny_model, texts, tmp_path / "recomputed", *STEPS, "--gradient_checkpointing")
    assert losses(recomputed) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.slow
def test_bf16_follows_fp32(tiny_model, texts, tmp_path):
    plain = train_here(tiny_model, texts, tmp_path / "plain", *STEPS)
    bf16 = train_here(tiny_model, texts, tmp_path / "bf16", *STEPS, "--bf16")
    assert losses(bf16) == pytest.approx(losses(plain), rel=0.02)
