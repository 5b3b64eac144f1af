"""torch's caching allocator without a GPU: its rules, and what holds for all requests."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.planner.libraries.allocator import MIB, Allocator, OutOfMemory, is_expandable

SIZES = st.one_of(st.integers(1, 4 << 10), st.integers(1, 3 * MIB), st.integers(1, 60 * MIB))
# Sizes to allocate, or which of those that are alive to free.
EVENTS = st.lists(st.one_of(SIZES, st.floats(0, 0.999)), max_size=60)
EXPANDABLE = st.booleans()


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


@given(EVENTS, EXPANDABLE)
def test_reserved_is_never_below_allocated_and_only_grows_without_a_limit(events, expandable):
    allocator = Allocator(expandable=expandable)
    before = [0]

    def look():
        assert allocator.allocated <= allocator.reserved
        assert before[0] <= allocator.reserved == allocator.peak_reserved
        before[0] = allocator.reserved

    played(events, allocator, look)


@given(EVENTS, EXPANDABLE)
def test_blocks_never_overlap_and_hold_what_was_asked_for(events, expandable):
    allocator = Allocator(expandable=expandable)
    alive = played(events, allocator)
    assert allocator.allocated == sum(block.size for block in alive)
    places = sorted((block.address, block.address + block.size) for block in alive)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))


@given(EVENTS, EXPANDABLE)
def test_when_all_is_freed_all_is_cached_and_can_be_given_back(events, expandable):
    allocator = Allocator(expandable=expandable)
    for block in played(events, allocator):
        allocator.free(block)
    assert allocator.allocated == 0
    assert allocator.reserved == allocator.peak_reserved
    allocator.empty_cache()
    assert allocator.reserved == 0


@settings(max_examples=50)
@given(EVENTS, EXPANDABLE)
def test_what_fits_under_a_limit_stays_below_it_and_what_was_reserved_is_always_enough(events, expandable):
    free = Allocator(expandable=expandable)
    played(events, free)
    enough = Allocator(limit=free.peak_reserved, expandable=expandable)
    played(events, enough)
    assert enough.retries == 0
    for share in (0.95, 0.8, 0.6):
        tight = Allocator(limit=int(free.peak_reserved * share), expandable=expandable)
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


def test_an_expandable_segment_grows_by_pages_and_splits_off_every_rest():
    allocator = Allocator(expandable=True)
    allocator.allocate(11 * MIB)
    allocator.allocate(30 * MIB)
    assert (allocator.allocated, allocator.reserved) == (41 * MIB, 60 * MIB)
    allocator.allocate(100)
    assert allocator.reserved == 62 * MIB


def test_the_smallest_cached_block_that_is_large_enough_is_taken():
    allocator = Allocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 30, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(25 * MIB) is blocks[1]  # of two equal ones that of the lower address
    assert allocator.reserved == 100 * MIB


@pytest.mark.parametrize("size", [1, 3 * MIB, 50 * MIB])
def test_whole_pages_of_an_expandable_segment_are_given_back(size):
    allocator = Allocator(expandable=True)
    allocator.free(allocator.allocate(size))
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_neighbours_that_are_free_become_one_block():
    allocator = Allocator()
    whole = allocator.allocate(60 * MIB)
    allocator.free(whole)
    parts = [allocator.allocate(20 * MIB) for _ in range(3)]
    for part in parts:
        allocator.free(part)
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 60 * MIB


def test_what_is_cached_is_given_back_before_memory_is_out():
    allocator = Allocator(limit=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.retries, allocator.reserved, allocator.peak_reserved) == (1, 80 * MIB, 80 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(30 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_a_segment_that_is_partly_allocated_is_given_back_only_if_it_is_expandable(expandable):
    allocator = Allocator(limit=100 * MIB, expandable=expandable)
    allocator.free(allocator.allocate(80 * MIB))
    allocator.allocate(20 * MIB)  # in the segment of 80
    if expandable:
        allocator.allocate(70 * MIB)
    else:
        with pytest.raises(OutOfMemory):
            allocator.allocate(70 * MIB)


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
