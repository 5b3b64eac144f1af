"""What optimizers keep and ask for, against real ones, through two updates on this CPU."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from recipes.planner.memory import FP32, Memory
from recipes.planner.trace import weigh
from tests.gpu.memory import cpu_allocations
from tests.recipes.planner.small import run_of

OF_TORCH = ("adamw_torch", "sgd", "adagrad", "rmsprop")
IN_FP32 = ("paged_adamw_32bit", "lion_32bit", "lion_8bit", "adamw_bnb_8bit")


def updated(model, flags: dict, folder) -> tuple[int, int]:
    """Bytes that an optimizer keeps, and the most that its second update had asked for at once.

    With `foreach`, which is torch's choice on a GPU, and which a CPU takes too.
    """
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **flags)
    optimizer = Trainer(model=model, args=args).create_optimizer()
    for group in optimizer.param_groups if flags["optim"] in OF_TORCH else ():
        group["foreach"] = True
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with cpu_allocations() as counted:
        optimizer.step()
    own = {id(value): value for state in optimizer.state.values() for value in state.values()}  # a few are shared
    return sum(value.nbytes for value in own.values() if torch.is_tensor(value) and value.dim()), counted["allocated"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("optim", "more"),
    [
        *((optim, {"weight_decay": 0.1}) for optim in OF_TORCH),
        *((optim, {}) for optim in ("adamw_torch_fused", "adafactor", *IN_FP32)),
        ("sgd", {"optim_args": "momentum=0.9"}),
    ],
)
def test_planned_memory_of_optimizer_states_and_update_is_that_of_the_real_optimizer(optim, more, dtype, tmp_path):
    widths = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, intermediate_size=512, **widths)).to(getattr(torch, dtype))
    flags = {"optim": optim, **more}
    kept, asked = updated(model, flags, tmp_path)
    written = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    weights = weigh(model.config, "causal_lm")
    memory = Memory(run_of("standard", *written, "--dtype", dtype), weights)
    assert memory.optimizer == pytest.approx(kept, rel=0.02, abs=0.02 * weights.trained)
    if optim in IN_FP32:
        assert memory.update == 0  # bitsandbytes' kernel asks for nothing, its stand-in on a CPU does
    elif "optim_args" not in more and (dtype == "float32" or optim not in OF_TORCH):
        one_more = 1.1 * FP32 * weights.largest_parameter if optim == "adafactor" else 0
        assert 0.98 * asked - 4096 <= memory.update <= 1.02 * asked + one_more + 4096
