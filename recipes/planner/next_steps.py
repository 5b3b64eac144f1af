"""What to try if no recipe fits: each step with the memory that it saves and its cost in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from recipes.errors import UserError
from recipes.planner.estimate import Estimator
from recipes.planner.fits import (
    Planned,
    Usable,
    any_if_it_fits,
    at_any_micro_batch,
    at_micro_batch,
    divisors,
    if_it_fits,
    largest_that_fits,
    time_of,
)
from recipes.planner.request import Request
from recipes.planner.speed import host_seconds
from recipes.run import RunSpec, Settings, known_gpus
from recipes.run.hardware import Gpu
from recipes.run.spec import BATCH_FIELDS


@dataclass(frozen=True)
class NextStep:
    """One change to try.

    `words` is the whole command, for the shell. `seconds` is the time of a step, None if unknown.
    `fits_gpu` is about the GPU alone, `fits` about the RAM of a node too.
    `saves_bytes` counts on each GPU, `saves_host_bytes` in the RAM of each node, both compared to
    the plan's row of what was asked for; below 0 if the step needs more. `slowdown` says what the
    change costs in time. `adapters`: the step trains them and not all weights. `install` is a
    package that it needs and that is not here, None without one. `card` is the name of another GPU,
    if that is the change.
    """

    words: str
    total_bytes: int
    saves_bytes: int
    fits: bool
    fits_gpu: bool
    host_bytes_per_node: int
    saves_host_bytes: int
    slowdown: str
    seconds: float | None
    adapters: bool
    install: str | None = None
    card: str | None = None


_SMALLEST: Settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": None}
_CHECKPOINTED = {"gradient_checkpointing": True}
_LORA = {**_CHECKPOINTED, "use_peft": True}
_QLORA = {**_LORA, "load_in_4bit": True}
_HALF_LENGTH = "half of --max_length"
_IN_16_BITS = "bfloat16, or float16 on a card without it"
_RECOMPUTED = "a third more compute (two forward passes)"
_FUSED = "Liger's loss makes the logits of a few tokens at a time"
_SHARED = "parameters are gathered, and gradients scattered, in every micro-batch"

# In the order to try them: the recipe, the changed flags (None: left out), and the cost.
Step: TypeAlias = tuple[str, Settings, str]
_STEPS: tuple[Step, ...] = (
    ("sharded", {}, _SHARED),
    ("standard", _CHECKPOINTED, _RECOMPUTED),
    ("sharded", _CHECKPOINTED, f"{_RECOMPUTED}; {_SHARED}"),
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
    ("standard", {**_LORA, "dtype": _IN_16_BITS}, "none; frozen weights in 16 bits"),
    ("sharded", {**_LORA, "dtype": _IN_16_BITS}, "frozen weights in 16 bits, gathered per micro-batch"),
    ("standard", _QLORA, "weights are unpacked at each use; not measured"),
    ("standard", {**_QLORA, "max_length": _HALF_LENGTH}, "none, but half the context"),
)


def without_offload(
    request: Request, asked: RunSpec, row: Planned, estimator: Estimator, usable: Usable
) -> list[NextStep]:
    """The first step that fits on the GPUs alone, and the first that trains adapters there, if the
    run does not yet. One that needs another package only if no other fits.
    """
    found: dict[bool, NextStep] = {}
    others: dict[bool, NextStep] = {}
    for run, step in _changed(request, asked, row, estimator, usable, _STEPS, any_if_it_fits):
        if run.engine.offload_optimizer == "none" and run["max_length"] == asked["max_length"]:
            (others if step.install else found).setdefault(step.adapters, step)
        if step.adapters in found and (step.adapters or asked["use_peft"]):
            break
    return [step for _, step in sorted({**others, **found}.items())]


def smaller_micro_batch(
    request: Request, runs: Sequence[RunSpec], estimator: Estimator, usable: Usable
) -> list[NextStep]:
    """The fastest of these runs at the largest micro-batch that fits, below the user's own."""
    found = []
    for asked in runs:
        for micro in divisors(asked.batch.micro * asked.batch.accumulation):
            if micro >= asked.batch.micro:
                continue
            changes = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": None}
            try:
                run = request.run(asked["recipe"], **changes)
                entry = if_it_fits(run, micro, estimator, usable)
            except UserError:
                continue
            if entry:
                before = at_micro_batch(asked, asked.batch.micro, estimator, usable)
                words = request.command(asked["recipe"], **changes)
                cost = f"none if {micro} still keep the GPU busy: {entry.accumulation} of them are accumulated"
                found.append(_step(words, entry, before, cost, run, request, estimator))
                break
    return sorted(found, key=lambda step: step.seconds or 0)[:1]


def smaller_evaluation(
    request: Request, runs: Sequence[RunSpec], planned: Sequence[Planned], estimator: Estimator, usable: Usable
) -> list[NextStep]:
    """The first of these runs with an evaluation that fits, below the user's own."""
    for asked, before in zip(runs, planned, strict=True):
        if before.evaluation_batch is None:
            continue
        changes: Settings = {**before.flags, "per_device_eval_batch_size": before.evaluation_batch}
        run = request.run(asked["recipe"], **changes)
        entry = largest_that_fits(run, estimator, usable)
        batch = {"per_device_train_batch_size": entry.micro_batch, "gradient_accumulation_steps": None}
        words = request.command(asked["recipe"], **{**changes, **batch})
        return [_step(words, entry, before, "none: only evaluations get smaller", run, request, estimator)]
    return []


