"""Attention as it runs on a card: which kernel, and what it keeps."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, BloomConfig, GPT2Config, GptOssConfig, LlamaConfig

from recipes.planner.fits import Estimator
from recipes.planner.shapes import EAGER, MATH, NEVER, Case
from recipes.planner.tracing.kernels import Sdpa, _dropout
from recipes.planner.tracing.live_bytes import LiveBytes
from recipes.planner.tracing.trace import trace
from recipes.run.hardware import Gpu, Hardware
from tests.recipes.planner.small import SMALL, peak, planned, run_of
from tests.recipes.planner.tracing.real import real_peak

_SHAPE = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
GROUPED = LlamaConfig(**_SHAPE)
EAGER_BY_THEMSELVES = {
    "gpt_oss": GptOssConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2),
    "bloom": BloomConfig(vocab_size=500, hidden_size=64, n_layer=2, n_head=4),
}


# --- Which kernel ---------------------------------------------------------------------------------

T4, A100, L4, H100 = (7, 5), (8, 0), (8, 9), (9, 0)
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("card", "dtype", "groups", "masked", "kernel"),
    [
        (A100, BRAIN, 4, False, "flash"),
        (A100, BRAIN, 1, True, "efficient"),
        (A100, FULL, 1, False, "efficient"),
        (A100, FULL, 4, False, MATH),
        (A100, BRAIN, 4, True, MATH),
        (T4, HALF, 1, False, "efficient"),
        (T4, HALF, 1, True, "efficient"),
        (T4, HALF, 4, False, MATH),
        (T4, BRAIN, 1, False, MATH),
        (T4, FULL, 1, True, "efficient"),
        (H100, BRAIN, 4, True, "cudnn"),
    ],
)
def test_which_kernel_runs_depends_on_the_card_the_dtype_the_groups_and_the_mask(card, dtype, groups, masked, kernel):
    query, key = torch.empty(2, 8, 32, 64, dtype=dtype), torch.empty(2, 8 // groups, 32, 64, dtype=dtype)
    mask = torch.ones(2, 1, 32, 32, dtype=torch.bool) if masked else None
    assert Sdpa(card, _dropout).kernel(query, key, key, mask, grouped=groups > 1) == kernel


@pytest.mark.parametrize(
    ("card", "size", "value_size", "kernel"),
    [
        (A100, 256, 256, "flash"),
        (L4, 256, 256, "flash"),
        (L4, 200, 200, "efficient"),
        (A100, 512, 512, "efficient"),
        (A100, 192, 128, "efficient"),
        (A100, 512, 508, MATH),
    ],
)
def test_which_kernel_runs_depends_on_the_size_of_the_heads(card, size, value_size, kernel):
    query, value = (torch.empty(2, 8, 32, width, dtype=BRAIN) for width in (size, value_size))
    assert Sdpa(card, _dropout).kernel(query, query, value) == kernel


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_the_math_kernel_keeps_what_that_of_a_cpu_keeps(groups, causal, dtype):
    def kept(attention):
        query = torch.empty(2, 4, 64, 16, dtype=dtype, requires_grad=True)
        key, value = (torch.empty(2, 4 // groups, 64, 16, dtype=dtype, requires_grad=True) for _ in range(2))
        live = LiveBytes()
        live.ignore([query, key, value])
        with live:
            result = attention(query, key, value)
            return sum(size for size, freed, *_ in live.allocations if freed == NEVER), result

    theirs, _ = kept(
        lambda *tensors: torch.ops.aten._scaled_dot_product_attention_math(
            *tensors, None, 0.0, causal, enable_gqa=groups > 1
        )[0]
    )
    ours, _ = kept(lambda *tensors: Sdpa(T4, _dropout)._math(*tensors, None, 0.0, causal))
    assert ours == theirs


# --- What it keeps --------------------------------------------------------------------------------


def assert_is_as_on_a_cpu(config, case):
    """But that the backward of CUDA's softmax makes one more of the matrices."""
    traced, real = trace(config, case), real_peak(config, case, padding=8)
    assert traced.kernels == {EAGER}
    matrix = case.batch * config.num_attention_heads * case.length**2 * 4
    assert 0.98 * real < peak(traced) < 1.02 * (real + matrix)
    assert peak(trace(config, replace(case, on_cuda=False))) == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize("name", EAGER_BY_THEMSELVES)
