"""What repeats leave open is said, and neither cause nor advice is given."""

from dataclasses import replace

import pytest

from recipes.scaling.advice import advise
from recipes.scaling.row import Batch, NoSync, Parts, Setup, Slowest, Timing
from recipes.scaling.verdicts import analyse


def row(world: int, step: float, communication: float = 0.0, **known) -> Timing:
    parts = Parts(
        forward=(step - communication) / 3, backward=(step - communication) * 2 / 3, communication=communication
    )
    batch = Batch(16, 16 // world, 1)
    return Timing(
        world, 100 * step, samples=1600, batch=batch, step_time=step, parts=parts, setup=Setup("2 GPUs", "ddp"), **known
    )


ALONE = [row(1, time, no_sync=NoSync(time, time)) for time in (1.0, 1.01, 0.99)]


def repeats(waits: list[float]) -> list[Timing]:
    return [row(2, 0.5 + wait, wait, no_sync=NoSync(0.5, 0.5)) for wait in waits]


def test_a_wait_that_every_repeat_has_is_a_cause():
    (series,) = analyse(ALONE + repeats([0.2, 0.21, 0.19]))
    assert (series.verdicts[-1].cause, series.verdicts[-1].undecided) == ("communication", "")


NOISY = ALONE + repeats([0.0, 0.15, 0.5])


def test_where_repeats_differ_by_more_than_the_effect_there_is_no_cause_and_no_advice():
    (series,) = analyse(NOISY)
    assert (series.verdicts[-1].cause, series.verdicts[-1].undecided) == (None, "noise")
    assert advise(series.sizes[-1], series) == []


def test_the_spread_the_load_and_what_to_do_are_said_instead():
    (series,) = analyse([replace(one, other_load=3.25) for one in NOISY])
    words = series.verdicts[-1].words
    assert "Too noisy to name a cause: communication seems to take 23% of a step" in words
    assert "Those of this size differ by 77%. Other programs kept 3.2 cores busy meanwhile" in words
    assert "Measure on a quiet machine, or with more repeats (`recipes scale run --repeats " in words


def test_a_single_timing_beside_other_programs_is_in_doubt():
    (series,) = analyse([replace(one, other_load=3.8) for one in ALONE[:1] + repeats([0.2])])
    assert "Other programs kept 3.8 cores busy meanwhile. One timing does not show" in series.verdicts[-1].words


def test_fewer_processes_are_not_advised_by_chance():
    times = {1: (100, 140, 70), 2: (105, 75, 150)}
    (series,) = analyse([Timing(world, time) for world, repeats in times.items() for time in repeats])
    assert series.verdicts[-1].band == "poor"
    assert advise(series.sizes[-1], series) == []


# --- What cannot be told -------------------------------------------------------------------------

ZERO = [
    replace(one, setup=Setup("2 GPUs", "deepspeed"), no_sync=None) for one in [row(1, 1.0), row(1, 0.5), row(2, 0.9)]
]
SHARE = replace(ZERO[1], batch=Batch(8, 8, 1), scaling="weak")


def test_zero_gets_a_bound_and_no_cause():
    found = analyse([ZERO[0], ZERO[2], SHARE])[0].verdicts[-1]
    assert (found.cause, found.undecided) == (None, "bound")
    assert found.bound.seconds == pytest.approx(0.4)
    assert "ZeRO has no step without communication" in found.words
    assert "take at most 400 ms of a 900 ms step together (44%)" in found.words


def test_zero_without_its_share_alone_says_what_would_bound_it():
    found = analyse([ZERO[0], ZERO[2]])[0].verdicts[-1]
    assert (found.cause, found.undecided, found.bound) == (None, "hidden", None)
    assert "`recipes scale run --scaling weak --num_processes 1 2`" in found.words


def test_a_single_row_speaks_of_what_was_measured():
    found = analyse(repeats([0.2])[:1])[0].verdicts[0]
    assert "Of what was measured, the largest loss is communication" in found.words
    assert "`recipes scale run --num_processes 1 2`" in found.words


def test_a_single_row_without_a_large_part_does_not_call_itself_healthy():
    found = analyse(repeats([0.01])[:1])[0].verdicts[0]
    assert found.undecided == "no reference"


# --- The straggler has a name --------------------------------------------------------------------


def stragglers(ranks: list[int]) -> str:
    slow = [
        replace(one, no_sync=NoSync(0.5, 0.7), slowest=Slowest(rank, f"node{rank}", "cuda:0"))
        for rank, one in zip(ranks, repeats([0.2] * len(ranks)), strict=True)
    ]
    slow = [replace(one, parts=replace(one.parts, communication=0.0, other=0.2)) for one in slow]
    return analyse(ALONE + slow)[0].verdicts[-1].words


def test_the_slowest_process_is_named_with_its_place():
    assert "(rank 1, node1, cuda:0, in all 3 repeats)" in stragglers([1, 1, 1])


def test_a_process_that_is_not_always_the_slowest_is_not_blamed():
    assert "not the same process in every repeat: rank 1, node1, cuda:0 in 2 of 3" in stragglers([1, 0, 1])
