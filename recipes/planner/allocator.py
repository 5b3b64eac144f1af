"""The GPU memory that torch reserves for a training, found by replaying its memory requests.

`Allocator` follows c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch 2.13,
for one stream without CUDA graphs, with default or expandable segments. Sizes are in bytes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from recipes.planner.memory import (
    IN_4_BITS,
    LOOP,
    NEVER,
    REDUCE_BUCKET,
    ROUNDING,
    TRAINED,
    TRAINING,
    Components,
    Memory,
    Traced,
    bytes_in_4_bits,
    casts_the_model,
    requests_of_update,
    trained_bytes,
    weight_bytes,
)

MIB = 2**20

SMALL = 1 * MIB  # kSmallSize: requests up to this size come from the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: the size of the small pool's segments
LARGE_SEGMENT = 20 * MIB  # large_segment_size_: the size of segments for requests below MIN_LARGE
MIN_LARGE = 10 * MIB  # kMinLargeAlloc: a request of at least this size gets a segment of its own size
_ENDLESS = 1 << 60
ROUND_LARGE = 2 * MIB  # kRoundLarge: segments for requests from MIN_LARGE up are a multiple of this

_DDP_BUCKET = 25 * MIB  # bucket_cap_mb of torch.nn.parallel.DistributedDataParallel
# A trace is up to 0.7 % off the bytes that a GPU allocates (python -m tests.benchmarks.published).
# Requests below _IN_DOUBT bytes are not enlarged: rounding to a segment adds more on average.
_UNCERTAIN = 0.01
_IN_DOUBT = ROUND_LARGE / 2 / _UNCERTAIN


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes that torch allocates for each cuBLAS handle by default.

    Source: parseChosenWorkspaceSize of ATen/cuda/CublasHandlePool.cpp. A training has two handles:
    each thread has its own handle, and autograd runs the backward in another thread.
    """
    return 32 * MIB if capability[0] in (9, 10, 12) else 8 * MIB + 128 * 1024


# --- The allocator --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment, allocated or cached. `before` and `after` are the adjacent pieces."""

    address: int
    size: int
    pool: Pool
    allocated: bool = False
    before: Block | None = None
    after: Block | None = None


Pool: TypeAlias = list[tuple[int, int, Block]]  # the cached blocks of a size class, sorted by size, then address


