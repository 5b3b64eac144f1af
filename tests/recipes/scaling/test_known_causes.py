"""The cause that is named in simulated trainings whose cause is known, and the simulator itself."""

from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest

from recipes.scaling.causes import CAUSES, volume_bound
from recipes.scaling.row import with_columns
from recipes.scaling.verdicts import Verdict, analyse
from tests.support import simulated
from tests.support.simulated import IDEAL, Training


def at_largest(rows) -> Verdict:
    """The verdict on the largest size of the rows' strong scaling."""
    return next(series for series in analyse(rows) if series.scaling == "strong").verdicts[-1]


@pytest.fixture(scope="module")
def verdicts():
    """200 sets of timings, each with its verdict."""
    return [(of, at_largest(of.rows)) for of in simulated.sets(of_each=25)]


def test_of_200_known_causes_95_of_100_are_named_correctly(verdicts):
    wrong = [(of, verdict) for of, verdict in verdicts if (verdict.cause or "healthy") != of.cause]
    print(
        f"{len(verdicts) - len(wrong)} of {len(verdicts)} right, wrong of each 25:",
        Counter(of.cause for of, _ in wrong),
    )
    for of, verdict in wrong:
        print(f"seed {of.seed}, {of.largest} processes, {of.cause}: {verdict.words}", simulated.gains(*of.at))
    assert len(verdicts) == 200
    assert len(wrong) <= 10


def test_no_cause_is_mistaken_more_than_15_times_in_100(verdicts):
    named = defaultdict(Counter)
    for of, verdict in verdicts:
        named[of.cause][verdict.cause or "healthy"] += 1
    assert {cause: found for cause, found in named.items() if found[cause] < 0.85 * found.total()} == {}


def test_every_cause_is_simulated():
    assert list(IDEAL) == list(CAUSES)


def test_the_parts_of_a_simulated_step_add_up(verdicts):
    rows = [row for of, _ in verdicts for row in of.rows]
    assert [sum(row.parts.known().values()) for row in rows] == pytest.approx([row.step_time for row in rows])


def test_lost_time_that_nothing_explains_is_called_unexplained(verdicts):
    healthy = next(of.rows for of, verdict in verdicts if of.cause == "healthy" and not verdict.cause)
    largest = max(row.num_processes for row in healthy)
    rows = [
        with_columns(
            row,
            other=row.parts.other + row.step_time,
            step_time=2 * row.step_time,
            epoch_time=2 * row.epoch_time,
        )
        if row.num_processes == largest
        else row
        for row in healthy
    ]
    assert "per step are unexplained" in at_largest(rows).words
    assert at_largest(rows).cause is None


# --- The simulator, where arithmetic on paper says what must come out ----------------------------

# The simulator itself, where arithmetic on paper says what must come out: 4 processes with 8
# samples of 3 ms each.
PLAIN = Training(
    global_batch=32, largest_micro_batch=8, forward=0.001, backward=0.002, launch=0, optimizer=0, asynchronous=False
)


@pytest.mark.parametrize(
    ("change", "step"),
    [
        ({}, 0.024),
        ({"launch": 0.004, "optimizer": 0.002}, 0.030),
        ({"launch": 0.004, "asynchronous": True}, 0.024),
        ({"launch": 0.004, "optimizer": 0.004, "shared_out": True}, 0.029),  # 4 launches of 4 and an update, over 4
        ({"contention": 0.1}, 0.024 * 1.3),
        ({"slow_computing": 1.5, "slow_rank": 2}, 0.036),
        ({"gradients": 1e6, "bandwidth": 1e8, "overlapped": False}, 0.024 + 0.015),
        ({"gradients": 1e6, "bandwidth": 5e7, "buckets": 2}, 0.016 + 0.030),  # it begins in the middle of backward
        ({"latency": 0.001, "buckets": 2, "overlapped": False}, 0.024 + 0.012),
        ({"loading": 0.001, "workers": 0}, 0.032),
        ({"loading": 0.01, "workers": 2}, 0.040),
        ({"loading": 0.005, "workers": 2}, 0.024),
        ({"loading": 0.005, "workers": 2, "slow_loading": 3}, 0.060),
        ({"storage": 400}, 0.080),
        ({"log": 0.02, "log_every": 10}, 0.026),
        ({"checkpoint": 0.02, "evaluation": 0.08, "save_every": 10}, 0.028),
    ],
    ids=str,
)
def test_a_simulated_step_takes_as_long_as_on_paper(change, step):
    assert simulated.train(replace(PLAIN, **change), 4, 32, Random(0)).step == pytest.approx(step)


@pytest.mark.parametrize(
    ("link", "bound"),
    [
        ({"bandwidth": 1e8}, True),
        ({"bandwidth": 1e8, "latency": 0.0001, "buckets": 5}, True),  # 15 ms for bytes, 3 ms for messages
        ({"latency": 0.001, "buckets": 5}, False),
        ({"bandwidth": 1e9, "latency": 0.001}, False),
    ],
    ids=str,
)
def test_a_link_is_slow_by_its_bandwidth_or_by_its_latency(link, bound):
    rows = simulated.measured(replace(PLAIN, gradients=1e6, overlapped=False, **link), 4, 1, Random(0))
    (largest,) = [row for row in rows if row.scaling == "strong" and row.num_processes == 4]
    assert volume_bound(largest) is bound
