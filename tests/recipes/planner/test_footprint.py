"""What each component of a run takes, against peft, bitsandbytes, sums and real memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.planner.footprint import REDUCE_BUCKET, Memory
from recipes.planner.shapes import LOADING, UPDATE, Adapters, Weights
from recipes.planner.tracing.trace import weigh
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
    found = Memory(run, weights)
    assert found.moment == LOADING
    assert found.gpu.parameters > 0.5 * 16 * 10**9


@pytest.mark.parametrize(
    ("optim", "numbers"),
    [("sgd", 0), ("adagrad", 1), ("adamw_torch", 2), ("ademamix", 3), ("lion_8bit", 0.25), ("adamw_bnb_8bit", 0.5)],
)
def test_optimizers_keep_their_moments(optim, numbers):
    weights = Weights(10**9, 10**9)
    kept = Memory(run_of("standard", "--optim", optim), weights).gpu
    update = {"adamw_torch": 4 * 10**9, "adagrad": 8 * 10**9}.get(optim, 0)
    assert kept.optimizer == pytest.approx(4 * 10**9 * numbers + update, rel=0.02)


def test_zero_3_fetches_a_whole_layer_of_experts():
    experts = Weights(10**10, 10**10, largest_layer=3 * 10**9)
    run = resolve(["--recipe", "memory_zero3"], here(8, hardware=V100, environment={}, trained_by="nobody"))
    assert Memory(run, experts).gpu.parameters == 2 * 3 * 10**9


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
    found = Memory(run, Weights(total, total))
    gathered = 2 * total if stage == 3 else 0
    bucket = 2 * REDUCE_BUCKET if stage == 3 else 0
    assert found.moment == UPDATE
    assert found.gpu.total - gathered - bucket == pytest.approx(per_parameter * total, rel=0.001)


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