class Allocator:
    """Count bytes as torch.cuda.memory_allocated and memory_reserved do.

    An `expandable` allocator has one endless segment for each size class. The part of a
    segment up to the farthest block so far counts as reserved.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self.allocated = self.peak_allocated = self.reserved = 0  # reserved memory stays reserved
        self._small: Pool = []
        self._large: Pool = []
        self._next_address = 0
        self._reached = {SMALL_SEGMENT: 0, LARGE_SEGMENT: 0}  # bytes reserved in expandable segments
        for pool in (self._small, self._large) if expandable else ():
            _cache(self._segment(pool, _ENDLESS))

    def allocate(self, size: int) -> Block:
        """Return a block for `size` bytes."""
        size = max(ROUNDING, _up(size, ROUNDING))
        pool, least = (self._small, SMALL_SEGMENT) if size <= SMALL else (self._large, LARGE_SEGMENT)
        # Take the smallest cached block that is large enough; of equal blocks, the lowest address.
        at = bisect_left(pool, (size,))
        if at == len(pool):
            segment = least if size < MIN_LARGE else _up(size, ROUND_LARGE)
            self.reserved += segment
            _cache(self._segment(pool, segment))
        block = pool.pop(at)[2]
        remaining = block.size - size
        if remaining > SMALL or (remaining and (self.expandable or pool is self._small)):
            rest = Block(block.address + size, remaining, pool)
            rest.before, rest.after = block, block.after
            if block.after:
                block.after.before = rest
            block.after, block.size = rest, size
            _cache(rest)
        block.allocated = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        if self.expandable:
            self._reached[least] = max(self._reached[least], _up((block.address + size) % _ENDLESS, least))
            self.reserved = sum(self._reached.values())
        return block

    def free(self, block: Block) -> None:
        """Merge the block with adjacent cached blocks, and cache the result."""
        self.allocated -= block.size
        block.allocated = False
        if (before := block.before) and not before.allocated:
            _uncache(before)
            block.address, block.size, block.before = before.address, before.size + block.size, before.before
            if block.before:
                block.before.after = block
        if (after := block.after) and not after.allocated:
            _uncache(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after:
                block.after.before = block
        _cache(block)

    def _segment(self, pool: Pool, size: int) -> Block:
        """Return a new segment as one block."""
        self._next_address += size
        return Block(self._next_address - size, size, pool)


def _cache(block: Block) -> None:
    insort(block.pool, (block.size, block.address, block))  # addresses differ: blocks are not compared


def _uncache(block: Block) -> None:
    del block.pool[bisect_left(block.pool, (block.size, block.address))]


def _up(size: int, to: int) -> int:
    return -(-size // to) * to


# --- What a training asks for ---------------------------------------------------------------------


class Requests:
    """Allocations and frees in order. An event is a size to allocate, or -1 - n to free block n."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.made = 0
        self.loaded = 0  # the number of events before the first step; the sizes in them are exact

    def allocate(self, size: int) -> int:
        self.events.append(size)
        self.made += 1
        return self.made - 1

    def allocate_all(self, sizes: Iterable[int]) -> list[int]:
        return [self.allocate(size) for size in sizes]

    def free(self, numbers: Iterable[int]) -> None:
        self.events += [-1 - number for number in numbers]

    def micro_batch(self, traced: Traced, gradients_stay: bool = True, workspace: int = 0) -> list[int]:
        """Add a trace's forward and backward. Return the allocation numbers of gradients that stay.

        If not `gradients_stay`, a complete gradient is freed, because it is added to another
        gradient or moved. `workspace` bytes are allocated before each pass, and stay.
        """
        rows = traced.allocations.tolist()
        freed_at: dict[int, list[int]] = defaultdict(list)
        for place, (size, freed, complete, _) in enumerate(rows):
            if freed == NEVER and (complete == NEVER or not gradients_stay):
                freed = min(complete, len(rows))
            if size:
                freed_at[freed].append(place)
        numbers: dict[int, int] = {}
        for place, (size, *_) in enumerate([*rows, (0,)]):
            self.free(numbers.pop(dead) for dead in freed_at.get(place, ()) if dead in numbers)
            if workspace and place in (0, traced.made_forward):
                self.allocate(workspace)
            if size:
                numbers[place] = self.allocate(size)
        return list(numbers.values())

    def load_in_4_bits(self, sizes: Sequence[tuple[int, str]], packed: float, other: int) -> None:
        """Add allocations and frees that load all frozen parameters in `sizes` (`Weights.sizes`).

        `from_pretrained` first allocates and frees all their bytes (`caching_allocator_warmup`). It
        then packs each 4-bit matrix on the GPU into `packed` bytes per parameter. The rest is
        loaded in 2 bytes per parameter, and cast to `other` bytes at the end.
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

    def reserved(self) -> int:
        """Return the bytes that torch reserves.

        A cached block that is just large enough here may be just too small on a GPU. So a second
        replay enlarges the steps' large requests by _UNCERTAIN. The larger requests also raise the
        peak of allocations: subtract that rise from the second result. Return the larger result.
        """
        exact, larger = self.replay(), self.replay(1 + _UNCERTAIN)
        return max(exact.reserved, larger.reserved - (larger.peak_allocated - exact.peak_allocated))

    def replay(self, larger: float = 1, expandable: bool = False) -> Allocator:
        """Replay all events, with the steps' large requests multiplied by the factor `larger`."""
        allocator = Allocator(expandable)
        blocks: list[Block] = []
        for place, event in enumerate(self.events):
            if event < 0:
                allocator.free(blocks[-1 - event])
            elif event >= _IN_DOUBT and place >= self.loaded:
                blocks.append(allocator.allocate(round(event * larger)))
            else:
                blocks.append(allocator.allocate(event))
        return allocator


