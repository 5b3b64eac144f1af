"""The columns of data say how each row is read. Those of a local file are known before anything is
imported or launched.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path

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
_BEGIN = 10 << 20  # `datasets` takes the columns in these bytes for those of the whole JSON file


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


def column_problems(run: Settings, part: Part, columns: Collection[str]) -> list[Problem]:
    """The reasons why no row with these columns can be read."""
    if absent := [name for name in part.columns if name not in columns]:
        what = f"{part.name} has no column {absent[0]!r}; it has {', '.join(columns)}"
        flag = "dataset_columns" if run["dataset_columns"] else "dataset_name"
        return [Problem(flag, what, "columns with names that are there")]
    has = new_names(columns, part).values()
    if run["task"] == "sequence_classification":
        fields, or_else = ["dataset_text_field", "dataset_label_field"], ""
    else:
        fields = [] if formats(run, has) else ["dataset_text_field"]
        or_else = f", or --dataset_columns OLD=NEW, to have {_FORMATS}"
    said = f"{part.name or 'the data'} has {', '.join(has)}"
    return [
        Problem(field, f"there is no column {run[field]!r}; {said}", f"--{field} with one of them{or_else}")
        for field in fields
        if run[field] not in has
    ]


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
            columns = _columns_of(file)
            found += column_problems(run, part, columns) if columns else []
    return [run.with_source(problem) for problem in found]


def _columns_of(file: Path) -> list[str]:
    """The columns of a file; empty if they are unknown."""
    kind = file_kind(file)
    if kind == "text":
        return ["text"]
    try:
        if kind == "parquet":
            from pyarrow import parquet  # which takes a tenth of a second

            return parquet.read_schema(file).names
        opened = gzip.open if file.suffix == ".gz" else open
        with opened(file, "rt", encoding="utf-8-sig") as stream:
            if kind == "csv":
                return next(csv.reader(stream), [])
            begin = stream.read(_BEGIN)
        lines = begin.split("\n")[: -1 if len(begin) == _BEGIN else None]  # the last one may be incomplete
        rows = map(json.loads, filter(str.strip, lines))
        return list(dict.fromkeys(chain.from_iterable(map(dict.keys, rows))))
    # Not UTF-8, no JSON lines, no objects, cut off.
    except (OSError, ValueError, TypeError, RecursionError, EOFError, csv.Error, zlib.error):
        return []
