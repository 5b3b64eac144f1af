"""The compute and communication of a step, at every split of the global batch."""

import functools

import pytest

from recipes.planner.speed import exchanges
from recipes.planner.trace import weigh
from tests.recipes.planner.small import CPU, SMALL, planned, run_of

WEIGHTS = weigh(SMALL["llama"], "causal_lm")


@functools.cache  # several tests ask about the same plan
def splits(recipe="standard", processes=2, flags=(), **named):
    """The times of a step, by accumulation."""
    flags = ["--global_batch_size", "96", "--max_length", "64", *flags]
    plan = planned(*flags, recipe=recipe, gpu="A100 80GB", num_processes=processes, **named)
    assert {split.micro_batch * split.accumulation * processes for split in plan.choices()} == {96}
    return {split.accumulation: split.time for split in plan.choices()}


def test_accumulation_adds_no_traffic_with_ddp_but_one_exchange_per_micro_batch_with_zero_3():
    ddp, zero = splits("standard"), splits("memory_zero3")
    assert len({time.compute for time in ddp.values()}) == len({time.compute for time in zero.values()}) == 1
    assert ddp[4].sent_bytes == ddp[12].sent_bytes
    assert zero[12].sent_bytes == 3 * zero[4].sent_bytes


EACH = ["--accelerator_config", '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}']


@pytest.mark.parametrize(("recipe", "flags", "times"), [("standard", [], 1), ("standard", EACH, 4), ("memory", [], 4)])
def test_ddp_reduces_gradients_once_a_step_but_once_per_micro_batch_with_sync_each_batch(recipe, flags, times):
    assert exchanges(run_of(recipe, *flags, world=2, hardware=CPU), 4) == times


@pytest.mark.parametrize("processes", [2, 4])
def test_planned_bytes_of_ddps_all_reduce_are_those_of_a_ring_all_reduce(processes):
    sent = splits(processes=processes)[1].sent_bytes
    assert sent == pytest.approx(2 * (processes - 1) / processes * 4 * WEIGHTS.total)


def test_planned_compute_time_is_the_flops_of_a_step_at_the_given_mfu():
    used = WEIGHTS.total - 1000 * 128  # an input embedding that is not tied is a lookup
    flops = (6 * used + 6 * 4 * 128 * 64) * 48 * 64
    assert splits(mfu=0.5)[1].compute == pytest.approx(flops / (0.5 * 312e12))


@pytest.mark.parametrize(
    ("gpu", "mfu", "speed"),
    [
        ("H100", 0.33, 370e9),
        ("A100 40GB", 0.57, 200e9),
        ("RTX 4090", 0.55, 20e9),
        ("T4", 0.35, 10e9),
        ("B200", 0.35, 740e9),
    ],
)
def test_planned_times_use_the_gpus_default_mfu_and_on_one_node_also_its_link_bandwidth(gpu, mfu, speed):
    plan, of_two_nodes = (planned(gpu=gpu, num_processes=2, nodes=nodes, recipe="standard") for nodes in (1, 2))
    assert (plan.mfu, plan.bandwidth) == (mfu, speed) and plan.mfu_source and plan.link
    time = plan.recipes[0].time
    assert time.communication == pytest.approx(time.sent_bytes / speed) and time.compute > 0
    assert of_two_nodes.bandwidth is None and of_two_nodes.recipes[0].time.communication is None


@pytest.mark.parametrize(("recipe", "hides"), [("standard", 2 / 3), ("sharded", 1)])
def test_planned_step_time_hides_communication_that_overlaps_with_computation(recipe, hides):
    assert all(time.total == time.compute for time in splits(recipe, bandwidth=1e4).values())
    for accumulation, time in splits(recipe, bandwidth=1e-3).items():
        hidden = hides * time.compute / (accumulation if recipe == "standard" else 1)
        assert time.total == pytest.approx(time.compute + time.communication - hidden)


# --- Offload and sharding -------------------------------------------------------------------------


def test_zero_offload_time_is_pcie_traffic_plus_cpu_adam_at_deepspeeds_published_speed():
    """With ZeRO-2 weights come back in bf16, and sums of gradients do not cross the first time.

    Parameters that are offloaded cross twice in each micro-batch, as do sums with ZeRO-3.
    """
    pcie = WEIGHTS.total / 2 / 32e9  # seconds a byte of each parameter
    zero2, zero3 = splits("memory"), splits("memory_zero3")
    assert zero2[1].host == pytest.approx((4 + 2) * pcie + 8.2 * WEIGHTS.total / 11.6e9)
    assert zero2[4].host - zero2[1].host == pytest.approx((2 * 4 - 1) * 2 * pcie)
    assert zero3[1].host - zero2[1].host == pytest.approx((2 - 1 + 2) * 2 * pcie)


def test_fsdp2_gathers_each_layer_twice_and_lm_head_once_and_reduce_scatters_once_per_micro_batch():
    head, found = WEIGHTS.outside_layers - WEIGHTS.looked_up, splits("sharded")
    assert found[1].sent_bytes == 2 * (3 * WEIGHTS.total - head) / 2
    assert found[12].sent_bytes == 12 * found[1].sent_bytes
    once = splits("sharded", flags=("--accelerator_config", '{"split_batches": false}'))
    assert once[12].sent_bytes == 2 * (12 * (2 * WEIGHTS.total - head) + WEIGHTS.total) / 2
