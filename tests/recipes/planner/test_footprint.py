"""What each component of a run takes, against peft, bitsandbytes, sums and real memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from recipes.planner.footprint import REDUCE_BUCKET, _gradients_in_update, need, update_bytes
from recipes.planner.shapes import LOADING, TRAINING, UPDATE, Adapters, Case, Components, Traced, Weights
from recipes.planner.tracing.trace import trace, weigh
from recipes.run import here, resolve
from recipes.run.engine_sources import Engine
from recipes.run.files import shipped
from recipes.run.hardware import Hardware
from tests.benchmarks.resident import CASES
from tests.recipes.planner.small import SMALL, V100, need_of, run_of
from tests.support.running import ROOT


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_adapters_train_what_peft_makes_trainable(name):
    import peft

    model = AutoModelForCausalLM.from_config(SMALL[name])
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    found = need_of(SMALL[name], "--use_peft true --lora_r 8 --bf16 true").gpu
    assert found.parameters == 4 * total
    assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_weights_in_4_bits_take_as_much_as_those_of_bitsandbytes(name, tmp_path):
    from transformers import BitsAndBytesConfig

    AutoModelForCausalLM.from_config(SMALL[name]).save_pretrained(tmp_path)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=options, dtype=torch.float32)
    real = sum(parameter.nbytes for parameter in model.parameters())
    adapters = need_of(SMALL[name], "--use_peft true --lora_r 8").gpu.optimizer / 2
    found = need_of(SMALL[name], "--use_peft true --lora_r 8 --load_in_4bit true --use_bnb_nested_quant true").gpu
    packed = weigh(SMALL[name], "causal_lm", Adapters(8, four_bits="bfloat16")).in_4_bits
    assert found.parameters - adapters == pytest.approx(real + packed * (1 / 64 + 4 / (64 * 256)), rel=1e-3)


@pytest.mark.parametrize("recipe", ["memory_zero3", "sharded"])
def test_weights_in_4_bits_are_whole_on_each_gpu_while_they_are_loaded(recipe):
    weights = Weights(16 * 10**9, trained=10**6, in_4_bits=16 * 10**9 - 10**6, largest_layer=10**7)
    engine, flags = shipped(f"{recipe}.yaml"), ["--use_peft", "true", "--load_in_4bit", "true"]
    run = resolve(
        ["--recipe", recipe, *flags],
        here(
            8, hardware=V100, accelerate_config=str(engine), environment={}, trained_by="nobody", packages=frozenset()
        ),
    )
    found = need(run, weights, Traced([(0, 0, 0)], 1), 1)
    assert found.moment == LOADING
    assert found.gpu.parameters > 0.5 * 16 * 10**9


@pytest.mark.parametrize(
    ("optim", "numbers"),
    [("sgd", 0), ("adagrad", 1), ("adamw_torch", 2), ("ademamix", 3), ("lion_8bit", 0.25), ("adamw_bnb_8bit", 0.5)],
)
def test_optimizers_keep_their_moments(optim, numbers):
    weights = Weights(10**9, 10**9)
    kept = need(run_of("standard", "--optim", optim), weights, Traced([(0, 0, 1)], 1), 1).gpu
    update = {"adamw_torch": 4 * 10**9, "adagrad": 8 * 10**9}.get(optim, 0)
    assert kept.optimizer == pytest.approx(4 * 10**9 * numbers + update, rel=0.02)


def test_zero_3_fetches_a_whole_layer_of_experts():
    experts = Weights(10**10, 10**10, largest_layer=3 * 10**9)
    run = resolve(["--recipe", "memory_zero3"], here(8, hardware=V100, environment={}, trained_by="nobody"))
    assert need(run, experts, Traced([(0, 0, 0)], 1), 1).gpu.parameters == 2 * 3 * 10**9


@pytest.mark.parametrize(("stage", "per_parameter"), [(1, 12), (2, 12), (3, 11)])
def test_zeros_update_holds_what_two_real_ranks_hold(stage, per_parameter):
    """Weights, fp32 copies and moments; a share's gradients, one flat copy, and one in fp32.

    Two ranks of DeepSpeed 0.19.8 on a CPU held 12.0, 12.0 and 11.1 bytes a parameter, ZeRO-3 with a
    bucket of 0.1 among them.
    """
    flags = ["--optim", "adamw_torch_fused", "--bf16", "true"]
    engine = Engine("deepspeed", "", zero_stage=stage)
    run = resolve(flags, here(2, hardware=Hardware(cores=2), environment={}, trained_by="nobody"))
    run = replace(run, engine=engine)
    total = 10**9
    found = need(run, Weights(total, total), Traced([(0, 0, 0)], 1), accumulation=1)
    gathered = 2 * total if stage == 3 else 0
    bucket = 2 * REDUCE_BUCKET if stage == 3 else 0
    assert found.moment == UPDATE
    assert found.gpu.total - gathered - bucket == pytest.approx(per_parameter * total, rel=0.001)


def test_a_classifier_on_a_decoder_without_padding_token_is_traced():
    assert need_of(SMALL["llama"], "--task sequence_classification").gpu.total > 0


@pytest.mark.parametrize("smaller", ["--use_peft true", "--use_peft true --load_in_4bit true"])
def test_adapters_take_less_than_training_everything(smaller):
    whole, less = (need_of(SMALL["llama"], flags).gpu for flags in ("", smaller))
    assert less.total < whole.total
    assert less.gradients + less.optimizer < 0.2 * (whole.gradients + whole.optimizer)


def test_components_sum_to_the_total():
    assert Components(1, 2, 3, 4, 5, 6, 7).total == 28


@settings(max_examples=5, deadline=None)
@given(micro=st.integers(1, 16), length=st.integers(8, 128), layers=st.integers(1, 2), more=st.integers(1, 8))
def test_memory_grows_with_the_batch_the_length_and_the_layers(micro, length, layers, more):
    run = run_of("standard")

    def total(micro, length, layers):
        config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=layers, vocab_size=500)
        return need(run, weigh(config, "causal_lm"), trace(config, Case(micro, length)), accumulation=2).gpu.total

    larger = [(micro + more, length, layers), (micro, length + more, layers), (micro, length, layers + 1)]
    assert total(micro, length, layers) <= min(total(*sizes) for sizes in larger)


@settings(max_examples=50, deadline=None)
@given(
    total=st.integers(10**6, 10**10),
    frozen=st.floats(0, 1),
    world=st.integers(2, 64),
    stage=st.integers(1, 3),
    optim=st.sampled_from(["adamw_torch", "adamw_bnb_8bit", "sgd"]),
)
def test_shards_add_up_to_at_least_the_whole(total, frozen, world, stage, optim):
    """In a micro-batch whose activations make it the fullest moment, and in the update."""
    weights = Weights(total, trained=max(1, round(total * (1 - frozen))))
    parts, in_update = [], []
    for processes in (1, world):
        engine = Engine("deepspeed", "", zero_stage=stage)
        flags = ["--optim", optim, "--global_batch_size", str(world)]
        run = resolve(flags, here(processes, hardware=V100, environment={}, trained_by="nobody"))
        run = replace(run, engine=engine)
        micro_batch = need(run, weights, Traced([(10**13, 0, 0)], 1), accumulation=1)
        assert micro_batch.moment == TRAINING
        parts.append(micro_batch.gpu)
        in_update.append(_gradients_in_update(run, weights) + update_bytes(run, weights))
    for part in ("parameters", "gradients", "optimizer"):
        assert world * getattr(parts[1], part) >= getattr(parts[0], part)
    assert world * in_update[1] >= in_update[0]


# --- Real memory ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resident():
    argv = [sys.executable, "-m", "tests.benchmarks.resident", "--json"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
@pytest.mark.parametrize("case", CASES)
def test_two_real_steps_take_as_much_resident_memory_as_planned(case, resident):
    row = resident[case]
    assert row["predicted_bytes"] == pytest.approx(row["resident_bytes"], rel=0.05)
