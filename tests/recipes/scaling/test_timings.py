"""Files of timings: any valid file is read, rows are read back, mistakes are named."""

import json

import pytest

from recipes.errors import UserError
from recipes.scaling.analyse import analyse
from recipes.scaling.timings import COLUMNS, Timing, append, parse_row, read


def test_timing_rows_written_as_jsonl_are_read_back_with_the_same_column_names(tmp_path):
    """Other tools read these files too."""
    filled = {"int": 3, "float": 0.25, "str": "a, b"}
    row = {name: filled[kind.split(" ")[0]] for name, kind in COLUMNS.items()} | {"scaling": "weak"}
    append(tmp_path / "timings.jsonl", [parse_row(row, "a file"), Timing(1, 1e-9)])
    lines = [json.loads(line) for line in (tmp_path / "timings.jsonl").read_text().splitlines()]
    assert lines == [row, {"num_processes": 1, "epoch_time": 1e-9, "name": "training"}]
    assert read([tmp_path / "timings.jsonl"]) == [Timing(**row), Timing(1, 1e-9)]


@pytest.fixture
def rows_of(tmp_path):
    """The rows read from a file with that text."""

    def rows(text: str, name: str = "mine.csv", encoding: str = "utf-8") -> list[Timing]:
        file = tmp_path / name
        file.write_text(text, encoding=encoding)
        return read([file])

    return rows


TWO = [Timing(1, 100.0, name="mine"), Timing(2, 60.0, name="mine")]


CSV = {
    "spaces in the header": "num_processes , epoch_time\n1,100\n2, 60\n",
    "blank lines": "num_processes,epoch_time\n\n1,100\n   \n\n2,60\n\n",
    "empty rows of a spreadsheet": "num_processes,epoch_time\r\n1,100\r\n,\r\n2,60\r\n,\r\n",
    "other columns": "date,num_processes,epoch_time,note\nMonday,1,100,warm\nTuesday,2,60,\n",
    "cells without a column": "num_processes,epoch_time\n1,100,and,more\n2,60\n",
    "columns not filled": "num_processes,epoch_time,samples,name\n1,100,,\n2,60\n",
}


@pytest.mark.parametrize("written", CSV.values(), ids=CSV)
def test_a_handwritten_csv_of_timings_is_read_despite_blank_rows_and_extra_columns(rows_of, written):
    assert rows_of(written, encoding="utf-8-sig") == TWO


def test_a_handwritten_jsonl_of_timings_is_read_despite_blank_lines_and_extra_keys(rows_of):
    lines = ['{"num_processes": 1, "epoch_time": 100, "note": []}', "", '{"num_processes": "2", "epoch_time": 60.0}']
    assert rows_of("\n".join(lines), "mine.jsonl") == TWO


@pytest.mark.parametrize(
    "row",
    [
        {"epoch_time": "fast"},
        {"epoch_time": "inf"},
        {"num_processes": 0},
        {"num_processes": 1.5},
        {"scaling": "both"},
        {"samples_per_second": 0},
        {"samples": 0},
    ],
    ids=str,
)
def test_an_impossible_value_in_timings_is_refused_with_its_file_and_line(rows_of, row):
    good = {"num_processes": 1, "epoch_time": 100}
    with pytest.raises(UserError) as error:
        rows_of(f"{json.dumps(good)}\n{json.dumps(good | row)}", "mine.jsonl")
    (problem,) = error.value.problems
    assert problem.subject == next(iter(row)) and problem.source.endswith("mine.jsonl, line 2")


def test_weak_scaling_rows_without_samples_are_refused(rows_of):
    """Without samples, epochs of one data set would read as work that grows with the processes."""
    with pytest.raises(UserError, match="samples: is missing"):
        rows_of("num_processes,epoch_time,scaling\n1,100,weak\n2,77,weak\n")


def test_mistakes_in_all_rows_of_a_timings_file_are_reported_at_once(rows_of):
    with pytest.raises(UserError) as error:
        rows_of("num_processes,epoch_time\n1,fast\n2,60\n0,3\n4,\n")
    found = [(problem.subject, problem.source.rpartition(" ")[2]) for problem in error.value.problems]
    assert found == [("epoch_time", "2"), ("num_processes", "4"), ("epoch_time", "5")]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("mine.csv", "", "holds no timings"),
        ("mine.csv", "num_processes,epoch_time\n", "holds no timings"),
        ("mine.csv", "Num_Processes;epoch_time\n1;2\n2;1\n", "lacks num_processes; its columns: Num_Processes;epoch"),
        ("mine.jsonl", '{"num_processes": 1, "epoch_time": 1}\n[]\nno json', "line 2, cannot be read"),
        ("missing/mine.csv", None, "cannot be read"),
    ],
)
def test_a_timings_file_without_valid_rows_is_refused_with_the_columns_it_needs(tmp_path, name, text, says):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says) as error:
        read([tmp_path / name])
    assert "num_processes,epoch_time,samples" in str(error.value)


# --- Throughput ----------------------------------------------------------------------------------


def test_a_throughput_column_is_enough_and_completes_missing_samples_or_epoch_time(rows_of):
    rows = rows_of("num_processes,samples_per_second\n1,255\n4,691\n8,666\n")
    assert [row.timed for row in rows] == ["1000 samples"] * 3
    (series,) = analyse(rows)
    assert [size.samples_per_second.median for size in series.sizes] == pytest.approx([255, 691, 666])
    (series,) = analyse(rows_of("num_processes,tokens_per_second,scaling\n1,1000,weak\n4,3600,weak\n"))
    assert series.sizes[-1].efficiency.median == pytest.approx(0.9)
    assert rows_of("num_processes,samples_per_second,samples\n1,50,200\n")[0].epoch_time == 4
    assert rows_of("num_processes,epoch_time,samples_per_second\n1,4,50\n")[0].samples == 200
