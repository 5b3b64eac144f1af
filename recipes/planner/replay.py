"""What a training asks torch's allocator for, in order: to replay it, with and without a limit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from recipes.planner.footprint import (
    REDUCE_BUCKET,
    bytes_in_4_bits,
    frozen_bytes,
    optimizer_bytes_per_parameter,
    shards,
    trained_bytes,
    update_bytes,
    weight_bytes,
)
from recipes.planner.libraries.allocator import MIB, ROUND_LARGE, Allocator, Block, OutOfMemory
from recipes.planner.libraries.optimizers import FP32, requests_of_update
from recipes.planner.shapes import IN_4_BITS, TRAINED, Components, Traced, Weights
from recipes.run import RunSpec

_DDP_BUCKET = 25 * MIB  # bucket_cap_mb of torch.nn.parallel.DistributedDataParallel
# A trace is up to 0.7 % off what a card allocates (python -m tests.benchmarks.reserved). Below
# _IN_DOUBT bytes, the segment of a request is rounded up by more than that anyway.
_UNCERTAIN = 0.01
_IN_DOUBT = ROUND_LARGE / 2 / _UNCERTAIN


def workspace_bytes(capability: tuple[int, int]) -> int:
    """What torch allocates for each cuBLAS handle, if the user's environment does not say.

    parseChosenWorkspaceSize of ATen/cuda/CublasHandlePool.cpp. A handle belongs to a thread, and
    autograd's backward runs in one of its own.
    """
    return 32 * MIB if capability[0] in (9, 10, 12) else 8 * MIB + 128 * 1024


@dataclass(frozen=True)
class Steps:
    """What is replayed: micro-batches of steps, and a batch of an evaluation, None without one.

    `shorter` are micro-batches of fewer tokens that come before, if lengths vary.
    """

    micro_batch: Traced
    accumulation: int
    evaluation: Traced | None = None
    shorter: tuple[Traced, ...] = ()


def with_cached(
    run: RunSpec,
    weights: Weights,
    steps: Steps,
    needed: Components,
    limit: int,
    expandable: bool = False,
) -> tuple[Components, int]:
    """`needed` with cuBLAS's workspaces, and with what torch reserves beside its allocations.

    If that is above `limit`, it is what is reserved under this limit: torch then gives back what it
    has cached, and asks again. If that fails too, it is what is reserved without a limit.

    Second, the total that the process may come to take under this limit if lengths vary: pieces of
    shorter batches are too small for longer ones. If they do not run under it, they set the first.
    """
    if not run.hardware.cuda:
        return needed, needed.total
    workspaces = 2 * workspace_bytes(run.hardware.capability)
    states = replace(needed, buffers=needed.buffers + workspaces)
    if not steps.micro_batch.allocations:
        return states, states.total
    # In one piece, states count as if they were at their fullest all the time.
    equal = requests_of(run, weights, replace(steps, shorter=()), states)
    more = equal.peak() - states.allocated if _is_sharded(run) else 0
    torchs = limit - states.context + more if states.total <= limit else None
    reserved = _reserved(equal, torchs, expandable)
    varied = reserved
    if steps.shorter:
        requests = requests_of(run, weights, steps, states)
        varied = _reserved(requests, torchs, expandable)
        if torchs is not None and varied > torchs:
            reserved = varied
    cached = max(0, reserved - more - states.allocated)
    return replace(states, cached=cached), max(states.total + cached, varied - more + states.context)


def _reserved(requests: Requests, limit: int | None, expandable: bool) -> int:
    """What torch reserves under this limit, or without one if they do not fit.

    A piece that is just large enough may be just too small on a card. So this is the worse of two
    replays: as traced, and with a training whose largest requests are larger by what a trace may
    be off, less what that adds to what is allocated.
    """
    try:
        exact = requests.replay(Allocator(limit, expandable))
    except OutOfMemory:
        return _reserved(requests, None, expandable)
    try:
        larger = requests.replay(Allocator(limit, expandable), 1 + _UNCERTAIN)
    except OutOfMemory:
        return exact.peak_reserved
    return max(exact.peak_reserved, larger.peak_reserved - (larger.peak_allocated - exact.peak_allocated))


Pattern: TypeAlias = tuple[list[int], int, list[int]]  # events from number 0, allocations, those that stay


def _micro_batch(traced: Traced, gradients_stay: bool, workspace: int = 0) -> Pattern:
    end = len(traced.allocations)
    freed_at: dict[int, list[int]] = defaultdict(list)
    for place, one in enumerate(traced.allocations):
        freed = one.freed
        if freed is None and (one.complete is None or not gradients_stay):
            freed = one.complete if one.complete is not None else end
        if freed is not None and one.size:
            freed_at[freed].append(place)
    events: list[int] = []
    made = 0
    numbers: dict[int, int] = {}
    for place, one in enumerate(traced.allocations):
        events += [-1 - numbers.pop(dead) for dead in freed_at.get(place, ()) if dead in numbers]
        if workspace and place in (0, traced.made_forward):
            events.append(workspace)
            made += 1
        if one.size:
            events.append(one.size)
            numbers[place] = made
            made += 1
    events += [-1 - numbers.pop(dead) for dead in freed_at.get(end, ()) if dead in numbers]
    return events, made, list(numbers.values())


class Requests:
    """Allocations, numbered from 0, and frees. `events`: bytes, or -1 - number to free it."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.made = 0
        self.loaded = 0  # as many of the events were before the training, whose bytes are known
        self._patterns: dict[tuple[int, bool], Pattern] = {}  # of micro-batches without workspaces

    def allocate(self, size: int) -> int:
        self.events.append(size)
        self.made += 1
        return self.made - 1

    def free(self, numbers: Iterable[int]) -> None:
        self.events += [-1 - number for number in numbers]

    def micro_batch(self, traced: Traced, gradients_stay: bool = True, workspace: int = 0) -> list[int]:
        """A forward and a backward. Returns what outlives it: gradients, unless they do not stay.

        A gradient that does not stay is freed when it is complete: added to another one, or moved.
        `workspace` is allocated, and kept, before the forward and before the backward.
        """
        key = (id(traced), gradients_stay)
        if workspace:
            events, made, kept = _micro_batch(traced, gradients_stay, workspace)
        elif key in self._patterns:
            events, made, kept = self._patterns[key]
        else:
            events, made, kept = self._patterns[key] = _micro_batch(traced, gradients_stay)
        first = self.made
        self.events += [event if event >= 0 else event - first for event in events]
        self.made += made
        return [number + first for number in kept]

    def load_in_4_bits(self, sizes: Sequence[tuple[int, str]], packed: float, other: int) -> None:
        """All but trained parameters: as `from_pretrained` does it, and then peft.

        It asks for all of it at once, and frees it (`caching_allocator_warmup`). A matrix is packed
        on the GPU; `packed` are the bytes of its parameters. Then the rest gets `other` bytes each.
        """
        base = [(size, kind == IN_4_BITS) for size, kind in sizes if kind != TRAINED]
        self.free([self.allocate(sum(size // 2 if small else 2 * size for size, small in base))])
        in_16_bits = []
        for size, small in base:
            half = self.allocate(2 * size)
            if not small:
                in_16_bits.append((half, size))
                continue
            self.allocate(size // 2)
            self.allocate(round(size * (packed - 0.5)))
            self.free([half])
        for half, size in in_16_bits if other > 2 else ():
            self.allocate(other * size)
            self.free([half])

    def peak(self) -> int:
        """The most bytes that are allocated at once, each request rounded up."""
        return self.replay(Allocator()).peak_allocated

    def replay(self, allocator: Allocator, larger: float = 1) -> Allocator:
        """The allocator after it, if a training's large requests are so many times as large.

        Raises `OutOfMemory` if they do not fit under its limit.
        """
        blocks: list[Block] = []
        for place, event in enumerate(self.events):
            if event < 0:
                allocator.free(blocks[-1 - event])
            elif event >= _IN_DOUBT and place >= self.loaded:
                blocks.append(allocator.allocate(round(event * larger)))
            else:
                blocks.append(allocator.allocate(event))
        return allocator


def requests_of(run: RunSpec, weights: Weights, steps: Steps, states: Components) -> Requests:
    """Loading, and two steps: the second one's moments lie where the first one's activations were.

    If lengths vary, there is a step of each shorter one before. If there are evaluations, one
    follows.

    With ZeRO-3 and FSDP, each of `states` is there from the start, in one piece: what they gather
    at the fullest moment too.
    """
    requests = Requests()
    workspace = workspace_bytes(run.hardware.capability)
    if run.engine.zero_stage in (1, 2):
        _zero(requests, run, weights, steps, workspace)
        return requests
    if _is_sharded(run):
        for size in (states.parameters, states.optimizer, states.gradients, states.buffers - 2 * workspace):
            requests.allocate(size)
        _steps(requests, replace(steps, accumulation=1), workspace, gradients_stay=False)
        return requests
    _load(requests, run, weights)
    requests.allocate(weights.buffer_bytes)
    trained = [size * trained_bytes(run) for size, kind in weights.sizes if kind == TRAINED]
    viewed = run["gradient_as_bucket_view"] and run.world_size > 1
    if run.world_size > 1:
        for _ in range(sum(trained) // _DDP_BUCKET + 1):
            requests.allocate(_DDP_BUCKET)
    moments, pieces = [], max(1, round(states.optimizer / max(1, sum(trained))))
    for size in trained:
        moments += [round(states.optimizer * size / sum(trained) / pieces)] * pieces
    temporaries = requests_of_update(run, weights, trained_bytes(run))
    _steps(requests, steps, workspace, not viewed or steps.accumulation > 1, moments, temporaries)
    return requests


def _zero(requests: Requests, run: RunSpec, weights: Weights, steps: Steps, workspace: int) -> None:
    """ZeRO-1 and ZeRO-2, as stage_1_and_2.py of DeepSpeed 0.19.8 makes it.

    Trained weights are in one flat buffer; what they were copied from is given back (the cache is
    emptied for each group of Trainer's two). A bucket for gradients is there in each micro-batch.
    The update copies this GPU's share of the gradients, and makes it fp32.
    """
    width = weight_bytes(run)
    share = math.ceil(weights.trained / shards(run))
    frozen = [size * width for size, kind in weights.sizes if kind != TRAINED]
    for size in (*frozen, weights.trained * width, weights.buffer_bytes):
        requests.allocate(size)
    on_gpu = run.engine.offload_optimizer == "none"
    if on_gpu:
        requests.allocate(FP32 * share)
    moments = [round((optimizer_bytes_per_parameter(run) - FP32) * share / 2)] * 2 if on_gpu else []
    copies = [share * width, share * width, FP32 * share] if on_gpu else []
    copies += [update_bytes(run, weights)]
    _steps(requests, steps, workspace, run.engine.zero_stage == 1, moments, [copies], bucket=REDUCE_BUCKET * width)


def _is_sharded(run: RunSpec) -> bool:
    return run.engine.kind in ("deepspeed", "fsdp")


def _load(requests: Requests, run: RunSpec, weights: Weights) -> None:
    if weights.in_4_bits:
        requests.load_in_4_bits(weights.sizes, bytes_in_4_bits(run), frozen_bytes(run, weights))
    for size, kind in weights.sizes:
        if kind == TRAINED or not weights.in_4_bits:
            requests.allocate(size * (trained_bytes(run) if kind == TRAINED else frozen_bytes(run, weights)))


def _steps(
    requests: Requests,
    steps: Steps,
    workspace: int,
    gradients_stay: bool,
    moments: Sequence[int] = (),
    temporaries: Sequence[Sequence[int]] = (),
    bucket: int = 0,
) -> None:
    """`moments` are made in the first update, groups of `temporaries` in each, a `bucket` in
    micro-batches.

    All micro-batches after the second one are as the second.
    """
    full = steps.micro_batch
    requests.loaded = len(requests.events)
    lengths = [*steps.shorter, full] if steps.shorter else [full, full]
    for step, traced in enumerate(lengths):
        buckets = [requests.allocate(bucket)] if bucket else []
        gradients = requests.micro_batch(traced, gradients_stay, workspace if step == 0 else 0)
        if steps.accumulation > 1:
            requests.micro_batch(lengths[max(0, step - 1)], gradients_stay=False)
        requests.free(buckets)
        if step == 0:
            for size in moments:
                requests.allocate(size)
        for group in temporaries:
            requests.free([requests.allocate(size) for size in group])
        requests.free(gradients)
    if steps.evaluation:  # frees all that it allocates: a step after it asks for little that is new
        requests.micro_batch(steps.evaluation, gradients_stay=False)
