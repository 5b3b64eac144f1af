"""What a plan says torch reserves: its allocations, replayed."""

import itertools
from dataclasses import replace

import pytest

from recipes.planner.estimate import Estimator
from recipes.planner.libraries.allocator import MIB, Allocator, OutOfMemory
from recipes.planner.replay import Requests, Steps, _reserved, requests_of, with_cached, workspace_bytes
from recipes.planner.shapes import Allocation, Case, Components, Traced
from recipes.planner.tracing.trace import trace
from tests.benchmarks.reserved import READINGS
from tests.benchmarks.reserved import requests_of as published_requests
from tests.recipes.planner.small import SMALL, run_of

FLAGS = ("--max_length", "64", "--per_device_train_batch_size", "4")
PLENTY = 1 << 40


def planned(name, *flags, world=1, limit=PLENTY, **other):
    run = run_of("standard", *FLAGS, *flags, world=world)
    return Estimator(SMALL[name], **other).process(run, 4, limit)[0].gpu


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
    assert max(alive(requests.events)) == max(map(sum, traced.moments))


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
    estimator = Estimator(SMALL[name])
    needed, traced = estimator.need(run, 4)[0].gpu, estimator.traced(run, 4)[0]
    states = replace(needed, buffers=needed.buffers + 2 * workspace_bytes((7, 0)))
    requests = requests_of(run, estimator.weights(run), Steps(traced, run.batch.accumulation), states)
    assert max(alive(requests.events)) == pytest.approx(states.allocated, rel=0.02)


@pytest.mark.slow
def test_a_replay_is_within_two_percent_of_a_published_reading():
    reading = READINGS[0]
    allocator = published_requests(reading).replay(Allocator())
    assert allocator.peak_allocated / MIB == pytest.approx(reading.allocated, rel=0.02)
    assert allocator.peak_reserved / MIB == pytest.approx(reading.reserved, rel=0.02)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("recipe", ["standard", "sharded", "memory"])
def test_a_plan_s_process_takes_what_is_reserved_and_what_is_reserved_holds_what_is_allocated(name, recipe):
    run = run_of(recipe, *FLAGS, world=2)
    components = Estimator(SMALL[name]).process(run, 4, PLENTY)[0].gpu
    assert 0 < components.allocated <= components.reserved < components.total
    assert components.total - components.reserved == components.context


def test_cublas_has_a_workspace_for_the_forward_and_one_for_the_backward():
    run = run_of("standard", *FLAGS)
    estimator = Estimator(SMALL["llama"])
    without, with_them = estimator.need(run, 4)[0].gpu, estimator.process(run, 4, PLENTY)[0].gpu
    assert with_them.buffers - without.buffers == 2 * (8 * MIB + 128 * 1024)
    assert workspace_bytes((9, 0)) == workspace_bytes((12, 0)) == 32 * MIB


def test_under_a_limit_torch_gives_back_what_it_cached_so_that_less_is_reserved():
    layers = [Allocation(size * MIB, time) for time, size in enumerate((30, 40, 50), 1)]  # each gone before the next
    traced = Traced([(50 * MIB, 0, 0)], 3, layers, 3)
    run, states = run_of("standard"), Components(parameters=100 * MIB)
    weights = Estimator(SMALL["llama"]).weights(run)
    weights = replace(weights, sizes=((25 * MIB, "frozen"),), buffer_bytes=0)
    free, tight, too_tight = (
        with_cached(run, weights, Steps(traced, 1), states, limit=limit * MIB)[0].reserved for limit in (1000, 200, 140)
    )
    assert tight < free
    assert tight <= 200 * MIB
    assert too_tight == free


def test_expandable_segments_reserve_less_for_sizes_that_grow():
    layers = [Allocation(size * MIB, time) for time, size in enumerate(range(30, 130, 10), 1)]
    traced = Traced([(120 * MIB, 0, 0)], 10, layers, 10)
    requests = Requests()
    requests.micro_batch(traced)
    reserved = []
    for expandable in (False, True):
        allocator = Allocator(expandable=expandable)
        requests.replay(allocator)
        reserved.append(allocator.peak_reserved)
    assert reserved[1] == 120 * MIB < reserved[0]


def test_what_a_limit_leaves_no_room_for_fails():
    requests = Requests()
    requests.allocate(30 * MIB)
    with pytest.raises(OutOfMemory):
        requests.replay(Allocator(limit=20 * MIB))


def test_gradients_stay_from_the_backward_to_the_step_and_are_added_up_in_the_second_micro_batch():
    traced = Traced([(0, 0, 0)], 1, [Allocation(4 * MIB, 2), Allocation(8 * MIB, None, complete=2)], 1)
    requests = Requests()
    gradients = requests.micro_batch(traced)
    assert gradients == [1]
    assert requests.micro_batch(traced, gradients_stay=False) == []
    assert alive(requests.events)[-1] == 8 * MIB


# --- Lengths that vary ----------------------------------------------------------------------------


def kept(*flags, room=None, **other):
    """What torch reserves for steps of the longest sequence, and for steps of all lengths."""
    run = run_of("standard", "--max_length", "2048", "--per_device_train_batch_size", "16", *flags)
    estimator = Estimator(SMALL["llama"], **other)
    limit = PLENTY if room is None else room + estimator.need(run, 16)[0].gpu.context
    needed = estimator.process(run, 16, limit)[0]
    return needed.gpu.reserved, needed.varied_bytes - needed.gpu.context


def test_where_lengths_vary_torch_may_come_to_keep_more_than_steps_need():
    longest, varied = kept("--packing", "true")
    assert varied == longest
    longest, varied = kept("--packing", "false")
    assert varied > 1.1 * longest


def test_with_expandable_segments_it_keeps_little_more_than_steps_need():
    longest, varied = kept("--packing", "false", expandable=True)
    assert varied <= 1.05 * longest


def test_it_gives_back_what_other_lengths_have_left_before_memory_runs_out():
    longest, varied = kept("--packing", "false")
    room = round(1.1 * longest)
    under_it = kept("--packing", "false", room=room)
    assert under_it[0] == longest < under_it[1] <= room < varied


def test_without_room_for_what_it_cannot_give_back_the_run_does_not_fit():
    longest, varied = kept("--packing", "false")
    room = round(0.99 * longest)  # enough for equal steps
    assert kept("--packing", "false", room=room) == (varied, varied)
    assert max(kept("--packing", "true", room=room)) <= room


def test_a_piece_that_is_just_large_enough_may_be_too_small_on_a_card():
    exact = Requests()
    exact.free([exact.allocate(100 * MIB)])
    exact.loaded = len(exact.events)
    exact.free([exact.allocate(100 * MIB)])
    assert exact.replay(Allocator()).peak_reserved == 100 * MIB
    assert _reserved(exact, None, expandable=False) == 200 * MIB


def test_shorter_rows_of_joined_examples_are_shorter_than_the_longest():
    run = run_of("standard", "--max_length", "64", "--padding_free", "true", "--packing", "false")
    estimator = Estimator(SMALL["llama"])
    longest = sum(one.size for one in estimator.traced(run, 4)[0].allocations)
    assert all(sum(one.size for one in shorter.allocations) < longest for shorter in estimator._shorter(run, 4))
