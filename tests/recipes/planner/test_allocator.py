"""torch's caching allocator without a GPU, and what a training asks it for."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.planner.allocator import MIB, Allocator, Requests, requests_of, workspace_bytes
from recipes.planner.fits import Estimator
from tests.recipes.planner.small import SMALL, run_of

SIZES = st.one_of(st.integers(1, 4 << 10), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))
# Sizes to allocate, or which of those that are alive to free.
EVENTS = st.lists(st.one_of(SIZES, st.floats(0, 0.999)), max_size=60)


@given(EVENTS, st.booleans())
def test_allocator_blocks_never_overlap_and_freed_neighbours_merge(events, expandable):
    allocator, alive = Allocator(expandable=expandable), []
    for event in events:
        if isinstance(event, int):
            alive.append(allocator.allocate(event))
        elif alive:
            allocator.free(alive.pop(int(event * len(alive))))
        assert allocator.allocated <= allocator.reserved
    assert allocator.allocated == sum(block.size for block in alive)
    places = sorted((block.address, block.address + block.size) for block in alive)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    for block in alive:
        allocator.free(block)
    free = [block for _, _, block in (*allocator._small, *allocator._large)]
    assert allocator.allocated == 0 and not any(block.before or block.after for block in free)
    assert expandable or sum(block.size for block in free) == allocator.reserved


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
def test_an_allocation_is_rounded_up_and_reserves_a_segment_of_its_size_class(size, allocated, reserved):
    allocator = Allocator()
    allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_the_allocator_reuses_the_smallest_cached_block_that_is_large_enough():
    allocator = Allocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 30, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(25 * MIB) is blocks[1]  # of two equal ones that of the lower address
    assert allocator.reserved == 100 * MIB


def test_an_expandable_segment_grows_at_its_end_and_its_last_block_is_reused_last():
    allocator = Allocator(expandable=True)
    first, _ = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    assert allocator.reserved == 60 * MIB  # in steps of 20 MiB, of which the second request found 10
    allocator.free(first)
    last = allocator.allocate(50 * MIB)
    allocator.free(last)
    assert allocator.reserved == 120 * MIB and allocator.allocate(20 * MIB) is first


# --- A training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "flags",
    [
        "--fp16 false --optim adamw_torch",
        "--gradient_accumulation_steps 2",
        "--use_peft true --lora_dropout 0 --gradient_checkpointing true",
    ],
)
def test_replaying_the_allocations_of_two_steps_gives_the_planned_peak_memory(name, flags):
    run = run_of("standard", "--max_length", "64", "--per_device_train_batch_size", "4", *flags.split())
    memory = Estimator(SMALL[name]).memory(run, 4)
    states = replace(memory.gpu, buffers=memory.gpu.buffers + 2 * workspace_bytes((7, 0)))
    assert requests_of(memory, states).replay().peak_allocated == pytest.approx(states.allocated, rel=0.02)


def test_planned_reserved_memory_does_not_rely_on_reuse_of_a_cached_block_of_the_exact_size():
    exact = Requests()
    exact.free([exact.allocate(100 * MIB)])
    exact.loaded = len(exact.events)
    exact.free([exact.allocate(100 * MIB)])
    assert exact.replay().reserved == 100 * MIB
    assert exact.reserved() == 200 * MIB
