"""The compute and communication of a step, at every split of the global batch."""

import functools

import pytest

from recipes.planner.speed import exchanges
from recipes.planner.trace import weigh
from recipes.run import here, resolve
from recipes.run.hardware import Hardware
from tests.recipes.planner.small import SMALL, planned


@functools.cache  # several tests ask about the same plan
def splits(recipe="standard", processes=2, flags=(), **named):
    flags = ["--global_batch_size", "96", "--max_length", "64", *flags]
    return planned(*flags, recipe=recipe, gpu="A100 80GB", num_processes=processes, **named).choices


@pytest.mark.parametrize("recipe", ["standard", "memory", "memory_zero3"])
def test_every_split_keeps_the_global_batch_and_its_compute(recipe):
    found = splits(recipe)
    assert {split.micro_batch * split.accumulation * 2 for split in found} == {96}
    assert len({split.time.compute for split in found}) == 1


def test_accumulation_sends_nothing_more_with_ddp_and_once_per_micro_batch_with_zero():
    by_accumulation = {split.accumulation: split.time.sent_bytes for split in splits("standard")}
    assert by_accumulation[4] == by_accumulation[12]
    sharded = {split.accumulation: split.time.sent_bytes for split in splits("memory_zero3")}
    assert sharded[12] == 3 * sharded[4]


EACH = ["--accelerator_config", '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}']


@pytest.mark.parametrize(
    ("recipe", "flags", "times"), [("standard", [], 1), ("standard", EACH, 4), ("memory", [], 4), ("memory", EACH, 4)]
)
def test_gradients_are_exchanged_once_a_step_or_in_each_micro_batch(recipe, flags, times):
    run = resolve(flags, here(2, hardware=Hardware(cores=2), environment={}), settings={"recipe": recipe})
    assert exchanges(run, 4) == times


def test_an_all_reduce_sends_twice_the_share_of_the_other_gpus():
    parameters = weigh(SMALL["llama"], "causal_lm").total
    for processes in (2, 4):
        sent = splits(processes=processes)[0].time.sent_bytes
        assert sent == pytest.approx(2 * (processes - 1) / processes * 4 * parameters)


def test_a_step_takes_its_flops_at_the_stated_share_of_the_peak():
    text = SMALL["llama"]
    used = weigh(text, "causal_lm").total - 1000 * 128  # an input embedding that is not tied is a lookup
    flops = (6 * used + 6 * 4 * 128 * 64) * 48 * 64
    assert splits(mfu=0.5)[0].time.compute == pytest.approx(flops / (0.5 * 312e12))


def test_compute_time_is_unknown_for_experts_and_for_an_unknown_card():
    assert planned(config=SMALL["qwen3_moe"], gpu="H100").choices[0].time.compute is None
    assert planned().choices[0].time.compute is None


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
def test_without_other_figures_times_assume_what_is_published_for_the_card(gpu, mfu, speed):
    plan = planned(gpu=gpu, num_processes=2, recipe="standard")
    assert (plan.mfu, plan.bandwidth) == (mfu, speed) and plan.mfu_source and plan.link
    time = plan.recipes[0].time
    assert time.communication == pytest.approx(time.sent_bytes / speed) and time.compute > 0
    of_two_nodes = planned(gpu=gpu, num_processes=2, nodes=2, recipe="standard")
    assert of_two_nodes.bandwidth is None and of_two_nodes.recipes[0].time.communication is None


def test_computing_hides_what_is_sent_meanwhile():
    for recipe, hides in (("standard", 2 / 3), ("sharded", 1)):
        for split in splits(recipe, bandwidth=1e4):
            assert split.time.total == split.time.compute
        for split in splits(recipe, bandwidth=1e-3):
            hidden = hides * split.time.compute / (split.accumulation if recipe == "standard" else 1)
            assert split.time.total == pytest.approx(split.time.compute + split.time.communication - hidden)


# --- Offload and sharding -------------------------------------------------------------------------


def test_gradients_of_zero_2_cross_pcie_in_fp32_and_weights_in_bf16_and_adam_takes_what_deepspeed_published():
    parameters = weigh(SMALL["llama"], "causal_lm").total
    pcie, adam = (4 + 2) * parameters / 2 / 32e9, 8.2 * parameters / 11.6e9
    assert splits("memory")[0].time.host == pytest.approx(pcie + adam)


def test_sums_of_gradients_cross_pcie_both_ways_but_with_zero_2_not_the_first_time():
    parameters = weigh(SMALL["llama"], "causal_lm").total
    hosts = {split.accumulation: split.time.host for split in splits("memory")}
    assert hosts[4] - hosts[1] == pytest.approx((2 * 4 - 1) * 2 * parameters / 2 / 32e9)


def test_parameters_that_are_offloaded_cross_pcie_twice_in_each_micro_batch_as_do_sums_of_gradients():
    parameters = weigh(SMALL["llama"], "causal_lm").total
    more = splits("memory_zero3")[0].time.host - splits("memory")[0].time.host
    assert more == pytest.approx((2 - 1 + 2) * 2 * parameters / 2 / 32e9)


def test_fsdp2_gathers_twice_and_scatters_once_in_each_micro_batch_but_the_head_once():
    weights = weigh(SMALL["llama"], "causal_lm")
    head = weights.outside_layers - weights.looked_up
    by_accumulation = {split.accumulation: split.time.sent_bytes for split in splits("sharded")}
    assert by_accumulation[1] == 2 * (3 * weights.total - head) / 2
    assert by_accumulation[12] == 12 * by_accumulation[1]
    flags = ("--accelerator_config", '{"split_batches": false}')
    once = {split.accumulation: split.time.sent_bytes for split in splits("sharded", flags=flags)}
    assert once[12] == 2 * (12 * (2 * weights.total - head) + weights.total) / 2
