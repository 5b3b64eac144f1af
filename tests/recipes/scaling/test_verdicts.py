"""Verdicts: what holds for any timings, the published cases, and timings of other people."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.scaling.causes import causes_of
from recipes.scaling.row import PARTS, Batch, NoSync, Parts, Timing, from_columns, to_columns, with_columns
from recipes.scaling.timings import read
from recipes.scaling.verdicts import Verdict, analyse
from tests.support import simulated

quickly = settings(max_examples=50, deadline=None)


def verdict_on(rows: list[Timing]) -> Verdict:
    """The verdict on the largest size of the first series."""
    return analyse(rows)[0].verdicts[-1]


# --- What holds for any timings ------------------------------------------------------------------

seeds = st.integers(0, 10**6)


def some_rows(seed: int) -> list[Timing]:
    random = Random(seed)
    return simulated.measured(*simulated.draw(random), 3, random)


def scaled(row: Timing, factor: float) -> Timing:
    """The row of a machine on which everything takes `factor` times as long."""
    times = [*PARTS, "epoch_time", "step_time", "data_wait_max", "no_sync_step", "no_sync_step_max"]
    columns = to_columns(row)
    return with_columns(row, **{name: factor * columns[name] for name in times})


@quickly
@given(seeds)
def test_the_smallest_size_has_a_speedup_of_one(seed):
    assert [series.sizes[0].speedup.median for series in analyse(some_rows(seed))] == pytest.approx([1, 1])


@quickly
@given(seeds, st.floats(1e-3, 1e3))
def test_a_machine_on_which_all_takes_longer_gets_the_same_verdict(seed, factor):
    rows = some_rows(seed)
    before, after = analyse(rows), analyse([scaled(row, factor) for row in rows])
    assert ratios(after) == pytest.approx(ratios(before))
    assert [verdict.cause for series in after for verdict in series.verdicts] == [
        verdict.cause for series in before for verdict in series.verdicts
    ]


def ratios(found) -> list[float]:
    sizes = [size for series in found for size in series.sizes]
    return [value for size in sizes for value in (size.speedup.median, size.efficiency.median)]


@quickly
@given(seeds, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(seed, random):
    rows = some_rows(seed)
    shuffled = random.sample(rows, len(rows))
    assert {series.title: series for series in analyse(shuffled)} == {series.title: series for series in analyse(rows)}


worlds = st.lists(st.integers(2, 64), unique=True, max_size=5).map(lambda found: [1, *sorted(found)])


@quickly
@given(worlds, st.floats(1e-3, 1e6))
def test_an_epoch_shared_out_without_loss_is_efficient(worlds, alone):
    (series,) = analyse([Timing(world, alone / world) for world in worlds])
    assert [size.efficiency.median for size in series.sizes] == pytest.approx([1] * len(worlds))


@quickly
@given(worlds, st.floats(0, 1), st.floats(1e-3, 1e6))
def test_amdahls_serial_fraction_is_found_again_from_three_sizes_on(worlds, serial, alone):
    (series,) = analyse([Timing(world, alone * (serial + (1 - serial) / world)) for world in worlds])
    expected = pytest.approx(serial, abs=1e-9) if len(worlds) >= 3 else None
    assert series.serial_fraction == expected


times = [*PARTS, "step_time", "data_wait_max", "no_sync_step", "no_sync_step_max"]
any_row = st.fixed_dictionaries(
    {"num_processes": st.sampled_from([1, 2, 4]), "epoch_time": st.floats(1e-6, 1e6)},
    optional={"global_batch": st.sampled_from([4, 8]), **{name: st.floats(0, 1e6) for name in times}},
).map(from_columns)


@quickly
@given(any_row, st.lists(any_row, max_size=6))
def test_no_loss_is_negative(row, others):
    causes, lost, unexplained = causes_of(row, others)
    assert all(cause.seconds >= 0 for cause in causes)
    assert (lost or 0) >= 0
    assert (unexplained or 0) >= 0


WAITING = Timing(2, 100, step_time=1.0, parts=Parts(data_wait=0.2, communication=0.4))


@pytest.mark.parametrize(
    ("row", "first"),
    [
        (with_columns(WAITING, workers=0), "communication"),
        (with_columns(WAITING, workers=None), "communication"),
        (with_columns(WAITING, workers=2), "data"),  # without communication it would wait 0.6 s for them
        (with_columns(WAITING, workers=2, data_wait=0.05), "communication"),
        (with_columns(WAITING, workers=2, communication=0.0, saving=0.4), "saving"),
        (with_columns(WAITING, workers=2, accumulation=4), "data"),  # a step's micro-batches are held ahead
        (with_columns(WAITING, workers=1, accumulation=16), "communication"),  # their queues are full long before
    ],
)
def test_loading_comes_before_what_it_runs_beside(row, first):
    assert verdict_on([row]).cause == first


def test_the_verdict_says_that_loading_sets_the_pace():
    words = verdict_on([with_columns(WAITING, workers=2)]).words
    assert "Data loading sets the pace: 200 ms of a 1 s step (20%) are spent waiting for data." in words


def test_a_run_that_tries_a_recommendation_is_no_part_of_the_series():
    rows = [Timing(1, 100), Timing(2, 50), Timing(2, 10, applied="before")]
    assert analyse(rows)[0].sizes[-1].repeats == 1


# --- The published cases -------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path):
    """The verdict at 4 GPUs from a speedup.

    Only ratios were published, so the epoch on one GPU is taken as 100 s.
    """

    def verdict(speedup: float) -> Verdict:
        file = tmp_path / "published.csv"
        file.write_text(f"num_processes,epoch_time\n1,100\n4,{100 / speedup}\n")
        (series,) = analyse(read([file]))
        return series.verdicts[-1]

    return verdict


def test_imdb_on_4_gpus_is_excellent(published):
    words = published(3.492).words
    assert "87.3%" in words
    assert "excellent" in words


def test_ag_news_on_4_gpus_scales_negatively(published):
    words = published(0.46).words
    assert "11.5%" in words
    assert "negative scaling" in words


@pytest.mark.parametrize("speedup", [3.492, 0.46])
def test_epoch_times_alone_name_no_cause(published, speedup):
    assert published(speedup).cause is None


def test_epoch_times_alone_say_how_to_find_the_cause(published):
    assert "recipes scale run" in published(0.46).words


# --- Timings of other people -----------------------------------------------------


def words_of(rows: list[Timing]) -> str:
    return verdict_on(rows).words


def test_weak_scaling_without_samples_assumes_as_many_per_process():
    rows = [Timing(1, 100, scaling="weak"), Timing(2, 105, scaling="weak")]
    assert "95.2% efficiency: excellent" in words_of(rows)


def test_weak_scaling_whose_epochs_get_shorter_is_questioned():
    """As if they shared the same samples: 769% would be called excellent."""
    found = verdict_on([Timing(1, 100, scaling="weak"), Timing(8, 13, scaling="weak")])
    assert found.band == "unclear"
    assert "Add a column samples, or write strong in the column scaling" in found.words


def test_amdahls_law_is_not_fitted_to_a_growing_number_of_samples():
    rows = [Timing(world, 100 + world, samples=1000 * world) for world in (1, 2, 4)]
    assert analyse(rows)[0].serial_fraction is None


def test_the_smallest_size_has_a_speedup_of_one_whatever_its_spread():
    sizes = analyse([Timing(1, 100), Timing(1, 10), Timing(2, 50)])[0].sizes
    assert [size.speedup.median for size in sizes] == [1, pytest.approx(1.1)]


def test_a_verdict_says_how_certain_it_is():
    noisy = [Timing(1, time) for time in (100, 110, 90)] + [Timing(2, time) for time in (58, 66, 54)]
    assert "between good and excellent" in words_of(noisy)
    assert "(one timing)" in words_of([Timing(1, 100), Timing(2, 55)])


def test_time_outside_the_steps_is_named():
    row = dict(samples=1600, batch=Batch(16), step_time=0.3)
    assert "40 s of a 70 s epoch lie outside its steps" in words_of([Timing(1, 70, **row), Timing(2, 70, **row)])


def test_contention_shows_without_weak_rows_at_the_same_micro_batch():
    one = Timing(1, 60, batch=Batch(16, 4), step_time=0.6, no_sync=NoSync(0.6, 0.6))
    two = replace(one, num_processes=2, epoch_time=57, step_time=0.57, no_sync=NoSync(0.57, 0.57))
    assert verdict_on([one, two]).cause == "contention"


@given(st.data())
@quickly
def test_a_cause_never_costs_more_than_a_step_lost(data):
    def seconds() -> float:
        return data.draw(st.floats(0.01, 1))

    batch, computing = Batch(16, 4), seconds()
    one = Timing(1, 60, batch=batch, step_time=seconds(), no_sync=NoSync(seconds()))
    two = Timing(2, 60, batch=batch, step_time=seconds(), no_sync=NoSync(computing, computing))
    two = replace(two, parts=Parts(communication=seconds()))
    found = verdict_on([one, two])
    differences = [cause.seconds for cause in found.causes if cause.key in ("contention", "work")]
    assert sum(differences) <= (found.lost or 0) + 1e-9
