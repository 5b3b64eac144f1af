"""What timings say: the right cause of simulated trainings whose cause is known, the published cases, and the rows."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.errors import UserError
from recipes.scaling.timings import PARTS, Timing, append, read
from recipes.scaling.verdicts import CAUSES, Verdict, analyse, causes_of, parts, volume_bound
from tests.support import simulated
from tests.support.simulated import IDEAL, Training

quickly = settings(max_examples=50, deadline=None)


def at_largest(rows) -> Verdict:
    """The verdict on the largest size of the rows' strong scaling."""
    return next(series for series in analyse(rows) if series.scaling == "strong").verdicts[-1]


# --- Simulated trainings, whose cause is known ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged():
    """Of each of 200 sets what it is and what is said of it."""
    return [(of, at_largest(of.rows)) for of in simulated.sets(of_each=25)]


def test_of_200_known_causes_95_of_100_are_named_rightly(judged):
    wrong = [(of, verdict) for of, verdict in judged if (verdict.cause or "healthy") != of.cause]
    print(f"{len(judged) - len(wrong)} of {len(judged)} right, wrong of each 25:", Counter(of.cause for of, _ in wrong))
    for of, verdict in wrong:
        print(f"seed {of.seed}, {of.largest} processes, {of.cause}: {verdict.words}", simulated.gains(*of.at))
    assert len(judged) == 200
    assert len(wrong) <= 10


def test_no_cause_is_mistaken_more_than_15_times_in_100(judged):
    said = defaultdict(Counter)
    for of, verdict in judged:
        said[of.cause][verdict.cause or "healthy"] += 1
    assert {cause: found for cause, found in said.items() if found[cause] < 0.85 * found.total()} == {}


def test_every_cause_is_simulated():
    assert list(IDEAL) == list(CAUSES)


def test_the_parts_of_a_simulated_step_add_up(judged):
    rows = [row for of, _ in judged for row in of.rows]
    assert [sum(parts(row).values()) for row in rows] == pytest.approx([row.step_time for row in rows])


# The simulator itself, where arithmetic on paper says what must come out: 4 processes with 8 samples of 3 ms each.
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


# --- What holds for any timings --------------------------------------------------------------------------------------

seeds = st.integers(0, 10**6)


def some_rows(seed: int) -> list[Timing]:
    random = Random(seed)
    return simulated.measured(*simulated.draw(random), 3, random)


def scaled(row: Timing, factor: float) -> Timing:
    """The row of a machine on which everything takes `factor` times as long."""
    times = [*parts(row), "epoch_time", "step_time", "data_wait_max", "no_sync_step", "no_sync_step_max"]
    return replace(row, **{name: factor * getattr(row, name) for name in times})


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


columns = [*PARTS, "step_time", "data_wait_max", "no_sync_step", "no_sync_step_max"]
any_row = st.builds(
    Timing,
    num_processes=st.sampled_from([1, 2, 4]),
    epoch_time=st.floats(1e-6, 1e6),
    global_batch=st.sampled_from([None, 4, 8]),
    **{name: st.none() | st.floats(0, 1e6) for name in columns},
)


@quickly
@given(any_row, st.lists(any_row, max_size=6))
def test_nothing_loses_less_than_no_time(row, others):
    causes, lost, unexplained = causes_of(row, others)
    assert all(cause.seconds >= 0 for cause in causes)
    assert (lost or 0) >= 0
    assert (unexplained or 0) >= 0


WAITING = Timing(2, 100, step_time=1.0, data_wait=0.2, communication=0.4)


@pytest.mark.parametrize(
    ("row", "first"),
    [
        (replace(WAITING, workers=0), "communication"),
        (replace(WAITING, workers=None), "communication"),
        (replace(WAITING, workers=2), "data"),  # without communication it would wait 0.6 s for them
        (replace(WAITING, workers=2, data_wait=0.05), "communication"),
        (replace(WAITING, workers=2, communication=0.0, saving=0.4), "saving"),
    ],
)
def test_loading_comes_before_what_it_runs_beside(row, first):
    assert at_largest([row]).cause == first


def test_loading_that_sets_the_pace_is_said_to_come_first():
    assert "Nothing is gained before data loading: 200 ms" in at_largest([replace(WAITING, workers=2)]).words


def test_time_lost_to_nothing_that_was_measured_is_said_to_be_so(judged):
    healthy = next(of.rows for of, verdict in judged if of.cause == "healthy" and not verdict.cause)
    largest = max(row.num_processes for row in healthy)
    rows = [
        replace(row, other=row.other + row.step_time, step_time=2 * row.step_time, epoch_time=2 * row.epoch_time)
        if row.num_processes == largest
        else row
        for row in healthy
    ]
    assert "lost to nothing that was measured" in at_largest(rows).words
    assert at_largest(rows).cause is None


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


