"""torch's caching allocator without a GPU, and what a training asks it for."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.planner.allocator import (
    MIB,
    Allocator,
    OutOfMemory,
    Requests,
    is_expandable,
    requests_of,
    with_cached,
    workspace_bytes,
)
from recipes.planner.fits import Estimator
from recipes.planner.footprint import Memory
from recipes.planner.shapes import NEVER, Case, Weights, traced_of
from recipes.planner.tracing.trace import trace
from tests.benchmarks.reserved import READINGS
from tests.benchmarks.reserved import requests_of as published_requests
from tests.recipes.planner.small import SMALL, peak, run_of

SIZES = st.one_of(st.integers(1, 4 << 10), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))
# Sizes to allocate, or which of those that are alive to free.
EVENTS = st.lists(st.one_of(SIZES, st.floats(0, 0.999)), max_size=60)


def played(events, allocator, each=lambda: None):
    """Play the events; returns the blocks that are still allocated."""
    alive = []
    for event in events:
        if isinstance(event, int):
            alive.append(allocator.allocate(event))
        elif alive:
            allocator.free(alive.pop(int(event * len(alive))))
        each()
    return alive


@given(EVENTS)
def test_reserved_is_never_below_allocated_and_only_grows_without_a_limit(events):
    allocator = Allocator()
    before = [0]

    def look():
        assert allocator.allocated <= allocator.reserved
        assert before[0] <= allocator.reserved == allocator.peak_reserved
        before[0] = allocator.reserved

    played(events, allocator, look)


@given(EVENTS)
def test_blocks_never_overlap_and_hold_what_was_asked_for(events):
    allocator = Allocator()
    alive = played(events, allocator)
    assert allocator.allocated == sum(block.size for block in alive)
    places = sorted((block.address, block.address + block.size) for block in alive)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@given(EVENTS)
def test_when_all_is_freed_all_is_cached_and_can_be_given_back(events):
    allocator = Allocator()
    for block in played(events, allocator):
        allocator.free(block)
    assert allocator.allocated == 0
    assert allocator.reserved == allocator.peak_reserved
    allocator.empty_cache()
    assert allocator.reserved == 0


@settings(max_examples=50)
@given(EVENTS)
def test_what_fits_under_a_limit_stays_below_it_and_what_was_reserved_is_always_enough(events):
    free = Allocator()
    played(events, free)
    enough = Allocator(limit=free.peak_reserved)
    played(events, enough)
    assert enough.retries == 0
    for share in (0.95, 0.8, 0.6):
        tight = Allocator(limit=int(free.peak_reserved * share))
        try:
            played(events, tight)
        except OutOfMemory:
            continue
        assert tight.peak_reserved <= tight.limit


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 512, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # a rest of up to 1 MiB is not split off
    ],
)
def test_a_request_is_rounded_and_takes_a_segment_of_its_size_class(size, allocated, reserved):
    allocator = Allocator()
    allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_the_smallest_cached_block_that_is_large_enough_is_taken():
    allocator = Allocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 30, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(25 * MIB) is blocks[1]  # of two equal ones that of the lower address
    assert allocator.reserved == 100 * MIB


def test_what_is_cached_is_given_back_before_memory_is_out():
    allocator = Allocator(limit=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.retries, allocator.reserved, allocator.peak_reserved) == (1, 80 * MIB, 80 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(30 * MIB)


@pytest.mark.parametrize(
    ("environment", "expandable"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_the_environment_says_whether_segments_expand(environment, expandable):
    assert is_expandable(environment) == expandable


# --- A training -----------------------------------------------------------------------------------

FLAGS = ("--max_length", "64", "--per_device_train_batch_size", "4")
PLENTY = 1 << 40


def alive(events):
    """Bytes alive after each event, each request rounded up as torch does."""
    sizes = [-(-event // 512) * 512 for event in events if event >= 0]
    made = itertools.count()
    return list(itertools.accumulate(sizes[next(made)] if event >= 0 else -sizes[-1 - event] for event in events))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("case", [Case(4, 64), Case(4, 64, autocast="bfloat16"), Case(4, 64, checkpointing=True)])
def test_a_trace_s_allocations_have_the_peak_of_its_live_bytes(name, case):
    traced = trace(SMALL[name], case)
    requests = Requests()
    requests.micro_batch(traced)
    assert max(alive(requests.events)) == peak(traced)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "flags",
    [
        "--fp16 false --optim adamw_torch",
        "--fp16 true",
        "--gradient_accumulation_steps 2",
        "--use_peft true --lora_dropout 0 --gradient_checkpointing true",
    ],
)
def test_two_replayed_steps_have_the_peak_that_the_arithmetic_finds(name, flags):
    run = run_of("standard", *FLAGS, *flags.split())
    memory = Estimator(SMALL[name]).memory(run, 4)
    needed = memory.gpu
    states = replace(needed, buffers=needed.buffers + 2 * workspace_bytes((7, 0)))
    requests = requests_of(memory, states)
    assert max(alive(requests.events)) == pytest.approx(states.allocated, rel=0.02)


@pytest.mark.slow
def test_a_replay_is_within_two_percent_of_a_published_reading():
    reading = READINGS[0]
    allocator = published_requests(reading).replay()
    assert allocator.peak_allocated / MIB == pytest.approx(reading.allocated, rel=0.02)
    assert allocator.peak_reserved / MIB == pytest.approx(reading.reserved, rel=0.02)


def test_under_a_limit_torch_gives_back_what_it_cached_so_that_less_is_reserved():
    layers = [(size * MIB, time, NEVER, 0) for time, size in enumerate((30, 40, 50), 1)]  # each gone before the next
    traced = traced_of(np.array(layers), 3)
    weights = Weights(25 * MIB, 0, sizes=((25 * MIB, "frozen"),))
    memory = Memory(run_of("standard"), weights, traced)
    free, tight, too_tight = (
        with_cached(memory, memory.context + limit * MIB)[0].reserved for limit in (1000, 200, 140)
    )
    assert tight < free
    assert tight <= 200 * MIB
    assert too_tight == free


# --- Lengths that vary ----------------------------------------------------------------------------


def kept(packing, room=None):
    """What torch reserves for steps of the longest sequence, and for steps of all lengths."""
    flags = ("--max_length", "2048", "--per_device_train_batch_size", "16", "--packing", packing)
    run, estimator = run_of("standard", *flags), Estimator(SMALL["llama"])
    memory = estimator.memory(run, 16)
    limit = PLENTY if room is None else room + memory.context
    gpu, varied = with_cached(memory, limit, lambda: estimator.shorter(run, 16))
    return gpu.reserved, varied - memory.context


def test_where_lengths_vary_torch_may_come_to_keep_more_than_steps_need():
    longest, varied = kept("true")
    assert varied == longest
    longest, varied = kept("false")
    assert varied > 1.1 * longest


def test_without_room_for_what_it_cannot_give_back_the_run_does_not_fit():
    longest, varied = kept("false")
    room = round(0.99 * longest)  # enough for equal steps
    assert kept("false", room=room) == (varied, varied)
    assert max(kept("true", room=room)) <= room


def test_a_piece_that_is_just_large_enough_may_be_too_small_on_a_card():
    exact = Requests()
    exact.free([exact.allocate(100 * MIB)])
    exact.loaded = len(exact.events)
    exact.free([exact.allocate(100 * MIB)])
    assert exact.replay().peak_reserved == 100 * MIB
    assert exact.reserved() == 200 * MIB
