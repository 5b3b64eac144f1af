"""Files of timings: any valid file is read, rows are read back, mistakes are named."""

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.errors import UserError
from recipes.scaling.row import COLUMNS, PARTS, Link, Timing, from_columns, to_columns
from recipes.scaling.timings import append, parse_row, read, without_warm_up
from recipes.scaling.verdicts import analyse

quickly = settings(max_examples=50, deadline=None)

text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).map(str.strip).filter(bool)
numbers = {"float": st.floats(1e-9, 1e15), "int": st.integers(1, 10**15), "str": text}


def cells(names: Iterable[str]) -> dict[str, st.SearchStrategy]:
    """What may stand in each column."""
    kinds = {name: COLUMNS[name].kind.split(" ")[0] for name in names}
    return {name: st.just("weak") if name == "scaling" else numbers[kind] for name, kind in kinds.items()}


REQUIRED = ["num_processes", "epoch_time"]


def with_possible_parts(row: dict) -> dict:
    """The row with parts that fit into its step, and at most all of the communication hidden."""
    step = row.get("step_time", 1e15)
    parts = {name: min(row[name], step / 10) for name in [*PARTS, "data_wait_max"] if name in row}
    return row | parts | {name: min(row[name], 1.0) for name in ["overlap"] if name in row}


# Any columns may be filled: other tools write some of those that `train.py --measure` writes
# together.
any_columns = (
    st.fixed_dictionaries(cells(REQUIRED), optional=cells(set(COLUMNS) - set(REQUIRED)))
    .filter(lambda row: row.get("step_time", 0) <= row["epoch_time"])
    .map(lambda row: with_possible_parts(row))
)
any_timing = any_columns.map(from_columns)


@quickly
@given(any_columns)
def test_a_row_has_the_columns_that_were_filled_and_no_others(columns):
    row = from_columns(columns)
    filled = {name: value for name, value in to_columns(row).items() if value not in (None, "")}
    assert filled == {"name": "training", **columns}
    assert from_columns(to_columns(row)) == row


@quickly
@given(any_columns)
def test_a_file_keeps_the_names_and_values_of_its_columns(tmp_path_factory, columns):
    """Other tools read these files too."""
    file = tmp_path_factory.mktemp("rows") / "timings.jsonl"
    append(file, [parse_row(columns, "a file")])
    assert json.loads(file.read_text()) == {"name": "training", **columns}


def test_the_columns_of_a_new_csv_are_those_of_earlier_versions(tmp_path):
    append(tmp_path / "mine.csv", [Timing(1, 10.0)])
    assert (tmp_path / "mine.csv").read_text().splitlines()[0] == (
        "num_processes,epoch_time,name,epoch,samples,accuracy,recipe,scaling,global_batch,micro_batch,accumulation,"
        "tokens,loss,step_time,data_wait,forward,backward,communication,optimizer,logging,saving,other,data_wait_max,"
        "no_sync_step,no_sync_step_max,pass_overhead,overlap,syncs,collectives,sync_bytes,link_bandwidth,link_latency,"
        "peak_memory,hardware,engine,workers,cores,logging_steps,save_steps,eval_steps,command,applied,predicted,"
        "timed,step_p50,step_p99,other_load,slowest_rank,slowest_host,slowest_device,data_wait_rank"
    )


def test_what_is_measured_together_is_unknown_as_a_whole():
    row = parse_row({"num_processes": 2, "epoch_time": 10, "link_bandwidth": 1e9}, "a file")
    assert (row.link, row.exchange, row.no_sync) == (Link(bandwidth=1e9), None, None)


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
def test_an_impossible_value_is_named_with_its_file_and_line(rows_of, name, value):
    row = {"num_processes": "1", "epoch_time": "100", name: f'"{value}"'}
    with pytest.raises(UserError) as error:
        rows_of(",".join(row) + "\n1,100\n" + ",".join(row.values()) + "\n")
    (problem,) = error.value.problems
    assert problem.subject == name
    assert problem.source.endswith("mine.csv, line 3")


@pytest.mark.parametrize(
    "row",
    [
        {"num_processes": 1.5},
        {"samples": 0},
        {"loss": -1},
        {"scaling": "both"},
        {"step_time": 0},
        {"overlap": 1.5},
        {"name": [[]]},
        {"samples_per_second": 0},
    ],
    ids=str,
)
def test_an_impossible_value_is_refused_in_any_column(rows_of, row):
    with pytest.raises(UserError) as error:
        rows_of(json.dumps({"num_processes": 1, "epoch_time": 100} | row), "mine.jsonl")
    assert [problem.subject for problem in error.value.problems] == [*row]


