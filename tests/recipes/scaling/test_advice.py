"""Advice, and whether it gains what it promises in simulations of the change."""

from dataclasses import replace
from random import Random

import pytest

from recipes.scaling.advice import BEFORE, Advice, advise, applied
from recipes.scaling.analyse import analyse
from recipes.scaling.causes import bus_bytes
from recipes.scaling.timings import Timing
from tests.support.simulated import Training, measured, train

# 64 examples a step, of 3 ms each, in micro-batches of 4, and 100 MB of gradients in four buckets
# at 40 GB/s.
WELL = Training(
    global_batch=64,
    largest_micro_batch=4,
    forward=1e-3,
    backward=2e-3,
    launch=1e-4,
    optimizer=1e-3,
    gradients=1e8,
    buckets=4,
    bandwidth=4e10,
    latency=1e-6,
)
WORLD = 4
SLOW_LINK = replace(WELL, bandwidth=1e9)


def advice(training: Training, **known: object) -> dict[str, Advice]:
    """What is advised at four processes, by key.

    `known` is what a measurement adds and no simulation knows.
    """
    rows = [_with_setup(row, known) for row in measured(training, WORLD, 3, Random(1))]
    series = next(one for one in analyse(rows) if one.scaling == "strong")
    return {one.key: one for one in advise(series.sizes[-1], series)}


def _with_setup(row: Timing, known: dict) -> Timing:
    row = replace(row, engine="ddp", hardware="CPU, 4 cores", cores=4, **known)
    if not row.communication or not row.link_bandwidth:
        return row
    alone = bus_bytes(row.sync_bytes, WORLD) / row.link_bandwidth
    return replace(row, overlap=max(0.0, 1 - row.communication / alone))


def gained(before: Training, after: Training) -> float:
    speeds = [one.global_batch / train(one, WORLD, one.global_batch).step for one in (before, after)]
    return speeds[1] / speeds[0]


@pytest.mark.parametrize(
    ("key", "before", "after"),
    [
        ("compression", SLOW_LINK, replace(SLOW_LINK, gradients=5e7)),
        ("sync_once", replace(SLOW_LINK, every_micro_batch=True), SLOW_LINK),
        ("workers", replace(WELL, loading=4e-3, workers=0), replace(WELL, loading=4e-3, workers=2)),
        ("workers", replace(WELL, loading=9e-3, workers=2), replace(WELL, loading=9e-3, workers=4)),
        ("straggler", replace(WELL, slow_computing=1.6), WELL),
        ("uncontended", replace(WELL, contention=0.3), WELL),
        ("logging", replace(WELL, log=0.3, log_every=2), replace(WELL, log=0.3, log_every=20)),
        ("saving", replace(WELL, checkpoint=0.5, save_every=4), replace(WELL, checkpoint=0.5, save_every=20)),
    ],
)
def test_an_advised_change_gains_its_predicted_throughput_in_simulation(key, before, after):
    assert gained(before, after) == pytest.approx(advice(before)[key].gain, rel=0.25)


def test_advised_accumulation_gains_its_predicted_throughput_and_is_marked_as_changing_training():
    still = replace(SLOW_LINK, bandwidth=4e9)
    found = advice(still)["accumulation"]
    after = replace(still, global_batch=found.flags["global_batch_size"])
    assert not found.same_training and gained(still, after) == pytest.approx(found.gain, rel=0.05)


def test_an_advised_larger_micro_batch_gains_its_predicted_throughput_in_simulation():
    small = replace(WELL, largest_micro_batch=4, launch=2e-2)
    found = advice(small, pass_overhead=2e-2)["micro_batch"]
    twice = replace(small, largest_micro_batch=8)
    assert found.flags == {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert gained(small, twice) == pytest.approx(found.gain, rel=0.1)


def test_no_lost_time_gets_no_advice_and_time_lost_to_latency_gets_no_advice_to_compress():
    assert advice(WELL) == {}
    latency = advice(replace(WELL, latency=3e-3, gradients=1e6, bandwidth=1e11))
    assert "compression" not in latency and not latency["accumulation"].same_training


def test_fewer_processes_are_advised_if_more_processes_are_slower():
    rows = [Timing(1, 100.0, samples=1000), Timing(4, 217.4, samples=1000)]
    series = analyse(rows)[0]
    found = advise(series.sizes[-1], series)
    assert [(one.key, one.flags) for one in found] == [("fewer", {"num_processes": 1})]
    assert found[0].gain == pytest.approx(2.174)


# --- What was tried -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ((1.48, 1.5, 1.52), "predicted 1.50 times the throughput, measured 1.50 (1.49 to 1.51): within 5%"),
        ((1.98, 2.0, 2.02), "measured 2.00 (1.99 to 2.01): off by 33%"),
        ((1.2, 1.7, 2.2), "too noisy to judge, because the repeats leave"),
        ((2.0,), "a single pair"),
    ],
    ids=["right", "wrong", "noisy", "single"],
)
def test_a_predicted_gain_is_compared_with_the_measured_gain_or_called_too_noisy_to_judge(ratios, says):
    """Compression, predicted to gain a half, tried once for each ratio of throughputs."""
    rows = [Timing(2, 10.0, samples=100, applied=f"{BEFORE}: compression") for _ in ratios]
    rows += [Timing(2, 10.0 / ratio, samples=100, applied="compression", predicted=1.5) for ratio in ratios]
    (found,) = applied(rows)
    assert says in found.words
