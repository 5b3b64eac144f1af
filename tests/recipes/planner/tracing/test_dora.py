"""Plans of DoRA: its magnitudes, and what its forward keeps, beside the real model on a CPU."""

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import LlamaConfig, LlamaForCausalLM

from recipes.planner.shapes import Adapters, Case
from recipes.planner.tracing.live_bytes import LiveBytes
from recipes.planner.tracing.trace import trace
from recipes.quiet import silence
from tests.recipes.planner.small import peak, planned
from tests.support.models import load, run_with, save

LENGTH = 128
WIDTHS = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = LlamaConfig(**WIDTHS, vocab_size=260, max_position_embeddings=LENGTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    return save(LlamaForCausalLM(CONFIG), tmp_path_factory.mktemp("model"))


def alive(run, mixed: bool) -> int:
    """The most bytes alive in a forward and backward of the real model, beside what was loaded."""
    with silence():
        model = load(run).train()
    model.config.use_cache = False
    live, ids = LiveBytes(), torch.zeros(2, LENGTH, dtype=torch.long)
    states = [weight.quant_state for weight in model.parameters() if hasattr(weight, "quant_state")]
    live.ignore([*model.parameters(), *model.buffers(), *(part for one in states for part in (one.absmax, one.code))])
    if mixed:
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward))
    if run["gradient_checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with live:
        model(input_ids=ids, labels=ids).loss.backward()
    return peak(live)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])
@pytest.mark.parametrize("four_bits", [False, True], ids=["whole", "4 bits"])
@pytest.mark.parametrize("mixed", [False, True], ids=["fp32", "bf16"])
def test_a_trace_keeps_what_the_real_model_keeps(mixed, four_bits, dropout, checkpointing, folder):
    chosen = {"load_in_4bit": four_bits, "lora_dropout": dropout, "gradient_checkpointing": checkpointing}
    run = run_with(folder, use_peft=True, use_dora=True, max_length=LENGTH, bf16=mixed, **chosen)
    compute = "bfloat16" if mixed else "float32"
    adapters = Adapters(16, dropout=dropout, four_bits=compute if four_bits else None, dora=True)
    case = Case(
        2, LENGTH, autocast="bfloat16" if mixed else None, checkpointing=checkpointing, mask=False,
        adapters=adapters, on_cuda=False, attention="sdpa",
    )  # fmt: skip
    assert max(map(sum, trace(CONFIG, case).moments)) == pytest.approx(alive(run, mixed), rel=0.025)


@pytest.mark.parametrize("flags", [(), ("--load_in_4bit", "true")])
def test_a_plan_of_dora_needs_more_memory_and_time_than_one_of_lora(flags):
    words = ["--use_peft", "true", "--max_length", "64", "--global_batch_size", "4", *flags]
    lora, dora = (
        planned(*words, *more, gpu="L4", gpu_memory=None, recipe="standard") for more in ((), ("--use_dora", "true"))
    )
    assert dora.recipes[0].total_bytes > lora.recipes[0].total_bytes and dora.recipes[0].traced
    assert dora.times["standard"].compute > lora.times["standard"].compute