def next_steps(
    request: Request, asked: RunSpec, row: Planned, estimator: Estimator, usable: Usable
) -> Iterator[NextStep]:
    """The steps in the order to try that need less than `row`, the plan of the run `asked`.

    No run comes twice. If the GPU has room, only what needs less RAM of the node is a step.
    """
    seen = [_decisive(asked, row.micro_batch)]
    for run, step in _changed(request, asked, row, estimator, usable, _STEPS, at_any_micro_batch):
        saved = step.saves_host_bytes if row.fits_gpu else step.saves_bytes
        decisive = _decisive(run, run.batch.micro)
        if saved > 0 and decisive not in seen:
            seen.append(decisive)
            yield step
    if not row.fits_gpu:
        yield from _larger_card(request, estimator, usable, row)


def _decisive(run: RunSpec, micro: int) -> tuple[object, ...]:
    """What decides a run's memory and training: equal for two spellings of one run."""
    words = (*BATCH_FIELDS, "recipe", "output_dir", "run_name", "logging_dir")
    settings = {name: value for name, value in run.items() if name not in words}
    return replace(run.engine, source=""), micro, run.batch.total, settings


def _changed(
    request: Request,
    asked: RunSpec,
    row: Planned,
    estimator: Estimator,
    usable: Usable,
    steps: Sequence[Step],
    planned: Callable[[RunSpec, Estimator, Usable], Planned | None],
) -> Iterator[tuple[RunSpec, NextStep]]:
    """The runs with each change at micro-batch 1, and their steps at the largest that fits, each
    with Liger's kernels too if only the logits are too much.

    Without those that are not legal here, or not `planned`. An Accelerate YAML of the user's holds
    for `standard`; a step to another recipe leaves it out.
    """
    examples = row.micro_batch * row.accumulation
    smaller = f"none if 1 still keeps the GPU busy: {examples} of them are accumulated" if row.micro_batch > 1 else ""
    for recipe, changes, slowdown in ((asked["recipe"], {}, smaller), *steps):
        if recipe == "sharded" and asked.world_size == 1:  # nothing to share
            continue
        if "dtype" in changes and asked["load_in_4bit"]:  # frozen weights have 4 bits already
            continue
        if "dtype" in changes:
            changes = {**changes, "dtype": "bfloat16" if request.card.capability >= (8, 0) else "float16"}
        if "max_length" in changes:
            changes = {**changes, "max_length": max(2, estimator.length(asked) // 2)}
        leaves_yaml_out = request.accelerate_config and recipe not in ("standard", asked["recipe"])
        here = replace(request, accelerate_config=None) if leaves_yaml_out else request
        fused = f"{slowdown}; {_FUSED}" if slowdown else f"none: {_FUSED}"
        for more, cost in ((changes, slowdown), ({**changes, "use_liger_kernel": True}, fused)):
            try:
                run = here.run(recipe, **_SMALLEST, **more)
                if more != changes and not estimator.has_liger(run):
                    break
                entry = planned(run, estimator, usable)
            except UserError:
                break
            if entry is None:
                continue
            dropped = [name for name, value in changes.items() if value is None and asked.explicit(name)]
            dropped += ["accelerate_config"] if leaves_yaml_out else []
            cost = "".join(f"without --{name}; " for name in dropped) + cost
            missing = "liger-kernel" if more != changes and not run.hardware.liger else None
            cost += f"; pip install {missing}" if missing else ""
            batch = {**_SMALLEST, "per_device_train_batch_size": entry.micro_batch}
            words = here.command(recipe, **batch, **more)
            yield run, replace(_step(words, entry, row, cost, run, request, estimator), install=missing)
            without_logits = entry.total_bytes - entry.components.logits
            if entry.fits_gpu or without_logits > usable.gpu or run["use_liger_kernel"]:
                break


def _step(
    words: str, entry: Planned, before: Planned, slowdown: str, run: RunSpec, request: Request, estimator: Estimator
) -> NextStep:
    host = host_seconds(run, estimator.weights(run), entry.accumulation)
    return NextStep(
        words=words,
        total_bytes=entry.total_bytes,
        saves_bytes=before.total_bytes - entry.total_bytes,
        fits=entry.fits,
        fits_gpu=entry.fits_gpu,
        host_bytes_per_node=entry.host_bytes_per_node,
        saves_host_bytes=before.host_bytes_per_node - entry.host_bytes_per_node,
        slowdown=slowdown.format(host=f"at least {_seconds(host)} per step"),
        seconds=time_of(run, estimator, entry.micro_batch, request.mfu, request.bandwidth).total,
        adapters=run["use_peft"],
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1g} s"


def _larger_card(request: Request, estimator: Estimator, usable: Usable, before: Planned) -> Iterator[NextStep]:
    """The smallest known card of the same kind with more memory, on which `standard` fits.

    Cards for workstations and for data centres have other hosts; one without bf16 is another kind.
    """
    for card in sorted(known_gpus.CATALOGUE, key=lambda card: card.torch_bytes):
        if card.torch_bytes <= usable.gpu or not _alike(card, request.card):
            continue
        there = replace(request, card=Gpu(card.name, card.capability, card.torch_bytes))
        try:
            run = there.run("standard", **_SMALLEST)
        except UserError:
            continue
        if entry := if_it_fits(run, 1, estimator, Usable(card.torch_bytes, usable.host)):
            words = f"{there.command('standard', **_SMALLEST)} # on {card.name}"
            yield replace(_step(words, entry, before, "none", run, there, estimator), card=card.name)
            return


def _alike(card: known_gpus.KnownGpu, own: Gpu) -> bool:
    known = any(own.name == other.name for other in known_gpus.CATALOGUE)
    same_host = not known or card.name.startswith("RTX") == own.name.startswith("RTX")
    return same_host and (card.capability >= (8, 0) or own.capability < (8, 0))
