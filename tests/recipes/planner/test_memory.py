"""What each component of a run takes, against peft, bitsandbytes, sums and real memory."""

import json
from dataclasses import replace

import numpy as np
import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from recipes.planner.fits import Estimator
from recipes.planner.memory import LOADING, NEVER, REDUCE_BUCKET, UPDATE, Adapters, Memory, Traced, Weights
from recipes.planner.trace import weigh
from recipes.run import resolve
from recipes.run.engine import Engine
from recipes.run.files import shipped
from tests.recipes.planner.small import CPU, SHAPE, SMALL, run_of
from tests.support.running import python

EACH = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
LORA = ("--use_peft", "true", "--lora_r", "8")
IN_4_BITS = (*LORA, "--load_in_4bit", "true")


@pytest.fixture
def engine(tmp_path):
    """A file like a shipped YAML, with one thing changed."""

    def written(name, before, after):
        text = shipped(f"{name}.yaml").read_text()
        assert before in text
        file = tmp_path / f"{name}.yaml"
        file.write_text(text.replace(before, after))
        return str(file)

    return written


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_planned_lora_memory_counts_the_parameters_that_peft_makes_trainable(name):
    model = AutoModelForCausalLM.from_config(SMALL[name])
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in model.parameters())
    found = Estimator(SMALL[name]).memory(run_of("standard", *LORA, "--bf16", "true", "--max_length", "64"), 4).gpu
    assert found.parameters == 2 * (total - trained) + 4 * trained  # frozen ones in bfloat16
    assert (found.gradients, found.optimizer) == (4 * trained, 8 * trained)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_planned_memory_of_4_bit_weights_equals_that_of_bitsandbytes(name, tmp_path):
    AutoModelForCausalLM.from_config(SMALL[name]).save_pretrained(tmp_path)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=options, dtype=torch.float32)
    real = sum(parameter.nbytes for parameter in model.parameters())
    weights = weigh(SMALL[name], "causal_lm", Adapters(8, four_bits="bfloat16"))
    found = Memory(run_of("standard", *IN_4_BITS, "--use_bnb_nested_quant", "true"), weights)
    scales = weights.in_4_bits * (1 / 64 + 4 / (64 * 256))
    assert found.parameters - found.optimizer / 2 == pytest.approx(real + scales, rel=1e-3)


@pytest.mark.parametrize("recipe", ["memory_zero3", "sharded"])
def test_loading_unsharded_4_bit_weights_sets_the_planned_peak_with_zero_3_and_fsdp(recipe):
    weights = Weights(16 * 10**9, trained=10**6, in_4_bits=16 * 10**9 - 10**6, largest_layer=10**7)
    found = Memory(run_of(recipe, *IN_4_BITS, world=8, engine=recipe), weights)
    assert found.moment == LOADING
    assert found.gpu.parameters > 0.5 * 16 * 10**9


# --- DeepSpeed ------------------------------------------------------------------------------------


def test_a_plan_for_roberta_counts_only_the_positions_that_the_model_uses():
    config = AutoConfig.for_model("roberta", max_position_embeddings=514)
    assert Estimator(config).length(resolve(settings={"max_length": 1024})) == 512


def test_planned_zero_3_parameter_memory_is_one_whole_mixture_of_experts_layer():
    experts = Weights(10**10, 10**10, largest_layer=3 * 10**9)
    assert Memory(run_of("memory_zero3", world=8), experts).gpu.parameters == 2 * 3 * 10**9


@pytest.mark.parametrize(("stage", "per_parameter"), [(1, 12), (2, 12), (3, 11)])
def test_planned_memory_of_a_zero_optimizer_step_is_that_measured_on_two_ranks(stage, per_parameter):
    """Weights, fp32 copies and moments; a share's gradients, one flat copy, and one in fp32.

    Two ranks of DeepSpeed 0.19.8 on a CPU held 12.0, 12.0 and 11.1 bytes a parameter, ZeRO-3 with a
    bucket of 0.1 among them.
    """
    run = run_of("standard", "--optim", "adamw_torch_fused", "--bf16", "true", world=2, hardware=CPU)
    run = replace(run, engine=Engine("deepspeed", "", zero_stage=stage))
    total = 10**9
    found = Memory(run, Weights(total, total))
    gathered = 2 * total if stage == 3 else 0
    bucket = 2 * REDUCE_BUCKET if stage == 3 else 0
    assert found.moment == UPDATE
    assert found.gpu.total - gathered - bucket == pytest.approx(per_parameter * total, rel=0.001)


@pytest.mark.parametrize(("flags", "copies"), [((), 2), (("--accelerator_config", EACH), 1)], ids=["once", "each"])
def test_gradient_as_bucket_view_doubles_accumulated_gradients_unless_sync_each_batch_is_on(flags, copies):
    run = run_of("standard", "--gradient_as_bucket_view", "true", *flags, world=2)
    found = Memory(run, Weights(10**9, 10**9), accumulation=4).gpu
    assert found.gradients + found.buffers == copies * 4 * 10**9


# --- FSDP2 ----------------------------------------------------------------------------------------

DEEP = LlamaConfig(**{**SHAPE, "num_hidden_layers": 12})


