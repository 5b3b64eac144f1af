"""`--measure`: the row of timings of a training.

After the training, and without touching its weights, one of its steps is repeated in pairs: with
the exchange of gradients, and on the bare model without. The difference is the exposed
communication time. The step without exchange is what a perfect network would give; what it takes
longer beside other processes than alone is contention.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median, median_low
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from launch.host.world import World
from launch.output import record
from launch.training.step_timing import TimedTrainer, busy_cores
from recipes.run import Json, RunSpec, with_flags
from recipes.run.spec import BATCH_FIELDS
from recipes.scaling.causes import wire_time
from recipes.scaling.timings import PARTS, Timing, append, name_of

T = TypeVar("T")

_FEWEST_PAIRS, _MOST_PAIRS = 3, 6
# The shorter a step, the more a disturbance changes it: as many pairs as fit into a second.
_PAIRS_OF_SHORT_STEPS, _SECONDS_OF_PAIRS = 40, 1.0
_LINK_TRIES = 5
_FEW_BYTES = 8
# Jobs of one training may differ in these: where they write, how long they train and the batch.
_OF_ONE_JOB = {*record.NO_DIFFERENCE, *BATCH_FIELDS, "measure", "recipe", "max_steps", "num_train_epochs"}


@dataclass(frozen=True)
class Repeated:
    """Median seconds of a repeated step: on the bare model, and what the exchange adds."""

    bare: list[float]  # of each process
    exchange: float


def add_timings_row(run: RunSpec, world: World, trainer: TimedTrainer, results: Json) -> Timing | None:
    """The row that was added to the file of `--measure`. All ranks call it.

    None if no step came after the warm-up. Raises `UserError` if the row cannot be added.
    """
    if not trainer.timed_steps:
        return None
    row = _row(run, trainer, results)
    world.decide(lambda: append(run["measure"], [row]))
    return row


def _row(run: RunSpec, trainer: TimedTrainer, results: Json) -> Timing:
    steps = trainer.timed_steps
    everyones = _gathered({part: trainer.timer.seconds[part] / steps for part in PARTS})
    parts: Json = _means(everyones)
    step_time = sum(parts.values())
    _count_writing_once(parts, everyones)
    repeated = _repeated(run, trainer, step_time)
    no_sync: Json = {}
    if repeated:
        parts["communication"] = min(repeated.exchange, parts["backward"])
        parts["backward"] -= parts["communication"]
        optimizer = parts["optimizer"]
        no_sync = {"no_sync_step": median_low(repeated.bare) + optimizer}
        no_sync |= {"no_sync_step_max": max(repeated.bare) + optimizer}
    else:
        del parts["communication"]  # unknown
    overhead = _pass_overhead(run, trainer)
    link = _link(run, trainer)
    tokens = results.get("tokens_per_second")
    return Timing(
        num_processes=run.world_size,
        epoch_time=step_time * steps,
        name=name_of(run),
        epoch=results.get("epoch"),
        samples=steps * run.batch.total,
        accuracy=results.get("eval_accuracy"),
        recipe=run["recipe"],
        global_batch=run.batch.total,
        micro_batch=run.batch.micro,
        accumulation=run.batch.accumulation,
        tokens=round(tokens * results["step_time"] * steps) if tokens else None,
        loss=results.get("eval_loss"),
        step_time=step_time,
        **parts,
        data_wait_max=max(rank["data_wait"] for rank in everyones),
        **no_sync,
        pass_overhead=overhead,
        **_exchange(run, trainer, parts.get("communication"), link),
        **link,
        peak_memory=max(_gathered(results["peak_memory_bytes"])),
        **_setup(run, trainer),
        timed=f"{steps} steps",
        step_p50=max(_gathered(_percentile(trainer.timer.steps, 50))),
        step_p99=max(_gathered(_percentile(trainer.timer.steps, 99))),
        other_load=_other_load(trainer),
        **_slowest(trainer, repeated, [rank["data_wait"] for rank in everyones]),
    )


def _percentile(values: list[float], percent: int) -> float:
    """The smallest value that is at least as large as that many of 100; 0 for none."""
    ordered = sorted(values)
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1] if ordered else 0.0


def _other_load(trainer: TimedTrainer) -> float:
    """Cores that other programs kept busy during the timed steps, on the busiest node."""
    nodes: dict[str, list[tuple[float, float]]] = {}
    for host, busy in _gathered((platform.node(), busy_cores(*trainer.load))):
        nodes.setdefault(host, []).append(busy)
    return max(max(0.0, max(total for total, _ in ranks) - sum(own for _, own in ranks)) for ranks in nodes.values())


def _slowest(trainer: TimedTrainer, repeated: Repeated | None, waits: list[float]) -> Json:
    """The slowest process by its rank, host and device; empty for a single process."""
    places = _gathered((platform.node(), _device_name(trainer.args.device)))
    if len(places) == 1:
        return {}
    found: Json = {"data_wait_rank": waits.index(max(waits)) if max(waits) else None}
    if repeated:
        rank = repeated.bare.index(max(repeated.bare))
        found |= {"slowest_rank": rank, "slowest_host": places[rank][0], "slowest_device": places[rank][1]}
    return found


def _device_name(device: torch.device) -> str:
    return f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _means(everyones: list[dict[str, float]]) -> dict[str, float]:
    return {part: sum(rank[part] for rank in everyones) / len(everyones) for part in PARTS}


def _count_writing_once(parts: dict[str, float], everyones: list[dict[str, float]]) -> None:
    """One process logs and saves; the time that others wait for it is taken out of `other`."""
    for part in ("logging", "saving"):
        longest = max(rank[part] for rank in everyones)
        parts["other"] -= min(parts["other"], longest - parts[part])
        parts[part] = longest


def _setup(run: RunSpec, trainer: TimedTrainer) -> Json:
    return {
        "hardware": str(run.hardware),
        "engine": run.engine.kind,
        "workers": run["dataloader_num_workers"],
        "cores": max(1, run.hardware.cores // run.local_world_size),
        "logging_steps": trainer.state.logging_steps,
        "save_steps": trainer.state.save_steps if run["save_strategy"] == "steps" else None,
        "eval_steps": trainer.state.eval_steps if run["eval_strategy"] == "steps" else None,
        "command": _training_flags(run),
    }


def _training_flags(run: RunSpec) -> str:
    """The flags that make this training what it is at any size: rows with the same are paired."""
    given = {name: setting.value for name, setting in sorted(run.given.items()) if name not in _OF_ONE_JOB}
    flags = {name: json.dumps(value) if isinstance(value, list | dict) else value for name, value in given.items()}
    return shlex.join(with_flags([], flags))


def _exchange(run: RunSpec, trainer: TimedTrainer, communication: float | None, link: Json) -> Json:
    """Empty for a single process: it is asked for exchanges too, and sends nothing."""
    sent = trainer.sent
    if not sent or run.world_size == 1:
        return {}
    overlap = None
    if link and link["link_bandwidth"] and communication is not None:
        overlap = max(0.0, 1 - communication / wire_time(sent.bytes, link["link_bandwidth"], run.world_size))
    return {"overlap": overlap, "syncs": sent.syncs, "collectives": sent.collectives, "sync_bytes": sent.bytes}


def _gathered(value: T) -> list[T]:
    """The value of every process, in the order of their ranks."""
    if not dist.is_initialized():
        return [value]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones


def _repeated(run: RunSpec, trainer: TimedTrainer, step_time: float) -> Repeated | None:
    """None for an engine whose model cannot run without its exchange: ZeRO and FSDP."""
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
    count = min(_MOST_PAIRS, max(_FEWEST_PAIRS, trainer.timed_steps // 4))  # about half of the timed steps' time
    count = max(count, min(_PAIRS_OF_SHORT_STEPS, round(_SECONDS_OF_PAIRS / (2 * step_time))))
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
    return Repeated(alone, max(0.0, median(added)) if len(everyones) > 1 else 0.0)


def _pass_overhead(run: RunSpec, trainer: TimedTrainer) -> float | None:
    """Seconds of a pass that do not depend on its examples, from a micro-batch and half of it.

    None if a micro-batch cannot be halved: a single example, or several joined into one row.
    """
    batches, items = trainer.first_batches
    if run.engine.kind not in ("single", "ddp") or not batches:
        return None
    whole, size = batches[0], run.batch.micro
    if size < 2 or any(len(tensor) != size for tensor in whole.values()):
        return None
    half = {name: tensor[: size // 2] for name, tensor in whole.items()}
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=True)

    def once(batch: dict[str, torch.Tensor]) -> None:
        trainer.training_step(model, dict(batch), items)
        model.zero_grad()

    took = [[_timed(partial(once, batch), trainer.args.device) for batch in (whole, half)] for _ in range(_MOST_PAIRS)]
    long, short = _medians(_gathered(_medians(took)))
    for_each = (long - short) / (size - size // 2)
    return max(0.0, long - size * for_each)


def _medians(rows: list[list[float]]) -> list[float]:
    """The median of each column."""
    return [median(column) for column in zip(*rows, strict=True)]


def _syncs_each(trainer: TimedTrainer) -> bool:
    return bool(trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False))


def _timed(work: Callable[[], object], device: torch.device) -> float:
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


def _link(run: RunSpec, trainer: TimedTrainer) -> Json:
    """The link, timed while nothing else runs; empty if no gradients were exchanged.

    Bus bandwidth as nccl-tests define it (doc/PERFORMANCE.md): S/t x 2(p-1)/p.
    """
    sent, world, device = trainer.sent, run.world_size, trainer.args.device
    if not sent or not sent.syncs or world == 1:
        return {}
    size = sent.bytes // sent.collectives
    large = _all_reduce_time(torch.zeros(max(1, size // 4), device=device))
    small = _all_reduce_time(torch.zeros(_FEW_BYTES // 4, device=device))
    return {"link_bandwidth": size / large * 2 * (world - 1) / world, "link_latency": small}


def _all_reduce_time(tensor: torch.Tensor) -> float:
    """Median seconds, of the slowest process in each try."""
    dist.all_reduce(tensor)  # the first sets up connections
    took = [_timed(partial(dist.all_reduce, tensor), tensor.device) for _ in range(_LINK_TRIES)]
    return median(max(rank) for rank in zip(*_gathered(took), strict=True))