def test_a_run_that_tries_a_recommendation_is_no_part_of_the_series():
    rows = [Timing(1, 100), Timing(2, 50), Timing(2, 10, applied="before")]
    assert analyse(rows)[0].sizes[-1].repeats == 1


# --- The published cases ---------------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path):
    """The verdict at 4 GPUs from a speedup. Only ratios were published, so the epoch on one GPU is taken as 100 s."""

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
def test_epoch_times_alone_accuse_nobody(published, speedup):
    assert published(speedup).cause is None


def test_epoch_times_alone_say_how_to_find_the_cause(published):
    assert "recipes scale run" in published(0.46).words


# --- Rows ------------------------------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(str.strip).filter(bool)
numbers = {"float": st.floats(1e-9, 1e15), "int": st.integers(1, 10**15), "str": text}


def column(kind: str):
    optional = "None" in kind
    found = numbers[kind.split(" ")[0]]
    return st.none() | found if optional else found


any_timing = st.builds(
    Timing, **{name: column(kind) for name, kind in Timing.__annotations__.items() if name != "scaling"}
).filter(lambda row: not row.step_time or row.step_time <= row.epoch_time)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
@quickly
@given(first=st.lists(any_timing, min_size=1, max_size=3), second=st.lists(any_timing, max_size=2))
def test_rows_that_were_written_are_read_back(tmp_path_factory, suffix, first, second):
    file = tmp_path_factory.mktemp("rows") / f"timings{suffix}"
    append(file, first)
    append(file, second)
    assert read([file]) == first + second


@pytest.fixture
def rows_of(tmp_path):
    """The rows read from a file with that text."""

    def rows(text: str, name: str = "mine.csv", encoding: str = "utf-8") -> list[Timing]:
        file = tmp_path / name
        file.write_text(text, encoding=encoding)
        return read([file])

    return rows


TWO = [Timing(1, 100.0, name="mine"), Timing(2, 60.0, name="mine")]


@pytest.mark.parametrize(
    "written",
    {
        "two columns": "num_processes,epoch_time\n1,100\n2,60\n",
        "no last newline": "num_processes,epoch_time\n1,100\n2,60",
        "spaces in the header": "num_processes , epoch_time\n1,100\n2, 60\n",
        "blank lines": "num_processes,epoch_time\n\n1,100\n   \n\n2,60\n\n",
        "empty rows of a spreadsheet": "num_processes,epoch_time\n1,100\n,\n2,60\n,\n",
        "other columns": "date,num_processes,epoch_time,note\nMonday,1,100,warm\nTuesday,2,60,\n",
        "cells without a column": "num_processes,epoch_time\n1,100,and,more\n2,60\n",
        "columns not filled": "num_processes,epoch_time,samples,accuracy\n1,100,,\n2,60\n",
    }.items(),
    ids=lambda item: item[0],
)
def test_a_csv_that_anyone_writes_is_read(rows_of, written):
    assert rows_of(written[1]) == TWO


def test_a_name_may_hold_any_line_separator(tmp_path):
    rows = [Timing(1, 100.0, name="two\u2028lines"), Timing(2, 60.0, name="two\nlines")]
    append(tmp_path / "mine.csv", rows)
    assert read([tmp_path / "mine.csv"]) == rows


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
def test_a_csv_of_a_spreadsheet_is_read(rows_of, newline):
    assert rows_of(newline.join(["num_processes,epoch_time", "1,100", "2,60", ""]), encoding="utf-8-sig") == TWO


def test_jsonl_that_anyone_writes_is_read(rows_of):
    lines = ['{"num_processes": 1, "epoch_time": 100, "note": []}', "", '{"num_processes": "2", "epoch_time": 60.0}']
    assert rows_of("\n".join(lines), "mine.jsonl") == TWO


@pytest.mark.parametrize("value", ["fast", "-1", "0", "nan", "inf", "", "12,5"])
@pytest.mark.parametrize("name", ["num_processes", "epoch_time"])
def test_a_value_that_cannot_be_is_named_with_its_file_and_line(rows_of, name, value):
    row = {"num_processes": "1", "epoch_time": "100", name: f'"{value}"'}
    with pytest.raises(UserError) as error:
        rows_of(",".join(row) + "\n1,100\n" + ",".join(row.values()) + "\n")
    (problem,) = error.value.problems
    assert problem.subject == name
    assert problem.source.endswith("mine.csv, line 3")


