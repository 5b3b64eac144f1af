"""Stand-ins for kernels of a GPU or of other packages: which runs, and what it keeps."""

from dataclasses import replace

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import BloomConfig, GPT2Config, GPTNeoXConfig, GptOssConfig, LlamaConfig, LlamaForCausalLM

from recipes.planner.fits import Estimator
from recipes.planner.kernels import is_fused
from recipes.planner.memory import EAGER, Adapters, Case
from recipes.planner.trace import trace
from recipes.quiet import silence
from tests.recipes.planner.small import SMALL, alone, peak, real_peak, run_of
from tests.recipes.planner.test_trace import SIZED, of_real_model
from tests.support.models import load, run_with, save

GROUPED = LlamaConfig(**SIZED)
EAGER_BY_THEMSELVES = {
    "gpt_oss": GptOssConfig(**SIZED, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2),
    "bloom": BloomConfig(vocab_size=500, hidden_size=64, n_layer=2, n_head=4),
}
T4, A100, H100 = (7, 5), (8, 0), (9, 0)
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


# --- Attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "dtype", "groups", "masked", "sizes", "fused"),
    [
        (A100, BRAIN, 4, False, (64, 64), True),  # flash
        (A100, BRAIN, 1, True, (64, 64), True),  # efficient
        (A100, FULL, 1, False, (64, 64), True),
        (A100, FULL, 4, False, (64, 64), False),
        (A100, BRAIN, 4, True, (64, 64), False),
        (T4, HALF, 1, True, (64, 64), True),
        (T4, HALF, 4, False, (64, 64), False),
        (T4, BRAIN, 1, False, (64, 64), False),
        (T4, FULL, 1, True, (64, 64), True),
        (H100, BRAIN, 4, True, (64, 64), True),  # cuDNN's
        (A100, BRAIN, 1, False, (512, 512), True),
        (A100, BRAIN, 1, False, (192, 128), True),
        (A100, BRAIN, 1, False, (512, 508), False),
    ],
)
def test_fused_attention_depends_on_gpu_dtype_query_groups_mask_and_head_dim(card, dtype, groups, masked, sizes, fused):
    query = torch.empty(2, 8, 32, sizes[0], dtype=dtype)
    key, value = (torch.empty(2, 8 // groups, 32, size, dtype=dtype) for size in sizes)
    mask = torch.ones(2, 1, 32, 32, dtype=torch.bool) if masked else None
    assert is_fused(card, query, key, value, mask, grouped=groups > 1) == fused


@pytest.mark.parametrize(
    ("config", "case"),
    [
        (EAGER_BY_THEMSELVES["gpt_oss"], Case(2, 256)),
        (EAGER_BY_THEMSELVES["bloom"], Case(2, 256)),
        (GROUPED, Case(2, 256, attention="eager")),
        (GROUPED, Case(2, 256, attention="eager", dtype="bfloat16")),
    ],
)
def test_planned_peak_memory_with_eager_attention_is_that_of_the_real_model(config, case):
    """Except that the backward of CUDA's softmax makes one more attention matrix."""
    traced, real = trace(config, case), of_real_model(config, case)
    assert traced.kernels == {EAGER}
    matrix = case.batch * config.num_attention_heads * case.length**2 * 4
    assert 0.98 * real < peak(traced) < 1.02 * (real + matrix)
    assert peak(trace(config, replace(case, on_cuda=False))) == pytest.approx(real, rel=0.02)


def test_planned_dropout_keeps_a_one_byte_mask_per_element():
    """As native_dropout, which CUDA runs; a CPU keeps a mask in the tensor's own type."""
    with_dropout, without = (
        GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=500, resid_pdrop=p, embd_pdrop=0, attn_pdrop=0)
        for p in (0.1, 0.0)
    )
    more = peak(trace(with_dropout, Case(2, 256))) - peak(trace(without, Case(2, 256)))
    elements = 2 * 2 * (2 * 256 * 64)  # two in each of two layers
    assert elements * 0.7 <= more <= elements * 1.1


# --- Liger's --------------------------------------------------------------------------------------

_WIDTHS = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = LlamaConfig(**_WIDTHS, vocab_size=32_000)


def logits(traced):
    return traced.moments[:, 1].max()


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_ligers_fused_loss_is_planned_with_the_logits_of_a_few_tokens_at_a_time(autocast):
    """liger_kernel 0.8.5: as many rows as the width goes into the vocabulary, to a power of 2."""
    plain, fused = (trace(WORDS, Case(4, 256, autocast=autocast, liger=liger)) for liger in (False, True))
    rows = 4  # 1024 rows / (32,000 / 64), and the next power of 2 of 2.05
    cast_head = 64 if autocast else 0  # its transpose is as wide as logits are
    assert logits(fused) == (rows + cast_head) * 32_000 * (2 if autocast else 4)
    assert logits(plain) > 1024 * 32_000 * 4
    assert peak(fused) < 0.7 * peak(plain)
    assert fused.moments[:, 2].max() >= 32_000 * 64 * 4  # the gradient of the head


def test_ligers_fused_loss_is_planned_only_if_the_flags_and_the_model_use_it():
    estimator = Estimator(WORDS)
    with_liger = ("--use_liger_kernel", "true")
    off = ("--liger_kernel_config", '{"fused_linear_cross_entropy": false}')
    asked = [(), with_liger, (*with_liger, *off), (*with_liger, "--label_smoothing_factor", "0.1")]
    assert [estimator.liger(run_of("standard", *flags)) for flags in asked] == [False, True, False, False]
    assert not Estimator(GPTNeoXConfig(**_WIDTHS)).liger(run_of("standard", *with_liger))


def test_liger_takes_more_planned_memory_on_gpus_below_compute_capability_8_0():
    old, new = (trace(WORDS, Case(2, 64, autocast="float16", liger=True, capability=card)) for card in (T4, A100))
    assert peak(old) > peak(new)


# --- Adapters, and weights in 4 bits --------------------------------------------------------------

ADAPTED = LlamaConfig(
    hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4, vocab_size=260,
    max_position_embeddings=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    return save(LlamaForCausalLM(ADAPTED), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("mixed", "four_bits", "dora", "dropout", "checkpointing"),
    [(False, True, False, 0.1, False), (True, True, False, 0.0, True), (True, False, True, 0.1, False)],
)
def test_traced_peak_memory_with_lora_is_that_of_the_real_model(mixed, four_bits, dora, dropout, checkpointing, folder):
    chosen = {"load_in_4bit": four_bits, "lora_dropout": dropout, "gradient_checkpointing": checkpointing}
    run = run_with(folder, use_peft=True, use_dora=dora, max_length=128, bf16=mixed, **chosen)
    with silence():
        model = load(run).train()
    model.config.use_cache = False
    states = [weight.quant_state for weight in model.parameters() if hasattr(weight, "quant_state")]
    if mixed:
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.zeros(2, 128, dtype=torch.long)
    scales = [part for one in states for part in (one.absmax, one.code)]
    real = real_peak(model, lambda: model(input_ids=ids, labels=ids).loss.backward(), *scales)
    compute = "bfloat16" if mixed else "float32"
    adapters = Adapters(16, dropout=dropout, four_bits=compute if four_bits else None, dora=dora)
    how = {"autocast": "bfloat16" if mixed else None, "checkpointing": checkpointing, "adapters": adapters}
    case = Case(2, 128, mask=False, on_cuda=False, attention="sdpa", **how)
    assert peak(trace(ADAPTED, case)) == pytest.approx(real, rel=0.025)


# --- What a plan says of them ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "config", "said"),
    [
        ("", SMALL["llama"], ""),
        ("--attn_implementation eager", SMALL["llama"], "eager (as requested)"),
        ("", EAGER_BY_THEMSELVES["gpt_oss"], "eager (this model's default)"),
        ("--fp16 false --bf16 false --packing --packing_strategy wrapped", GROUPED, "math kernel"),
        ("--use_liger_kernel true", SMALL["gpt2"], "Liger's kernels are not counted: the real peak is lower"),
        ("--label_smoothing_factor 0.1", WORDS, "label smoothing makes from the logits are not counted"),
        ("--torch_compile true", WORDS, "torch.compile are not counted: the real peak is lower"),
    ],
)
def test_the_notes_of_a_plan_name_memory_that_is_not_counted_and_attention_that_is_not_fused(flags, config, said):
    notes = " ".join(alone("--max_length", "64", *flags.split(), config=config).notes)
    assert said in notes if said else not notes
