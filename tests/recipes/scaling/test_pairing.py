"""Rows that jobs added one by one: which of them are one training, and what its sizes share."""

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.scaling.pairing import paired
from recipes.scaling.row import Batch, Setup, Timing
from recipes.scaling.verdicts import Series, analyse
from tests.support import simulated


def job(world: int, batch: int, seconds: float = 1.0, steps: int = 10, flags: str = "", name: str = "gpt2") -> Timing:
    """A row of ten steps, as `train.py --measure` writes it."""
    setup, samples = Setup(engine="ddp", command=flags), steps * batch
    return Timing(world, steps * seconds, name, samples=samples, batch=Batch(batch), step_time=seconds, setup=setup)


def titles(*rows: Timing) -> list[str]:
    return [series.title for series in analyse(rows)]


def worlds(series: Series) -> list[int]:
    return [size.num_processes for size in series.sizes]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_jobs_are_reported_like_the_same_runs_of_scale_run(seed):
    random = Random(seed)
    rows = simulated.measured(*simulated.draw(random), 2, random)
    largest = max(row.num_processes for row in rows)
    once = [row for row in rows if row.scaling == "strong" or row.num_processes < largest]
    once = [replace(row, setup=replace(row.setup, engine="ddp")) for row in once]
    by_scale_run = once + [replace(row, scaling="weak") for row in once if row.num_processes == largest]
    found = {series.title: series for series in analyse([replace(row, scaling="") for row in once])}
    assert found == {series.title: series for series in analyse(by_scale_run)}


def test_the_same_global_batch_is_strong_scaling():
    assert titles(job(1, 16), job(2, 16)) == ["gpt2, strong scaling"]


def test_the_same_batch_per_process_is_weak_scaling():
    assert titles(job(1, 8), job(2, 16), job(4, 32)) == ["gpt2, weak scaling"]


def test_a_job_of_both_kinds_is_in_both():
    strong, weak = analyse([job(1, 16), job(2, 16), job(1, 8)])
    assert (worlds(strong), worlds(weak)) == ([1, 2], [1, 2])
    assert (strong.scaling, weak.scaling) == ("strong", "weak")


def test_batches_that_nothing_pairs_stand_apart():
    assert titles(job(2, 8), job(2, 16)) == [
        "gpt2, global batch 8, strong scaling",
        "gpt2, global batch 16, strong scaling",
    ]


def test_jobs_named_after_their_size_are_one_training():
    assert titles(job(1, 16, name="gpt2-1gpu"), job(2, 16, name="gpt2-2gpu")) == ["gpt2, strong scaling"]


def test_names_that_meet_at_one_size_are_trainings_of_their_own():
    rows = [job(world, 16, name=name) for world in (1, 2) for name in ("before", "after")]
    assert titles(*rows) == ["before, strong scaling", "after, strong scaling"]


def test_trainings_of_one_name_are_told_apart_by_their_flags():
    rows = [job(world, 16, flags=f"--seed 1 --max_length {length}") for world in (1, 2) for length in (64, 128)]
    assert titles(*rows) == ["gpt2 (max_length 64), strong scaling", "gpt2 (max_length 128), strong scaling"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from((8, 16)), st.text("-' \"a", max_size=9)), min_size=1))
def test_no_job_is_lost_whatever_its_flags(jobs):
    rows = [job(world, batch, flags=flags) for world, batch, flags in jobs]
    found = paired(rows)
    assert {(row.num_processes, row.batch.total, row.setup.command) for row in found} == set(jobs)
    assert all(row.scaling for row in found) and len(rows) <= len(found) <= 2 * len(rows)


def test_a_flag_with_another_inside_is_one_difference():
    flags = ['--config_json \'{"a": " --b"}\'', ""]
    assert titles(*(job(world, 16, flags=one) for world in (1, 2) for one in flags)) == [
        'gpt2 (config_json {"a": " --b"}), strong scaling',
        "gpt2, strong scaling",
    ]


def test_the_order_of_flags_is_no_difference():
    assert len(titles(job(1, 16, flags="--seed 1 --bf16 true"), job(2, 16, flags="--bf16 true --seed 1"))) == 1


def test_jobs_may_train_for_different_numbers_of_steps():
    (series,) = analyse([job(world, 16, seconds=1 / world, steps=10 * world) for world in (1, 2, 4)])
    assert [size.efficiency.median for size in series.sizes] == [1, 1, 1]
    assert series.law and series.serial_fraction == 0


def test_rows_of_other_programs_are_strong_scaling_unless_they_say_so():
    assert titles(Timing(1, 100.0, batch=Batch(8)), Timing(2, 60.0, batch=Batch(16))) == ["training, strong scaling"]
