"""Which rows are one training, how well it scales, why no better, and what cannot be told."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.scaling import sentences
from recipes.scaling.advice import advise
from recipes.scaling.analyse import Series, Size, analyse
from recipes.scaling.timings import Timing


def last(rows: list[Timing]) -> Size:
    """The largest size of the first series."""
    return analyse(rows)[0].sizes[-1]


def words_of(rows: list[Timing]) -> str:
    series = analyse(rows)[0]
    return sentences.verdict(series.sizes[-1], series)


def of_rates(throughputs: dict[int, float]) -> Series:
    (series,) = analyse([Timing(world, 1000 / rate, samples=1000) for world, rate in throughputs.items()])
    return series


# --- What holds for any timings ------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(2, 64), unique=True, max_size=5).map(lambda found: [1, *sorted(found)]),
    st.floats(0, 1),
    st.floats(1e-3, 1e6),
)
def test_the_serial_fraction_of_amdahls_law_is_recovered_from_three_or_more_world_sizes(worlds, serial, alone):
    (series,) = analyse([Timing(world, alone * (serial + (1 - serial) / world)) for world in worlds])
    assert series.serial_fraction == (pytest.approx(serial, abs=1e-9) if len(worlds) >= 3 else None)


# --- How fast ------------------------------------------------------------------------------------


def test_a_slowdown_with_more_processes_is_called_negative_scaling():
    found = of_rates({1: 255, 4: 691, 8: 666})
    words = sentences.verdict(found.sizes[-1], found)
    assert [size.band for size in found.sizes] == ["", "poor", "negative scaling"]
    assert [size.band for size in of_rates({1: 100, 2: 180, 4: 180}).sizes] == ["", "excellent", "poor"]
    assert "2.61 times as fast as 1 process, 32.6% efficiency: negative scaling (one timing)" in words
    assert "Of the measured world sizes, 4 is the best, 2.71 times as fast as 1" in sentences.law(found)


def test_a_slowdown_within_the_spread_of_repeats_is_not_negative_scaling_and_gets_no_advice():
    times = {1: (100, 101, 99), 2: (60, 66, 55), 4: (61, 67, 54)}
    (series,) = analyse([Timing(world, time) for world, repeats in times.items() for time in repeats])
    assert [size.band for size in series.sizes[1:]] == ["good", "poor"]
    assert advise(series.sizes[-1], series) == []


@pytest.mark.parametrize(("speedup", "says"), [(3.492, "87.3% efficiency: excellent"), (0.46, "11.5% efficiency: neg")])
def test_a_published_speedup_alone_gets_a_grade_of_efficiency_but_no_cause_of_lost_time(speedup, says):
    """IMDB and AG News on 4 GPUs: only ratios were published."""
    rows = [Timing(1, 100), Timing(4, 100 / speedup)]
    assert says in words_of(rows) and last(rows).cause is None
    assert ("measure the parts of a step with `recipes scale run`" in words_of(rows)) == (speedup < 1)


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ({1: 100, 2: 166}, "needs three world sizes with the same work."),
        ({1: 100, 2: 150, 4: 380, 8: 790}, "varies with the world size, which breaks Amdahl's law."),
        ({w: 100 / (0.05 + 0.95 / w) for w in (1, 2, 4, 8)}, "can be more than 20 times as fast."),
        ({w: 100 / (0.001 + 0.999 / w) for w in (1, 2, 4)}, "too small to derive a limit from world sizes up to 4."),
    ],
)
def test_amdahls_law_gives_the_greatest_speedup_or_the_reason_why_none_is_known(rates, says):
    assert sentences.law(of_rates(rates)).endswith(says)
    (more,) = analyse([Timing(world, 100 + world, samples=1000 * world) for world in (1, 2, 4)])
    assert more.serial_fraction is None and "with the same work" in sentences.law(more)


# --- Why -----------------------------------------------------------------------------------------

WAITING = Timing(2, 100, step_time=1.0, data_wait=0.2, communication=0.4)


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({"workers": 0}, "communication"),
        ({"workers": 2}, "data"),  # without communication it would wait 0.6 s for them
        ({"workers": 2, "data_wait": 0.05}, "communication"),
        ({"workers": 2, "communication": 0.0, "saving": 0.4}, "saving"),
    ],
)
def test_data_loading_is_the_cause_of_lost_time_only_if_it_sets_the_pace(changed, first):
    rows = [replace(WAITING, **changed)]
    assert last(rows).cause == first
    assert ("Data loading sets the pace: 200 ms of a 1 s step (20%)" in words_of(rows)) == (first == "data")


def test_contention_is_found_without_weak_scaling_rows_if_the_micro_batch_is_the_same():
    one = Timing(1, 60, global_batch=16, micro_batch=4, step_time=0.6, no_sync_step=0.6, no_sync_step_max=0.6)
    two = replace(one, num_processes=2, epoch_time=57, step_time=0.57, no_sync_step=0.57, no_sync_step_max=0.57)
    assert last([one, two]).cause == "contention"


def row(world: int, step: float, communication: float = 0.0, **known) -> Timing:
    passes = step - communication
    parts = {"forward": passes / 3, "backward": passes * 2 / 3, "communication": communication}
    known = {"engine": "ddp", "no_sync_step": passes, "no_sync_step_max": passes, **parts, **known}
    return Timing(world, 100 * step, samples=1600, global_batch=16, micro_batch=16 // world, step_time=step, **known)


ALONE = [row(1, time) for time in (1.0, 1.01, 0.99)]


def repeats(waits: list[float], **known) -> list[Timing]:
    return [row(2, 0.5 + wait, wait, **known) for wait in waits]


def test_no_cause_of_lost_time_is_named_and_nothing_advised_if_repeats_differ_too_much():
    rows = ALONE + [replace(one, accumulation=2, pass_overhead=0.2) for one in repeats([0.0, 0.15, 0.5])]
    (series,) = analyse(rows)
    assert (series.sizes[-1].cause, series.sizes[-1].losses.undecided) == (None, "too noisy")
    assert advise(series.sizes[-1], series) == []
    assert "Too noisy to name a cause: communication may take 23% of a step" in words_of(rows)
    assert "Measure on a quiet machine; on this one, `recipes scale run --repeats" in words_of(rows)


def test_lost_time_without_a_measured_cause_is_called_unexplained():
    rows = [ALONE[0], replace(repeats([0.0])[0], step_time=1.0, other=0.5)]
    assert last(rows).cause is None
    assert "500 ms per step are unexplained." in words_of(rows)


@pytest.mark.parametrize(("ranks", "says"), [([1, 1], "(rank 1, node, cuda:0)."), ([1, 0], "for 500 ms.")])
def test_a_straggler_is_named_by_rank_and_device_only_if_it_is_always_the_same_rank(ranks, says):
    known = dict(forward=0.2, no_sync_step=0.5, no_sync_step_max=0.7, slowest_host="node", slowest_device="cuda:0")
    slow = [row(2, 0.7, slowest_rank=rank, **known) for rank in ranks]
    assert "stragglers" in words_of(ALONE + slow) and says in words_of(ALONE + slow)


# --- What cannot be told -------------------------------------------------------------------------

HIDDEN = {"engine": "deepspeed", "communication": None, "no_sync_step": None, "no_sync_step_max": None}
ZERO = [replace(row(1, 1.0), **HIDDEN), replace(row(2, 0.9), **HIDDEN)]


def test_deepspeed_zero_gets_an_upper_bound_for_the_sum_of_communication_contention_and_stragglers():
    share = replace(row(1, 0.5), global_batch=8, micro_batch=8, scaling="weak", **HIDDEN)
    (cause,) = last([*ZERO, share]).losses.named
    assert (cause.key, cause.seconds) == ("hidden", pytest.approx(0.4))
    said = "communication, contention or stragglers, which cannot be told apart and take at most 400 ms"
    assert f"Most of the lost time goes to {said} of a 900 ms step (44%)" in words_of([*ZERO, share])


@pytest.mark.parametrize("engine", ["deepspeed", ""])
def test_a_verdict_asks_for_a_weak_scaling_run_if_backward_times_include_communication(engine):
    rows = [replace(one, engine=engine) for one in ZERO]
    assert (last(rows).cause, last(rows).losses.undecided) == (None, "hidden")
    assert "`recipes scale run --scaling weak --num_processes 1 2`" in words_of(rows)


def test_the_verdict_on_one_row_names_its_largest_measured_loss_and_asks_for_a_reference_run():
    words = words_of(repeats([0.2]))
    assert "Of what was measured, the largest loss of time is communication" in words
    assert "`recipes scale run --num_processes 1 2`" in words
    assert last(repeats([0.01])).losses.undecided == "no reference"


# --- Rows of jobs --------------------------------------------------------------------------------


def job(world: int, batch: int, seconds: float = 1.0, steps: int = 10, flags: str = "", name: str = "gpt2") -> Timing:
    """A row of ten steps, as `train.py --measure` writes it."""
    known = {"global_batch": batch, "step_time": seconds, "engine": "ddp", "command": flags}
    return Timing(world, steps * seconds, name, samples=steps * batch, **known)


FLAGS = [f"--seed 1 --max_length {length}" for length in (64, 128)]


@pytest.mark.parametrize(
    ("rows", "titles"),
    [
        ([job(1, 16), job(2, 16)], ["gpt2, strong scaling"]),
        ([job(1, 8), job(2, 16), job(4, 32)], ["gpt2, weak scaling"]),
        ([job(2, 8), job(2, 16)], [f"gpt2, global batch {batch}, strong scaling" for batch in (8, 16)]),
        (
            [job(world, 16, name=name) for world in (1, 2) for name in ("before", "after")],
            ["before, strong scaling", "after, strong scaling"],
        ),
        (
            [job(world, 16, flags=flags) for world in (1, 2) for flags in FLAGS],
            [f"gpt2 ({flags}), strong scaling" for flags in FLAGS],
        ),
        ([Timing(1, 100.0, global_batch=8), Timing(2, 60.0, global_batch=16)], ["training, strong scaling"]),
    ],
    ids=["strong", "weak", "apart", "two names", "two lengths", "no jobs"],
)
def test_a_scaling_report_draws_timings_of_the_same_training_as_one_line(rows, titles):
    assert [series.title for series in analyse(rows)] == titles


def test_a_report_on_a_single_world_size_says_that_it_has_no_speedup():
    assert "the only world size" in words_of([Timing(4, 12.5)])
    assert "the only world size" not in words_of([Timing(1, 40), Timing(4, 12.5)])


def test_a_run_that_applies_the_reports_advice_is_left_out_of_the_scaling_series():
    assert last([Timing(1, 100), Timing(2, 50), Timing(2, 10, applied="before")]).repeats == 1