@pytest.mark.parametrize(
    "row",
    [{"num_processes": 1.5}, {"samples": 0}, {"loss": -1}, {"scaling": "both"}, {"step_time": 0}],
    ids=str,
)
def test_a_value_that_cannot_be_is_refused_in_any_column(rows_of, row):
    with pytest.raises(UserError) as error:
        rows_of(json.dumps({"num_processes": 1, "epoch_time": 100} | row), "mine.jsonl")
    assert [problem.subject for problem in error.value.problems] == [*row]


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    (tmp_path / "one.csv").write_text("num_processes,epoch_time\n1,fast\n2,60\n0,-3\n")
    (tmp_path / "two.jsonl").write_text('{"num_processes": 1}\nno json\n[]\n')
    with pytest.raises(UserError) as error:
        read([tmp_path / "one.csv", tmp_path / "two.jsonl", tmp_path / "missing.csv", tmp_path / "notes.txt"])
    found = [(problem.subject, problem.source.removeprefix(f"{tmp_path}/")) for problem in error.value.problems]
    assert found == [
        ("epoch_time", "one.csv, line 2"),
        ("num_processes", "one.csv, line 4"),
        ("epoch_time", "one.csv, line 4"),
        ("epoch_time", "two.jsonl, line 1"),
        ("FILE", "two.jsonl, line 2"),
        ("FILE", "two.jsonl, line 3"),
        ("FILE", ""),
        ("FILE", ""),
    ]


@pytest.mark.parametrize("text", ["", "num_processes,epoch_time\n"])
def test_a_file_without_rows_says_what_belongs_there(rows_of, text):
    with pytest.raises(UserError, match="holds no timings"):
        rows_of(text)


def test_a_csv_with_other_columns_is_not_added_to(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("num_processes,epoch_time\n1,100\n")
    with pytest.raises(UserError, match="no column accuracy"):
        append(file, [Timing(2, 60, name="", accuracy=0.9)])


# --- What a stranger's timings are taken for -------------------------------------------------------------------------


def words_of(rows: list[Timing]) -> str:
    return analyse(rows)[0].verdicts[-1].words


def test_weak_scaling_without_samples_is_of_as_many_as_processes():
    rows = [Timing(1, 100, scaling="weak"), Timing(2, 105, scaling="weak")]
    assert "95.2% efficiency: excellent" in words_of(rows)


def test_growing_samples_are_no_single_amount_of_work_for_amdahl():
    rows = [Timing(world, 100 + world, samples=1000 * world) for world in (1, 2, 4)]
    assert analyse(rows)[0].serial_fraction is None


def test_one_slow_epoch_of_two_does_not_contradict_itself():
    sizes = analyse([Timing(1, 100), Timing(1, 10), Timing(2, 50)])[0].sizes
    assert [size.speedup.median for size in sizes] == [1, pytest.approx(1.1)]


def test_a_verdict_says_how_sure_it_is():
    noisy = [Timing(1, time) for time in (100, 110, 90)] + [Timing(2, time) for time in (58, 66, 54)]
    assert "between good and excellent" in words_of(noisy)
    assert "(one timing)" in words_of([Timing(1, 100), Timing(2, 55)])


def test_time_outside_the_steps_is_named():
    row = dict(samples=1600, global_batch=16, step_time=0.3)
    assert "40 s of the 70 s lie outside the steps" in words_of([Timing(1, 70, **row), Timing(2, 70, **row)])


def test_contention_shows_without_weak_rows_at_the_same_micro_batch():
    one = Timing(1, 60, global_batch=16, micro_batch=4, step_time=0.6, no_sync_step=0.6, no_sync_step_max=0.6)
    two = replace(one, num_processes=2, epoch_time=57, step_time=0.57, no_sync_step=0.57)
    two = replace(two, no_sync_step_max=0.57)
    assert analyse([one, two])[0].verdicts[-1].cause == "contention"


@given(st.data())
@quickly
def test_a_cause_never_costs_more_than_a_step_lost(data):
    times = st.floats(0.01, 1)
    one = Timing(1, 60, global_batch=16, micro_batch=4, step_time=data.draw(times), no_sync_step=data.draw(times))
    two = Timing(2, 60, global_batch=16, micro_batch=4, step_time=data.draw(times), no_sync_step=data.draw(times))
    two = replace(two, no_sync_step_max=two.no_sync_step, communication=data.draw(times))
    found = analyse([one, two])[0].verdicts[-1]
    differences = [cause.seconds for cause in found.causes if cause.key in ("contention", "work")]
    assert sum(differences) <= (found.lost or 0) + 1e-9


def test_a_file_without_the_columns_says_so_once(rows_of):
    with pytest.raises(UserError) as error:
        rows_of("Num_Processes;epoch_time\n1;2\n2;1\n")
    assert len(error.value.problems) == 1 and "Num_Processes;epoch_time" in str(error.value)


@pytest.mark.parametrize("row", ["1,1e300", "1000000000000000000,1", "1,1e-300"])
def test_numbers_beyond_all_measure_are_refused(rows_of, row):
    with pytest.raises(UserError, match="beyond all measure"):
        rows_of(f"num_processes,epoch_time\n{row}\n")


def test_a_step_longer_than_its_epoch_is_refused(rows_of):
    with pytest.raises(UserError, match="does not fit"):
        rows_of("num_processes,epoch_time,step_time\n1,71.5,400\n")
