"""`--measure`: one row of timings from a training that was measured, and from what its processes do alone.

After the training, and without touching its weights, one of its steps is repeated in pairs: with the exchange of
gradients, and on the bare model without. The difference is what a step waits for the exchange; the bare step is the
ceiling that no network can lift, and what it takes longer beside others than alone is contention.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist

from launch.host.world import World
from launch.training.timeline import MeasuredTrainer
from recipes.run import RunSpec
from recipes.scaling.timings import PARTS, Timing, append, name_of

_FEWEST_PAIRS, _MOST_PAIRS = 3, 6
_LINK_TRIES = 5
_FEW_BYTES = 8


@dataclass(frozen=True)
class Ceiling:
    """Medians in seconds: of the slowest and the median process without exchange, and of what the exchange adds."""

    no_sync: float
    no_sync_max: float
    communication: float


def add_timing(
    run: RunSpec, world: World, trainer: MeasuredTrainer, results: dict[str, Any], argv: list[str]
) -> Timing | None:
    """The row that was added to the file of `--measure`; None where no step came after the warm-up. All ranks call it.

    Raises `UserError` where it cannot be added.
    """
    if not trainer.steps_measured:
        return None
    timing = _measured(run, trainer, results, argv)
    world.decide(lambda: append(run["measure"], [timing]))
    return timing


def _measured(run: RunSpec, trainer: MeasuredTrainer, results: dict[str, Any], argv: list[str]) -> Timing:
    steps = trainer.steps_measured
    mine = {part: trainer.timeline.seconds[part] / steps for part in PARTS}
    everyones = _gathered(mine)
    parts = {part: sum(rank[part] for rank in everyones) / len(everyones) for part in PARTS}
    step_time = sum(parts.values())
    for part in ("logging", "saving"):  # one process does it, and the others wait elsewhere
        longest = max(rank[part] for rank in everyones)
        parts["other"] -= min(parts["other"], longest - parts[part])
        parts[part] = longest
    ceiling = _ceiling(run, trainer)
    exchanges = trainer.exchanges
    row: dict[str, Any] = {"pass_overhead": _pass_overhead(run, trainer)}
    if ceiling:
        waited = min(ceiling.communication, parts["backward"])
        row |= {"communication": waited, "backward": parts["backward"] - waited}
        row |= {"no_sync_step": ceiling.no_sync + parts["optimizer"]}
        row |= {"no_sync_step_max": ceiling.no_sync_max + parts["optimizer"]}
    else:
        del parts["communication"]
    if exchanges and exchanges.syncs and run.world_size > 1:
        bandwidth, latency = _link(exchanges.bytes // exchanges.collectives, trainer.args.device)
        row |= {"link_bandwidth": bandwidth, "link_latency": latency}
        alone = 2 * (run.world_size - 1) / run.world_size * exchanges.bytes / bandwidth
        if ceiling:
            row["overlap"] = max(0.0, 1 - row["communication"] / alone)
    if exchanges and run.world_size > 1:  # a single process is asked for exchanges too, and sends nothing
        row |= {"syncs": exchanges.syncs, "collectives": exchanges.collectives, "sync_bytes": exchanges.bytes}
    tokens = results.get("tokens_per_second")
    return Timing(
        num_processes=run.world_size,
        epoch_time=step_time * steps,
        name=name_of(run),
        epoch=results.get("epoch"),
        samples=steps * run.batch.total,
        accuracy=results.get("eval_accuracy"),
        recipe=run.recipe.name,
        global_batch=run.batch.total,
        micro_batch=run.batch.micro,
        accumulation=run.batch.accumulation,
        tokens=round(tokens * results["step_time"] * steps) if tokens else None,
        loss=results.get("eval_loss"),
        step_time=step_time,
        data_wait_max=max(rank["data_wait"] for rank in everyones),
        peak_memory=max(_gathered(results["peak_memory_bytes"])),
        hardware=str(run.hardware),
        engine=run.engine.kind,
        workers=run["dataloader_num_workers"],
        cores=max(1, run.hardware.cores // run.local_world_size),
        logging_steps=trainer.state.logging_steps,
        save_steps=trainer.state.save_steps if run["save_strategy"] == "steps" else None,
        eval_steps=trainer.state.eval_steps if run["eval_strategy"] == "steps" else None,
        command=shlex.join(argv),
        **{**parts, **row},
    )


def _gathered(value: Any) -> list[Any]:
    """The value of every process, in the order of their ranks."""
    if not dist.is_initialized():
        return [value]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def _ceiling(run: RunSpec, trainer: MeasuredTrainer) -> Ceiling | None:
    """None where an engine's own model cannot run without its exchange: ZeRO and FSDP."""
    batches, items = trainer.first_batches
    if run.engine.kind not in ("single", "ddp") or not batches:
        return None
    wrapped = trainer.model_wrapped
    bare = getattr(wrapped, "module", wrapped)

    def step(exchanges: bool) -> None:
        for number, batch in enumerate(batches, 1):
            last = number == len(batches) or _syncs_each(trainer)
            trainer.accelerator.gradient_state._set_sync_gradients(number == len(batches))
            trainer.training_step(wrapped if exchanges and last else bare, dict(batch), items)
        wrapped.zero_grad()

    pairs = []
    count = min(_MOST_PAIRS, max(_FEWEST_PAIRS, trainer.steps_measured // 4))  # about half of the measured time
    for number in range(count):
        order = (True, False) if number % 2 else (False, True)
        took = {exchanges: _timed(partial(step, exchanges), trainer.args.device) for exchanges in order}
        pairs.append(took)
    everyones = _gathered(pairs)
    alone = [median(pair[False] for pair in rank) for rank in everyones]
    added = [
        max(rank[number][True] for rank in everyones) - max(rank[number][False] for rank in everyones)
        for number in range(count)
    ]
    return Ceiling(median_low(alone), max(alone), max(0.0, median(added)) if len(everyones) > 1 else 0.0)


def _pass_overhead(run: RunSpec, trainer: MeasuredTrainer) -> float | None:
    """Seconds of a pass that do not depend on its examples, from passes over a micro-batch and over half of it.

    None where half of one cannot be had: a single example, or several joined into one row.
    """
    batches, items = trainer.first_batches
    if run.engine.kind not in ("single", "ddp") or not batches:
        return None
    whole, size = batches[0], run.batch.micro
    if size < 2 or any(len(tensor) != size for tensor in whole.values()):
        return None
    half = {name: tensor[: size // 2] for name, tensor in whole.items()}
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=True)

    def once(batch: dict[str, Any]) -> None:
        trainer.training_step(model, dict(batch), items)
        model.zero_grad()

    took = [[_timed(partial(once, batch), trainer.args.device) for batch in (whole, half)] for _ in range(_MOST_PAIRS)]
    long, short = _medians(_gathered(_medians(took)))
    for_each = (long - short) / (size - size // 2)
    return max(0.0, long - size * for_each)


def _medians(rows: list[list[float]]) -> list[float]:
    """Of each column."""
    return [median(column) for column in zip(*rows, strict=True)]


def _syncs_each(trainer: MeasuredTrainer) -> bool:
    return bool(trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False))


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of `work`, which all processes begin together."""
    if dist.is_initialized():
        dist.barrier()
    _finish(device)
    started = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _link(size: int, device: torch.device) -> tuple[float, float]:
    """Bus bandwidth in bytes/s of an all-reduce of `size` bytes, and seconds of one of a few; nothing else runs.

    Bus bandwidth as nccl-tests define it (doc/PERFORMANCE.md): S/t x 2(p-1)/p.
    """
    world = dist.get_world_size()
    large = torch.zeros(max(1, size // 4), device=device)
    small = torch.zeros(_FEW_BYTES // 4, device=device)
    times = {}
    for tensor in (small, large):
        dist.all_reduce(tensor)
        took = [_timed(partial(dist.all_reduce, tensor), device) for _ in range(_LINK_TRIES)]
        times[id(tensor)] = median(max(rank) for rank in zip(*_gathered(took), strict=True))
    return size / times[id(large)] * 2 * (world - 1) / world, times[id(small)]
