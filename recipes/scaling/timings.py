"""Timings of trainings at several world sizes: rows of a CSV or JSONL that anyone can write, and `scale run` does."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unicodedata import category

from recipes.errors import Problem, UserError, mistake
from recipes.scaling.row import COLUMNS, Timing, from_columns, to_columns

SUFFIXES = (".csv", ".jsonl")
WARM_UP_STEPS = 3  # of each run, which are not timed


_LONGER = 1.001  # what rounding may add to a sum of times
_SHOWN = 200  # letters of a file's first line
_MOST = 1e15  # of anything that is measured here


def name_of(run: Mapping[str, Any]) -> str:
    """What the rows of a run are called: its `run_name`, else the last part of its model's name."""
    model = run["model_name_or_path"]
    return run["run_name"] or (str(model).rstrip("/").rpartition("/")[2] if model else "demonstration")


def read(files: Iterable[str | Path]) -> list[Timing]:
    """The rows of all files; where they name no training, the file's name does. Raises `UserError` with every error."""
    rows: list[Timing] = []
    problems: list[Problem] = []
    for file in map(Path, files):
        with _gathered(problems):
            for number, line in _lines(file):
                with _gathered(problems):
                    source = f"{file}, line {number}"
                    rows.append(timing({"name": file.stem, **_row(line, source)}, source))
    if problems:
        raise UserError(*problems)
    if not rows:
        raise mistake("FILE", "holds no timings", "a CSV with num_processes and epoch_time, or recipes scale run")
    return rows


@contextlib.contextmanager
def _gathered(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        problems += error.problems


def timing(row: Mapping[str, Any], source: str) -> Timing:
    """A row as a Timing; columns that are not ours are left out. Raises `UserError` with every value that cannot be."""
    filled = {name: value for name, value in row.items() if name in COLUMNS and value not in (None, "")}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name in dict.fromkeys(["num_processes", "epoch_time", *filled]):
        with _gathered(problems):
            if name not in filled:
                raise mistake(name, "is missing", f"a column {name}, filled in each row", source)
            values[name] = _value(name, filled[name], source)
    if problems:
        raise UserError(*problems)
    if values.get("step_time", 0) > _LONGER * values["epoch_time"]:
        what = f"a step of {values['step_time']:g} s does not fit in {values['epoch_time']:g} s"
        raise mistake("step_time", what, "both in seconds, epoch_time of all its steps", source)
    return from_columns(values)


def _value(name: str, value: Any, source: str) -> Any:
    kind = COLUMNS[name].kind
    if kind == "str":
        if name == "scaling" and value not in ("strong", "weak"):
            raise mistake(name, f"{value!r} is neither strong nor weak", "one of them", source)
        if any(category(letter) in ("Cc", "Cs") and not letter.isspace() for letter in str(value)):
            raise mistake(name, f"{value!r} holds letters that cannot be printed", "a name without them", source)
        return str(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise mistake(name, f"{value!r} is no number", "a number, such as 12.5", source) from None
    positive = name in ("num_processes", "epoch_time", "samples", "step_time", "global_batch")
    if math.isfinite(number) and (number > _MOST or 0 < number < 1 / _MOST):
        raise mistake(name, f"{value!r} is beyond all measure", "seconds, bytes or a count", source)
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise mistake(name, f"{value!r} cannot be", f"a number {'above' if positive else 'of at least'} 0", source)
    if kind.startswith("int"):
        if number != int(number):
            raise mistake(name, f"{value!r} is no whole number", "a count", source)
        return int(number)
    return number


def _lines(file: Path) -> list[tuple[int, str | Mapping[str, Any]]]:
    """The lines that hold something, with their numbers: a .csv's taken apart."""
    if file.suffix not in SUFFIXES:
        raise mistake("FILE", f"{file} is neither .csv nor .jsonl", "a file of either kind")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise mistake("FILE", f"{file} cannot be read: {error}", "a .csv or .jsonl of timings") from None
    if file.suffix == ".jsonl":
        return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    lines = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    columns = [name.strip() for name in lines.fieldnames or ()]
    lacking = [name for name in ("num_processes", "epoch_time") if name not in columns]
    if columns and lacking:
        what = f"{file} has no column {' and no column '.join(lacking)}, but {', '.join(columns)[:_SHOWN]}"
        raise mistake("FILE", what, "a first line such as num_processes,epoch_time,samples, with commas")
    rows = [(lines.line_num, {str(key).strip(): value for key, value in row.items()}) for row in lines]
    return [(number, row) for number, row in rows if any(row.values())]


def _row(line: str | Mapping[str, Any], source: str) -> Mapping[str, Any]:
    if not isinstance(line, str):
        return line
    try:
        row = json.loads(line)
    except ValueError as error:
        raise mistake("FILE", f"is no JSON: {error}", "one object a line", source) from None
    if not isinstance(row, dict):
        raise mistake("FILE", f"{line[:40]!r} is no object", "one object a line", source)
    return row


def append(file: str | Path, rows: Iterable[Timing]) -> None:
    """Add rows to a .csv or .jsonl, which is begun where it is not there.

    Raises `UserError` where it cannot be written, or is a .csv without the columns that the rows have.
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
    """Raises `UserError` where columns of these names cannot be added to the file; returns a .csv's columns."""
    file = Path(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            begun = stream.tell() > 0
    except OSError as error:
        raise mistake("FILE", f"{file} cannot be written: {error.strerror}", "a file in a folder that can") from None
    if file.suffix == ".jsonl":
        return None
    columns = _header(file) if begun else list(COLUMNS)
    lacking = sorted(set(names) - set(columns))
    if lacking:
        raise mistake("FILE", f"{file} has no column {lacking[0]}", "another file, or a .jsonl")
    return columns


def _header(file: Path) -> list[str]:
    with file.open(encoding="utf-8", newline="") as stream:
        return next(csv.reader(stream))
