"""Speed and memory of a recipe on one GPU, beside a hand-written loop.

A step trains 16 sequences of 2048 random tokens. Tokens/s are those of the steps after the warm-up.
MFU counts 6N + 6*layers*hidden*length FLOPs per token (half of the attention matrix, as it is
causal) against the dense bf16 peak of the GPU. Needs torch, transformers and accelerate only.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from typing import Any

from tests.gpu.cases import Figures, Setup

GIB = 2**30
LENGTH, GLOBAL_BATCH, STEPS, VOCABULARY, RATE = 2048, 16, 20, 32_000, 1e-4
SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "0.5B": {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 20, "num_attention_heads": 20},
    "1.2B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 16},
}
# What each case changes of its recipe. All sequences have one length, so none needs packing.
CASES: dict[str, dict[str, Any]] = {
    "loop": {"compiled": False},
    "loop compiled": {"compiled": True},
    "baseline": {"recipe": "baseline"},
    "standard": {"recipe": "standard"},
    "fast": {"recipe": "fast"},
    "fast, no compile": {"recipe": "fast", "torch_compile": False},
    "fast, micro 16": {"recipe": "fast", "per_device_train_batch_size": 16},
    "fast, checkpointing": {"recipe": "fast", "gradient_checkpointing": True},
    "fast, 8-bit Adam": {"recipe": "fast", "optim": "adamw_bnb_8bit"},
}


def model_of(size: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, **SIZES[size])
    return LlamaForCausalLM(config)


def rows(count: int, length: int):
    import torch

    return torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Trained:
    """A trained model, seconds per step after the warm-up, and seconds of all warm-up steps."""

    model: Any
    step_time: float
    warm_up: float
    final_loss: float
    compiled: bool


def run_loop(size: str, steps: int, length: int, compiled: bool) -> Trained:
    """Train with the hand-written loop: plain PyTorch in bf16 autocast."""
    import torch

    from recipes.scaling.timings import WARM_UP_STEPS
    from tests.support.loop import loop_steps

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = model_of(size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    forward = torch.compile(model) if compiled else model
    trained = loop_steps(
        forward,
        rows(GLOBAL_BATCH * (steps + 4), length),
        steps=steps + WARM_UP_STEPS,
        micro=8,
        accumulation=GLOBAL_BATCH // 8,
        learning_rate=RATE,
        bf16=True,
        device=device,
    )
    losses, seconds = zip(*trained, strict=True)
    step_time = statistics.mean(seconds[WARM_UP_STEPS:])
    return Trained(model, step_time, sum(seconds[:WARM_UP_STEPS]), losses[-1], compiled)


def run_recipe(size: str, steps: int, length: int, recipe: str, **changes: Any) -> Trained:

    import recipes
    from launch.training.trainer import RecipeTrainer
    from recipes.run import resolve
    from recipes.scaling.timings import WARM_UP_STEPS

    with tempfile.TemporaryDirectory() as folder:
        own = {"max_steps": steps + WARM_UP_STEPS + 2, "learning_rate": RATE, "save_strategy": "no"}
        order = {"train_sampling_strategy": "sequential", "disable_tqdm": True, "report_to": "none"}
        args = getattr(recipes, recipe)(folder, global_batch_size=GLOBAL_BATCH, **own, **order, **changes)
        clock = _warm_up_clock(WARM_UP_STEPS)
        data = [{"input_ids": row, "labels": row} for row in rows(GLOBAL_BATCH * (steps + 8), length)]
        trainer = RecipeTrainer(
            model=model_of(size),
            args=args,
            train_dataset=data,
            callbacks=[clock],
            run=resolve(settings={"recipe": recipe}),
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Trained(
        trainer.model, trainer.timing.step_time or float("nan"), clock.seconds, losses[-1], args.torch_compile
    )


def _warm_up_clock(steps: int):
    """A callback that measures the `seconds` of the first `steps` steps together."""
    import time

    from transformers import TrainerCallback

    class WarmUpClock(TrainerCallback):
        seconds = float("nan")

        def on_train_begin(self, args, state, control, **kwargs):
            self.began = time.perf_counter()

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == steps:
                self.seconds = time.perf_counter() - self.began

    return WarmUpClock()


def measure(case: str, size: str, setup: Setup) -> Figures:
    """The figures of one case, measured in this process.

    `compile_s`, for a compiled model, is how much longer the warm-up steps took than steady steps.
    """
    import torch

    from launch.training.model import parameter_count
    from launch.training.timing import flops_per_token, peak_memory
    from recipes.run import hardware
    from recipes.scaling.timings import WARM_UP_STEPS

    steps, length = (3, 64) if setup.rehearse else (STEPS, LENGTH)
    trained = (run_loop if case.startswith("loop") else run_recipe)(size, steps, length, **CASES[case])
    tokens = GLOBAL_BATCH * length / trained.step_time
    peak = hardware.read().peak_flops
    figures = {
        "parameters": parameter_count(trained.model),
        "step_ms": trained.step_time * 1000,
        "tokens_per_second": tokens,
        "mfu": tokens * flops_per_token(trained.model, length) / peak if peak else None,
        "allocated_gib": peak_memory()["peak_memory_bytes"] / GIB,
        "final_loss": trained.final_loss,
    }
    if trained.compiled:
        figures["compile_s"] = trained.warm_up - WARM_UP_STEPS * trained.step_time
    if torch.cuda.is_available():
        figures["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return figures