def with_cached(memory: Memory, limit: int) -> Components:
    """Return the run's GPU memory with cuBLAS's workspaces and torch's cache (on a CPU, neither).

    The cache is left out if all else exceeds `limit` bytes, or if the model loops over tokens:
    a loop's allocations are unknown. With expandable segments, torch frees the cache above `limit`.
    """
    if not memory.run.hardware.cuda:
        return memory.gpu
    workspaces = 2 * workspace_bytes(memory.run.hardware.capability)
    states = replace(memory.gpu, buffers=memory.gpu.buffers + workspaces)
    if LOOP in memory.micro_batch.kernels or states.total > limit:
        return states
    requests = requests_of(memory, states)
    if memory.run["expandable_segments"]:
        found = requests.replay(expandable=True)
        idle = found.reserved - found.peak_allocated
        if memory.kind == "fsdp":  # the reduce-scatter stream's own pool stays reserved for gradients
            idle += max(0, memory.gradients - states.gradients)
        return replace(states, cached=min(idle, limit - states.total))
    # The replay of DeepSpeed and FSDP always holds the largest states: subtract its own peak.
    allocated = requests.replay().peak_allocated if casts_the_model(memory.run) else states.allocated
    return replace(states, cached=max(0, requests.reserved() - allocated))


def requests_of(memory: Memory, states: Components) -> Requests:
    """Return the allocations of loading, of two steps and, if the run evaluates, of an evaluation.

    Two steps are needed because the first update puts the optimizer's state where activations were.
    With accumulation, each step has two micro-batches: a third would only repeat the second. With
    DeepSpeed and FSDP, each step has one micro-batch, and each part of `states` is one allocation
    at the start. In each step, ZeRO-1 and ZeRO-2 hold a bucket until the backward ends.
    """
    requests = Requests()
    run, weights = memory.run, memory.weights
    workspace = workspace_bytes(run.hardware.capability)
    accumulation, gradients_stay = memory.accumulation, not memory.viewed or memory.beside_views
    moments: list[int] = []  # the optimizer's state, allocated in the first update
    temporaries: list[list[int]] = []  # the groups that each update allocates, one after the other
    bucket = REDUCE_BUCKET * weight_bytes(run) if memory.stage in (1, 2) else 0
    if casts_the_model(run):
        accumulation, gradients_stay = 1, False
        buffers = states.buffers - 2 * workspace - bucket * (memory.moment == TRAINING)
        requests.allocate_all([states.parameters, states.optimizer, states.gradients, buffers])
    else:
        width = trained_bytes(run)
        if weights.in_4_bits:
            requests.load_in_4_bits(weights.sizes, bytes_in_4_bits(run), memory.frozen_width)
        for size, kind in weights.sizes:
            if kind == TRAINED or not weights.in_4_bits:
                requests.allocate(size * (width if kind == TRAINED else memory.frozen_width))
        trained = [size * width for size, kind in weights.sizes if kind == TRAINED]
        buckets = sum(trained) // _DDP_BUCKET + 1 if run.world_size > 1 else 0
        requests.allocate_all([weights.buffer_bytes, *[_DDP_BUCKET] * buckets])
        pieces = max(1, round(states.optimizer / max(1, sum(trained))))
        for size in trained:
            moments += [round(states.optimizer * size / sum(trained) / pieces)] * pieces
        temporaries = requests_of_update(run, weights, width)
    requests.loaded = len(requests.events)
    for step in range(2):
        of_step = requests.allocate_all([bucket] if bucket else [])
        gradients = requests.micro_batch(memory.micro_batch, gradients_stay, 0 if step else workspace)
        if accumulation > 1:
            requests.micro_batch(memory.micro_batch, gradients_stay=False)
        requests.free(of_step)
        if step == 0:
            requests.allocate_all(moments)
        for group in temporaries:
            requests.free(requests.allocate_all(group))
        requests.free(gradients)
    if memory.evaluation:  # an evaluation frees all its memory, so no step follows it here
        requests.micro_batch(memory.evaluation, gradients_stay=False)
    return requests