def test_every_mistake_is_reported_at_once(tmp_path):
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


def test_a_csv_with_other_columns_gets_no_rows(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("num_processes,epoch_time\n1,100\n")
    with pytest.raises(UserError, match="no column accuracy"):
        append(file, [Timing(2, 60, name="", accuracy=0.9)])


def test_a_file_without_the_columns_says_so_once(rows_of):
    with pytest.raises(UserError) as error:
        rows_of("Num_Processes;epoch_time\n1;2\n2;1\n")
    assert len(error.value.problems) == 1 and "Num_Processes;epoch_time" in str(error.value)


@pytest.mark.parametrize("row", ["1,1e300", "1000000000000000000,1", "1,1e-300"])
def test_numbers_out_of_range_are_refused(rows_of, row):
    with pytest.raises(UserError, match="out of range"):
        rows_of(f"num_processes,epoch_time\n{row}\n")


@pytest.mark.parametrize(
    ("parts", "subject"),
    [
        ({"forward": 1.5}, "forward"),
        ({"data_wait_max": 2}, "data_wait_max"),
        ({"forward": 0.6, "backward": 0.6}, "step_time"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_into_their_step_are_refused(rows_of, parts, subject):
    with pytest.raises(UserError) as error:
        rows_of(json.dumps({"num_processes": 1, "epoch_time": 100, "step_time": 1, **parts}), "mine.jsonl")
    assert [problem.subject for problem in error.value.problems] == [subject]


def test_parts_that_were_rounded_are_read(rows_of):
    row = {"num_processes": 1, "epoch_time": 100, "step_time": 0.1, "forward": 0.034, "backward": 0.067}
    assert rows_of(json.dumps(row), "mine.jsonl")[0].parts.forward == 0.034


@pytest.mark.parametrize("depth", [10, 950, 985, 990, 992, 994, 1000, 100_000])
@pytest.mark.parametrize("name", ["epoch_time", "name"])
def test_a_deeply_nested_line_is_a_mistake(rows_of, name, depth):
    line = f'{{"num_processes": 1, "epoch_time": 1, "{name}": {"[" * depth}{"]" * depth}}}'
    with pytest.raises(UserError):
        rows_of(line, "mine.jsonl")


# --- Throughput ----------------------------------------------------------------------------------


def test_a_throughput_alone_is_enough(rows_of):
    rows = rows_of("num_processes,samples_per_second\n1,255\n4,691\n8,666\n")
    assert [row.timed for row in rows] == ["1000 samples"] * 3
    (series,) = analyse(rows)
    assert [size.samples_per_second.median for size in series.sizes] == pytest.approx([255, 691, 666])
    assert series.verdicts[-1].band == "negative scaling"


def test_tokens_per_second_scale_weakly_as_they_are(rows_of):
    (series,) = analyse(rows_of("num_processes,tokens_per_second,scaling\n1,1000,weak\n4,3600,weak\n"))
    assert series.sizes[-1].efficiency.median == pytest.approx(0.9)
    assert series.sizes[-1].tokens_per_second == pytest.approx(3600)


def test_a_throughput_beside_its_samples_gives_the_time(rows_of):
    assert rows_of("num_processes,samples_per_second,samples\n1,50,200\n")[0] == Timing(
        1, 4.0, name="mine", samples=200
    )


def test_a_throughput_beside_its_time_gives_the_samples(rows_of):
    assert rows_of("num_processes,epoch_time,samples_per_second\n1,4,50\n")[0].samples == 200


# --- Warm-up -------------------------------------------------------------------------------------


def test_the_first_rows_of_each_size_can_be_left_out():
    rows = [Timing(world, time) for world in (1, 2) for time in (90.0, 50.0, 51.0)]
    assert [row.epoch_time for row in without_warm_up(rows, 1)] == [50.0, 51.0] * 2


def test_a_warm_up_that_leaves_nothing_is_a_mistake():
    with pytest.raises(UserError, match="leaves nothing of training at 2 processes"):
        without_warm_up([Timing(1, 5.0), Timing(1, 4.0), Timing(2, 3.0)], 1)


def test_a_step_longer_than_its_epoch_is_refused(rows_of):
    with pytest.raises(UserError, match="does not fit"):
        rows_of("num_processes,epoch_time,step_time\n1,71.5,400\n")
