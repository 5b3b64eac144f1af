"""Files of timings, .csv or .jsonl: `recipes scale run` writes them, and so can anyone else."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unicodedata import category

from recipes.errors import Problem, UserError, mistake
from recipes.run import Settings
from recipes.scaling.row import COLUMNS, PARTS, Cells, Timing, from_columns, to_columns

SUFFIXES = (".csv", ".jsonl")
WARM_UP_STEPS = 3  # of each run, which are not timed
_LONGER = 1.001  # what rounding may add to a sum of times
_ROUNDED = 1.02  # and to the parts of a step, which people round to milliseconds
# Columns of a throughput, and what it counts.
_RATES = {"samples_per_second": "samples", "tokens_per_second": "tokens"}
_OF_A_RATE = 1000
_SHOWN = 200  # characters of a file's first line
_LARGEST = 1e15  # of any number in a file, and 1/_LARGEST the smallest


def name_of(run: Settings) -> str:
    """The name of a run's rows: its `run_name`, else the last part of its model's name."""
    model = run["model_name_or_path"]
    return run["run_name"] or (str(model).rstrip("/").rpartition("/")[2] if model else "demonstration")


def read(files: Iterable[str | Path]) -> list[Timing]:
    """The rows of all files; a row without a name gets the file's.

    Raises `UserError` with every mistake in them.
    """
    rows: list[Timing] = []
    problems: list[Problem] = []
    for file in map(Path, files):
        with _gathered(problems):
            for number, line in _lines(file):
                with _gathered(problems):
                    source = f"{file}, line {number}"
                    rows.append(parse_row({"name": file.stem, **_cells(line, source)}, source))
    if problems:
        raise UserError(*problems)
    if not rows:
        raise mistake("FILE", "holds no timings", "a .csv with num_processes and epoch_time, or run recipes scale run")
    return rows


@contextlib.contextmanager
def _gathered(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        problems += error.problems


def parse_row(row: Cells, source: str) -> Timing:
    """A row as a Timing, without unknown columns.

    Raises `UserError` with every value that is not possible.
    """
    known = {*COLUMNS, *_RATES}
    filled = {name: value for name, value in row.items() if name in known and value not in (None, "")}
    rated = any(name in filled for name in _RATES)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name in dict.fromkeys(["num_processes", *([] if rated else ["epoch_time"]), *filled]):
        with _gathered(problems):
            if name not in filled:
                or_rate = " or samples_per_second" if name == "epoch_time" else ""
                raise mistake(name, "is missing", f"a column {name}{or_rate}, filled in each row", source)
            values[name] = _value(name, filled[name], source)
    if problems:
        raise UserError(*problems)
    _from_rates(values)
    _require_possible(values, source)
    return from_columns(values)


def _from_rates(values: dict[str, Any]) -> None:
    """Throughput as the time of so many samples or tokens, in the columns that a row has.

    A throughput alone is the time of 1000. What `epoch_time` covers is then `timed`.
    """
    for rate_name, name in _RATES.items():
        rate = values.pop(rate_name, None)
        if rate is None:
            continue
        if "epoch_time" not in values:
            if name not in values:
                values |= {name: _OF_A_RATE, "timed": f"{_OF_A_RATE} {name}"}
            values["epoch_time"] = values[name] / rate
        values.setdefault(name, max(1, round(rate * values["epoch_time"])))


def _require_possible(values: dict[str, Any], source: str) -> None:
    """Raises `UserError` for a part that is longer than what it is a part of."""
    step = values.get("step_time")
    if step is None:
        return
    if step > _LONGER * values["epoch_time"]:
        what = f"a step of {step:g} s does not fit into an epoch_time of {values['epoch_time']:g} s"
        raise mistake("step_time", what, "both in seconds, epoch_time for all steps together", source)
    for name in (*PARTS, "data_wait_max"):
        if values.get(name, 0.0) > _ROUNDED * step:
            what = f"{values[name]:g} s do not fit into a step_time of {step:g} s"
            raise mistake(name, what, "seconds of one optimizer step, as step_time is", source)
    # Logging and saving are those of the process that writes: the others' parts run beside them.
    together = sum(values.get(name, 0.0) for name in PARTS if name not in ("logging", "saving"))
    if together > _ROUNDED * step:
        what = f"the parts of a step take {together:g} s, more than the step itself: {step:g} s"
        raise mistake("step_time", what, "parts that add up to the step", source)


def _value(name: str, value: Any, source: str) -> str | float:
    kind = "float" if name in _RATES else COLUMNS[name].kind
    if isinstance(value, list | dict):  # which may be nested too deeply to be shown
        raise mistake(name, "is a list or an object", "one number or text", source)
    if kind == "str":
        if name == "scaling" and value not in ("strong", "weak"):
            raise mistake(name, f"{value!r} is neither strong nor weak", "strong or weak", source)
        if any(category(letter) in ("Cc", "Cs") and not letter.isspace() for letter in str(value)):
            raise mistake(name, f"{value!r} cannot be printed", "text without control characters", source)
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise mistake(name, f"{value!r:.40} is not a number", "a number, such as 12.5", source) from None
    positive = name in ("num_processes", "epoch_time", "samples", "step_time", "global_batch", *_RATES)
    if math.isfinite(number) and (number > _LARGEST or 0 < number < 1 / _LARGEST):
        raise mistake(name, f"{value!r} is out of range", "a number in seconds, bytes or counts", source)
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise mistake(
            name, f"{value!r} is not possible", f"a number {'above' if positive else 'of at least'} 0", source
        )
    if name == "overlap" and number > 1:
        raise mistake(name, f"{value!r} is not possible", "a share of the communication, from 0 to 1", source)
    if kind.startswith("int"):
        if number != int(number):
            raise mistake(name, f"{value!r} is not a whole number", "a count", source)
        return int(number)
    return number


def without_warm_up(rows: Sequence[Timing], count: int) -> list[Timing]:
    """The rows without the first `count` of each training and size, in the order of the files.

    Raises `UserError` where none is left.
    """
    groups: dict[tuple, list[Timing]] = {}
    for row in rows:
        key = (row.name, row.num_processes, row.recipe, row.scaling, row.batch.total, row.applied)
        groups.setdefault(key, []).append(row)
    for (name, world, *_), group in groups.items():
        if len(group) <= count:
            what = f"{count} leaves nothing of {name} at {world} processes, which has {len(group)} rows"
            raise mistake("warmup", what, f"at most {len(group) - 1}")
    kept = {id(row) for group in groups.values() for row in group[count:]}
    return [row for row in rows if id(row) in kept]


def _lines(file: Path) -> list[tuple[int, str | Cells]]:
    """The lines that are not empty, with their numbers; those of a .csv are split into cells."""
    if file.suffix not in SUFFIXES:
        raise mistake("FILE", f"{file} is neither .csv nor .jsonl", "a .csv or .jsonl file")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise mistake("FILE", f"{file} cannot be read: {error}", "a readable .csv or .jsonl file") from None
    if file.suffix == ".jsonl":
        return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    try:
        return _csv_rows(file, text)
    except csv.Error as error:  # such as a text above 131,072 letters, where a quotation is not closed
        raise mistake("FILE", f"{file} cannot be read: {error}", "each row on a line, with closed quotes") from None


def _csv_rows(file: Path, text: str) -> list[tuple[int, str | Cells]]:
    lines = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    columns = [name.strip() for name in lines.fieldnames or ()]
    needed = ["num_processes", *([] if any(name in columns for name in _RATES) else ["epoch_time"])]
    lacking = [name for name in needed if name not in columns]
    if columns and lacking:
        what = f"{file} has no column {' and no column '.join(lacking)}, but {', '.join(columns)[:_SHOWN]}"
        raise mistake("FILE", what, "a first line such as num_processes,epoch_time,samples, separated by commas")
    rows = [(lines.line_num, {str(key).strip(): value for key, value in row.items()}) for row in lines]
    return [(number, row) for number, row in rows if any(row.values())]


def _cells(line: str | Cells, source: str) -> Cells:
    if not isinstance(line, str):
        return line
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise mistake("FILE", f"is not JSON: {error}", "one JSON object per line", source) from None
    if not isinstance(row, dict):
        raise mistake("FILE", f"{line[:40]!r} is not a JSON object", "one JSON object per line", source)
    return row


def append(file: str | Path, rows: Iterable[Timing]) -> None:
    """Add rows to a .csv or .jsonl, which is created if missing.

    Raises `UserError` if it cannot be written, or is a .csv without the columns that the rows have.
    """
    file = Path(file)
    filled = [{name: value for name, value in to_columns(row).items() if value not in (None, "")} for row in rows]
    columns = require_room(file, {name for row in filled for name in row})
    with file.open("a", encoding="utf-8", newline="") as stream:
        if columns is None:
            stream.write("".join(json.dumps(row) + "\n" for row in filled))
            return
        writer = csv.DictWriter(stream, columns)
        if not stream.tell():
            writer.writeheader()
        writer.writerows(filled)


def require_room(file: str | Path, names: Iterable[str] = tuple(COLUMNS)) -> list[str] | None:
    """The columns of a .csv, None for a .jsonl.

    Raises `UserError` if rows with these columns cannot be added.
    """
    file = Path(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            begun = stream.tell() > 0
    except OSError as error:
        raise mistake("FILE", f"{file} cannot be written: {error.strerror}", "choose a writable folder") from None
    if file.suffix == ".jsonl":
        return None
    columns = _header(file) if begun else list(COLUMNS)
    lacking = sorted(set(names) - set(columns))
    if lacking:
        raise mistake("FILE", f"{file} has no column {lacking[0]}", "another file, or a .jsonl")
    return columns


def _header(file: Path) -> list[str]:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            return next(csv.reader(stream), [])
    except (csv.Error, UnicodeDecodeError) as error:
        raise mistake("FILE", f"{file} cannot be read: {error}", "another file, or a .jsonl") from None
