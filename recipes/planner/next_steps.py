"""What to try if no recipe fits: each step with the memory that it saves and its cost in time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from recipes.errors import UserError
from recipes.planner.estimate import Estimator
from recipes.planner.fits import MARGIN, Usable, at_micro_batch, time_of
from recipes.planner.request import Request
from recipes.planner.speed import host_seconds
from recipes.run import Settings, gpus


@dataclass(frozen=True)
class NextStep:
    """One change to try, at micro-batch 1.

    `words` are the flags to write, for the shell. `seconds` is the time of a step, None if unknown.
    `saves_bytes` counts on each GPU, compared to `standard` without
    the change. `slowdown` says what the change costs in time.
    """

    words: str
    total_bytes: int
    saves_bytes: int
    fits: bool
    host_bytes_per_node: int
    slowdown: str
    seconds: float | None


_CHECKPOINTED = {"gradient_checkpointing": True}
_LORA = {**_CHECKPOINTED, "use_peft": True}
_QLORA = {**_LORA, "load_in_4bit": True}
_HALF_LENGTH = "half of --max_length"
_RECOMPUTED = "a third more compute (two forward passes)"

# In the order to try them: the recipe, the changed flags (None: left out), and the cost.
Step: TypeAlias = tuple[str, Settings, str]
_STEPS: tuple[Step, ...] = (
    ("standard", _CHECKPOINTED, _RECOMPUTED),
    # Hugging Face's guide to training on a single GPU: 10.35 samples/s with 8-bit Adam, 10.09
    # without, on a V100.
    (
        "standard",
        {**_CHECKPOINTED, "optim": "adamw_bnb_8bit"},
        f"{_RECOMPUTED}; 8-bit Adam: not slower where published",
    ),
    ("memory", {"optim": None}, f"{_RECOMPUTED}; Adam on the host: {{host}}"),
    ("memory_zero3", {"optim": None}, f"{_RECOMPUTED}; Adam and parameters on the host: {{host}}"),
    ("standard", _LORA, "none: frozen weights save as much as the second forward pass costs"),
    ("standard", {**_LORA, "dtype": "bfloat16"}, "none; frozen weights in 16 bits"),
    ("sharded", {**_LORA, "dtype": "bfloat16"}, "frozen weights in 16 bits, gathered per micro-batch"),
    ("standard", _QLORA, "weights are unpacked at each use; not measured"),
    ("standard", {**_QLORA, "max_length": _HALF_LENGTH}, "none, but half the context"),
)


def adapters_that_fit(request: Request, estimator: Estimator, usable: Usable) -> Iterator[NextStep]:
    """The first step of `next_steps` that trains adapters on the GPUs alone, and fits."""
    adapters = [step for step in _STEPS if step[1].get("use_peft")]
    fitting = (step for step in next_steps(request, estimator, usable, adapters) if step.fits)
    yield from itertools.islice((step for step in fitting if "--use_peft" in step.words), 1)


def next_steps(
    request: Request, estimator: Estimator, usable: Usable, steps: Sequence[Step] | None = None
) -> Iterator[NextStep]:
    """The steps in the order to try, without those that change nothing or are not legal here."""
    smallest = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": None}
    base = request.run("standard", **smallest)
    last = before = at_micro_batch(base, 1, estimator, usable).total_bytes
    for recipe, changes, slowdown in steps or _STEPS:
        if recipe == "sharded" and base.world_size == 1:  # nothing to share
            continue
        changes = dict(changes)
        if "max_length" in changes:
            changes["max_length"] = max(2, estimator.length(base) // 2)
        try:
            run = request.run(recipe, **smallest, **changes)
            entry = at_micro_batch(run, 1, estimator, usable)
        except UserError:
            continue
        if entry.total_bytes == last:
            continue
        last = entry.total_bytes
        accumulation = run.batch.micro * run.batch.accumulation
        cost = slowdown.format(
            host=f"at least {_seconds(host_seconds(run, estimator.weights(run), accumulation))} per step"
        )
        dropped = [f"without --{name}; " for name, value in changes.items() if value is None and base.explicit(name)]
        yield NextStep(
            words=request.command(recipe, **smallest, **changes),
            total_bytes=last,
            saves_bytes=before - last,
            fits=entry.fits,
            host_bytes_per_node=entry.host_bytes_per_node,
            slowdown="".join(dropped) + cost,
            seconds=time_of(run, estimator, 1, request.mfu, request.bandwidth).total,
        )
    yield from _larger_card(request.command("standard", **smallest), usable, before)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1g} s"


def _larger_card(words: str, usable: Usable, before: int) -> Iterator[NextStep]:
    """The smallest known card with more memory on which `standard` fits as it is."""
    for card in sorted(gpus.CATALOGUE, key=lambda card: card.torch_bytes):
        if card.torch_bytes > usable.gpu and before * (1 + MARGIN) <= card.torch_bytes:
            yield NextStep(f"{words} on {card.name}", before, 0, True, 0, "none", None)
            return