def sharded(*flags, micro=2, world=8, engine="sharded"):
    argv = ["--bf16", "true", "--max_length", "64", *flags]
    return Estimator(DEEP).memory(run_of("sharded", *argv, world=world, engine=engine), micro)


def test_fsdp2_accumulation_holds_unsharded_gradients_unless_sync_each_batch_is_on():
    weights, traced = Weights(10**9, 10**9, largest_layer=10**7), Traced(np.array([(4, NEVER, 1, 0)]), 1)
    flags = ("--bf16", "true"), ("--bf16", "true", "--accelerator_config", '{"split_batches": false}')
    runs = [run_of("sharded", *more, world=8, engine="sharded") for more in flags]
    each, once = (Memory(run, weights, traced, accumulation=4).gpu.gradients for run in runs)
    assert each == 4 * 10**9 / 8
    assert once == pytest.approx(2 * 10**9, rel=0.01)


def test_fsdp_shards_the_planned_memory_of_4_bit_weights_but_not_of_their_scales():
    two, four = (sharded(*IN_4_BITS, world=world, micro=16).parameters for world in (2, 4))
    packed = 12 * (4 * 128 * 128 + 3 * 128 * 256)
    assert two - four > packed * 0.5 / 4
    assert 2 * four - two == packed / 16  # a scale of 4 bytes for each 64 weights, whole on each GPU


def test_fsdp_offload_moves_parameters_gradients_and_optimizer_to_ram(engine):
    found = sharded(engine=engine("sharded", "offload_params: false", "offload_params: true"))
    weights = weigh(DEEP, "causal_lm")
    assert (found.optimizer, found.gpu.gradients) == (0, pytest.approx(0, abs=2 * weights.largest_layer))
    assert found.host_bytes == 16 * weights.total  # parameters, gradients and two moments of all eight GPUs


def test_fsdp_activation_checkpointing_has_the_planned_memory_of_gradient_checkpointing(engine):
    own = engine("sharded", "_version: 2", "_version: 2\n  fsdp_activation_checkpointing: true")
    assert sharded(engine=own).gpu == sharded("--gradient_checkpointing", "true").gpu


# --- The RAM of a node ----------------------------------------------------------------------------

BILLION = 10**9
WHOLE = Weights(BILLION, trained=BILLION, file_width=2)
ADAPTERS = Weights(BILLION, trained=BILLION // 100, file_width=2)
NO_OFFLOAD = ("_device: cpu", "_device: none")
OFFLOAD = ("offload_params: false", "offload_params: true")
HALF = ("--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("recipe", "flags", "weights", "world", "change", "billions"),
    [
        # With DDP each process loads the whole model.
        ("standard", (), WHOLE, 8, None, 8 * 4),
        ("standard", HALF, WHOLE, 8, None, 8 * 2),
        # With ZeRO-3 rank 0 alone reads the files, in their own dtype.
        ("memory_zero3", (), WHOLE, 8, NO_OFFLOAD, 2),
        ("memory_zero3", (), Weights(BILLION, BILLION), 8, NO_OFFLOAD, 4),
        # A node keeps its share, and gathers the whole model for a save.
        ("memory_zero3", (), WHOLE, 8, None, 18 + 2 + 2),
        ("memory_zero3", (), WHOLE, 16, None, (18 + 2) / 2 + 2),
        ("memory_zero3", LORA, ADAPTERS, 8, None, 18 / 100 + 2 + 2 / 100),
        # With ZeRO-2 each process copies the whole model for a save.
        ("memory", (), WHOLE, 8, None, max(8 * 4, 18 + 8 * 2)),
        ("memory", (), WHOLE, 16, None, max(8 * 4, 18 / 2 + 8 * 2)),
        ("memory", (), WHOLE, 8, NO_OFFLOAD, 8 * 4),
        # With FSDP one process reads, but each makes trained weights fp32: memory that nobody has
        # touched takes no RAM, until `.to(torch.float32)` copies it.
        ("sharded", (), WHOLE, 8, None, 4),
        ("sharded", HALF, WHOLE, 8, None, 8 * 4),
        ("sharded", (*HALF, *LORA), ADAPTERS, 8, None, 2 * 0.99 + 8 * 4 * 0.01),
        # With its offload, the gathered model of a save comes when gradients are gone.
        ("sharded", (), WHOLE, 8, OFFLOAD, 4 + 8 + 4),
        ("sharded", (), WHOLE, 16, OFFLOAD, (4 + 8) / 2 + 4),
    ],
)
def test_planned_ram_covers_loading_offload_and_saving(recipe, flags, weights, world, change, billions, engine):
    file = engine(recipe, *change) if change else recipe
    run = run_of(recipe, "--bf16", "true", *flags, world=world, local=8, engine=file)
    assert Memory(run, weights).host_bytes / BILLION == pytest.approx(billions)


# --- Real memory ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_real_steps_of_fsdp_take_as_much_memory_as_planned():
    done = python("-m", "tests.benchmarks.sharded", DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stderr
    for case, (planned, real) in json.loads(done.stdout.splitlines()[-1]).items():
        assert planned == pytest.approx(real, rel=0.07), case
