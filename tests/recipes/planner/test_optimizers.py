"""What optimizers keep and ask for, against real ones, through two updates on this CPU."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from recipes.planner.footprint import Memory, optimizer_bytes_per_parameter, requests_of_update
from recipes.planner.shapes import Weights
from recipes.planner.tracing.trace import weigh
from recipes.run.hardware import Hardware
from tests.recipes.planner.small import run_of

OF_TORCH = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
OPTIMIZERS = (*OF_TORCH, "adafactor", "adamw_bnb_8bit", "paged_adamw_32bit", "lion_32bit", "lion_8bit")
# The embedding is the largest parameter in the first, a layer's matrix in the second.
SHAPES = {"embedding": (1200, 128), "layers": (64, 512)}


def model_of(shape: str, dtype: torch.dtype) -> LlamaForCausalLM:
    words, inner = SHAPES[shape]
    widths = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(vocab_size=words, intermediate_size=inner, **widths)).to(dtype)


def updated(model, flags: dict, folder, foreach: bool = False) -> tuple[int, int]:
    """Bytes that an optimizer keeps, and the most that its second update had asked for at once."""
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **flags)
    optimizer = Trainer(model=model, args=args).create_optimizer()
    for group in optimizer.param_groups if foreach else ():
        group["foreach"] = True
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        optimizer.step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    own = {id(value): value for state in optimizer.state.values() for value in state.values()}  # a few are shared
    return sum(value.nbytes for value in own.values() if torch.is_tensor(value) and value.dim()), most


def run_with(flags: dict, dtype: torch.dtype, **settings):
    written = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return run_of("standard", *written, "--dtype", str(dtype).removeprefix("torch."), **settings)


@pytest.mark.parametrize(("dtype", "decay"), [(torch.float32, 0.0), (torch.float32, 0.1), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_an_update_on_a_cpu_takes_what_is_planned(optim, shape, dtype, decay, tmp_path):
    model, flags = model_of(shape, dtype), {"optim": optim, "weight_decay": decay}
    weights, run = weigh(model.config, "causal_lm"), run_with(flags, dtype, hardware=Hardware(cores=2))
    kept, asked = updated(model, flags, tmp_path)
    memory = Memory(run, weights)
    assert memory.optimizer == pytest.approx(kept, rel=0.02, abs=0.02 * weights.trained)
    size = dtype.itemsize * max(size for size, _ in weights.matrices)
    planned = memory.update
    assert 0.98 * asked - 4096 <= planned <= asked + 1.1 * size


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adagrad", "rmsprop"])
def test_torchs_optimizers_update_all_parameters_at_once_on_a_gpu(optim, decay, tmp_path):
    """With `foreach`, which is torch's choice there, and which a CPU takes too."""
    model, flags = model_of("layers", torch.float32), {"optim": optim, "weight_decay": decay}
    _, asked = updated(model, flags, tmp_path, foreach=True)
    assert Memory(run_with(flags, torch.float32), weigh(model.config, "causal_lm")).update == pytest.approx(
        asked, rel=0.02, abs=4096
    )


@pytest.mark.parametrize(
    ("optim", "arguments", "numbers"),
    [
        ("sgd", "momentum=0.9", 1),
        ("sgd", "momentum=0.0", 0),
        ("rmsprop", "momentum=0.9,centered=True", 3),
        ("adagrad", "eps=1e-8", 1),
    ],
)
def test_arguments_that_ask_for_more_state_are_counted(optim, arguments, numbers, tmp_path):
    model, flags = model_of("layers", torch.float32), {"optim": optim, "optim_args": arguments}
    kept, _ = updated(model, flags, tmp_path)
    run = run_with(flags, torch.float32)
    assert optimizer_bytes_per_parameter(run) == 4 * numbers
    assert kept == 4 * numbers * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_32bit", "adamw_torch_fused"])
def test_a_fused_kernel_asks_for_nothing(optim):
    asked = requests_of_update(run_of("standard", "--optim", optim), Weights(10**9, 10**9), 4)
    assert sum(map(sum, asked)) == 0


def test_adafactor_updates_one_parameter_after_the_other_on_a_gpu_too():
    weights = Weights(100, 100, matrices=((40, True), (30, False), (30, False)))
    run = run_of("standard", "--optim", "adafactor")
    assert requests_of_update(run, weights, 4) == [[160, 160, 120], [120, 120, 120]]