def test_models_that_have_no_fused_attention_are_planned_with_their_own(name):
    assert_is_as_on_a_cpu(EAGER_BY_THEMSELVES[name], Case(2, 256))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eager_attention_is_planned_as_what_it_keeps(dtype):
    case = Case(2, 256, attention="eager", dtype=dtype)
    assert_is_as_on_a_cpu(GROUPED, case)
    assert peak(trace(GROUPED, case)) > 1.3 * peak(trace(GROUPED, Case(2, 256, dtype=dtype)))


@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_each_layer_keeps_its_own_copy_of_the_padding_mask(dtype, width):
    layers, batch, length = 2, 2, 256
    padded, packed = (
        trace(LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4}), Case(batch, length, dtype=dtype, mask=mask))
        for mask in (True, False)
    )
    more = peak(padded) - peak(packed)
    assert more == pytest.approx(batch * length * length * layers * width, rel=0.05)


def test_dropout_keeps_a_byte_for_each_element():
    """As native_dropout, which CUDA runs; a CPU keeps a mask in the tensor's own type."""
    with_dropout, without = (
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=500, resid_pdrop=p, embd_pdrop=0, attn_pdrop=0)
        for p in (0.1, 0.0)
    )
    more = peak(trace(with_dropout, Case(2, 256))) - peak(trace(without, Case(2, 256)))
    elements = 2 * 2 * (2 * 256 * 64)  # two in each of two layers
    assert elements * 0.7 <= more <= elements * 1.1
    assert more < 4 * elements


# --- What is said ---------------------------------------------------------------------------------


def test_a_plan_says_which_attention_it_has_planned_if_that_is_not_a_fused_one():
    def said(*argv, config=SMALL["llama"]):
        return " ".join(planned("--max_length", "128", *argv, config=config, recipe="standard").recipes[0].notes)

    assert said() == ""
    assert "eager (as asked for)" in said("--attn_implementation", "eager")
    assert "eager (this model's own)" in said(config=EAGER_BY_THEMSELVES["gpt_oss"])
    assert "math kernel" in said(
        "--fp16", "false", "--bf16", "false", "--packing", "--packing_strategy", "wrapped", config=GROUPED
    )


@pytest.mark.parametrize("recipe", ["standard", "memory", "memory_zero3", "sharded"])
def test_a_card_before_8_0_has_a_fused_kernel_for_fp16_and_none_for_bf16(recipe):
    """DeepSpeed and FSDP cast the weights, autocast what operations take."""
    estimator, card = Estimator(SMALL["gpt2"]), Hardware((Gpu("T4", T4, 16 << 30),), cores=8)
    ran = [
        estimator.traced(run_of(recipe, "--max_length", "64", *flags, hardware=card), 2).kernels
        for flags in (("--fp16", "true"), ("--fp16", "false", "--bf16", "true"))
    ]
    assert ran == [{"efficient"}, {MATH}]


def test_a_configuration_that_names_its_attention_is_planned_with_it(tmp_path):
    GROUPED.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attn_implementation="eager")
    notes = planned("--max_length", "128", config=config, recipe="standard").recipes[0].notes
    assert "eager" in " ".join(notes)


def test_examples_joined_into_one_row_need_a_mask_as_large_as_that_row_unless_a_package_keeps_them_apart():
    def activations(*argv):
        run = run_of("standard", "--max_length", "256", "--padding_free", "true", *argv)
        estimator = Estimator(GROUPED)
        return [peak(estimator.traced(run, micro)) for micro in (4, 8)]

    joined, apart = activations(), activations("--attn_implementation", "flash_attention_2")
    assert joined[1] > 2.3 * joined[0]
    assert apart[1] == pytest.approx(2 * apart[0], rel=0.1)
