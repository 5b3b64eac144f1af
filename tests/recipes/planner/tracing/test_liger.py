"""Liger's kernels, and what a plan says of them and of torch.compile."""

import pytest
from transformers import GPTNeoXConfig, LlamaConfig

from recipes.planner.fits import Estimator
from recipes.planner.shapes import Case
from recipes.planner.tracing.trace import trace
from recipes.run import here, resolve
from recipes.run.hardware import Gpu, Hardware
from tests.recipes.planner.small import peak, planned

_SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = LlamaConfig(**_SHAPE, vocab_size=32_000)
FEW_WORDS = LlamaConfig(**_SHAPE, vocab_size=100)
WITH_LIGER = Hardware((Gpu("A100", (8, 0), 80 << 30),), cores=8, liger=True)


def logits(traced):
    return max(logits for _, logits, _ in traced.moments)


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_the_loss_has_the_logits_of_some_rows_at_a_time(autocast):
    """liger_kernel 0.8.5: as many rows as the width goes into the vocabulary, to a power of 2."""
    plain, fused = (trace(WORDS, Case(4, 256, autocast=autocast, liger=liger)) for liger in (False, True))
    rows = 4  # 1024 rows / (32,000 / 64), and the next power of 2 of 2.05
    cast_head = 64 if autocast else 0  # its transpose is as wide as logits are
    assert logits(fused) == (rows + cast_head) * 32_000 * (2 if autocast else 4)
    assert logits(plain) > 1024 * 32_000 * 4
    gradient = 32_000 * 64 * 4
    assert peak(fused) < 0.6 * peak(plain)
    assert max(made for *_, made in fused.moments) >= gradient


@pytest.mark.parametrize("micro", [1, 5])
def test_the_rows_at_a_time_are_those_of_this_micro_batch_whatever_was_planned_before(micro):
    asked = "--recipe standard --max_length 80 --global_batch_size 40 --use_liger_kernel true".split()
    run = resolve(asked, here(hardware=WITH_LIGER, environment={}, trained_by="nobody", packages=frozenset()))
    planner = Estimator(FEW_WORDS)
    for before in (8, 4, 2):
        planner.traced(run, before)
    traced = trace(FEW_WORDS, Case(micro, 80, autocast="bfloat16", liger=True))
    assert logits(planner.traced(run, micro)) == logits(traced)


def test_before_8_0_the_gradient_of_the_head_is_made_in_fp32_beside_itself():
    old, new = (trace(WORDS, Case(2, 64, autocast="float16", liger=True, capability=card)) for card in ((7, 5), (8, 0)))
    assert peak(old) > peak(new)


@pytest.mark.parametrize(
    ("flags", "config", "said"),
    [
        (("--use_liger_kernel", "true"), WORDS, ""),
        (("--use_liger_kernel", "true"), GPTNeoXConfig(**_SHAPE, vocab_size=500), "the real peak is lower"),
        (("--torch_compile", "true"), WORDS, "torch.compile fuses or computes again is not counted: the real peak"),
        (("--torch_compile_mode", "reduce-overhead"), WORDS, "with CUDA graphs higher"),
    ],
)
def test_a_plan_says_what_it_leaves_out_and_on_which_side_of_it_the_truth_is(flags, config, said):
    (entry,) = planned("--max_length", "64", *flags, config=config, recipe="standard").recipes
    assert said in " ".join(entry.notes) if said else not entry.notes
