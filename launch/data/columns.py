"""The columns of data say how each row is read. Those of a local file are known before anything is
imported or launched.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO

from recipes.errors import Problem, UserError
from recipes.mixture import Part, files_of, parts_of_run
from recipes.rules.data_and_model import file_kind
from recipes.run import RunSpec, Settings

Format = tuple[str, ...]  # the columns that it must have; the last one holds what is learned

IDS = ("input_ids",)
CHATS = (("messages",), ("conversations",), ("conversation",))  # OpenAI and TRL; ShareGPT; LMSYS and WildChat
COMPLETIONS = ("prompt", "completion")
ALPACA = ("instruction", "output")

_FORMATS = "messages, conversations, prompt and completion, instruction and output, input_ids or a text column"
_FIRST_BYTES = 10 << 20  # `datasets` takes the columns in these for those of the whole JSON file


def formats(run: Settings, columns: Collection[str]) -> list[Format]:
    """The formats that rows with these columns may have: each row has the first with a value in it.

    Texts come last, unless another column than the default was named: that one was asked for.
    """
    text = run["dataset_text_field"]
    if run["task"] == "sequence_classification":
        return [(text,)]
    others = [one for one in (IDS, *CHATS, COMPLETIONS, ALPACA) if text not in one]
    ordered = [*others, (text,)] if text == "text" else [(text,), *others]
    return [found for found in ordered if set(found) <= set(columns)]


def new_names(names: Iterable[str], part: Part) -> dict[str, str]:
    """Old name -> new name. A column is left out if another one gets its name."""
    new = part.columns
    return {name: new.get(name, name) for name in names if name in new or name not in new.values()}


def column_problems(run: Settings, part: Part, columns: Mapping[str, bool]) -> list[Problem]:
    """The reasons why no row with these columns can be read. True marks a column of texts."""
    if absent := [name for name in part.columns if name not in columns]:
        what = f"{part.name} has no column {absent[0]!r}; it has {', '.join(columns)}"
        flag = "dataset_columns" if run["dataset_columns"] else "dataset_name"
        return [Problem(flag, what, "columns with names that are there")]
    has = {new: columns[old] for old, new in new_names(columns, part).items()}
    said, texts = f"{part.name or 'the data'} has {', '.join(has)}", [name for name, is_text in has.items() if is_text]
    if run["task"] == "sequence_classification":
        return [
            Problem(flag, f"there is no column {run[flag]!r}; {said}", f"--{flag} with one of them")
            for flag in ("dataset_text_field", "dataset_label_field")
            if run[flag] not in has
        ]
    if formats(run, has):
        return []
    named = f"--dataset_text_field with one of {', '.join(texts)}; or " if texts else ""
    what = f"there is no column {run['dataset_text_field']!r}; {said}"
    return [Problem("dataset_text_field", what, f"{named}--dataset_columns OLD=NEW, to have {_FORMATS}")]


# --- Before anything is imported ------------------------------------------------------------------


def require_columns(run: RunSpec) -> None:
    """Raises `UserError` with everything that is wrong with the columns of local files."""
    if found := check_columns(run):
        raise UserError(*found)


def check_columns(run: RunSpec) -> list[Problem]:
    """The problems with the columns of local files. A folder, the Hub and a file that cannot be
    read are left to the training.
    """
    found = []
    for part in parts_of_run(run):
        for file in files_of(part.name)[:1]:
            columns = _columns_of(file, 1)  # the first row has all of them, mostly
            if columns and column_problems(run, part, columns):
                columns = _columns_of(file)
            found += column_problems(run, part, columns) if columns else []
    return [run.with_source(problem) for problem in found]


def _columns_of(file: Path, rows: int | None = None) -> dict[str, bool]:
    """The columns in the first rows of a file; empty if they are unknown."""
    kind = file_kind(file)
    if kind == "text":
        return {"text": True}
    try:
        if kind == "parquet":
            from pyarrow import parquet  # which takes a tenth of a second

            return {field.name: "string" in str(field.type) for field in parquet.read_schema(file)}
        opened = gzip.open if file.suffix == ".gz" else open
        with opened(file, "rt", encoding="utf-8-sig") as stream:
            found = csv.DictReader(stream) if kind == "csv" else map(json.loads, _lines(stream))
            columns: dict[str, bool] = {}
            for row in islice(found, rows or (1 if kind == "csv" else None)):
                names = [name for name, _ in row.items() if name is not None]  # None: the surplus of a CSV's row
                columns |= {name: isinstance(row[name], str) or columns.get(name, False) for name in names}
            return columns
    # Not UTF-8, no JSON lines, no rows of names, cut off.
    except (OSError, ValueError, AttributeError, RecursionError, EOFError, csv.Error, zlib.error):
        return {}


def _lines(stream: IO[str]) -> Iterator[str]:
    """The lines of a JSON file whose columns `datasets` takes for those of all lines."""
    left = _FIRST_BYTES
    while left > 0 and (line := stream.readline(left)):
        if line.strip():
            yield line
        left -= len(line)
