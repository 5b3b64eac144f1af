"""Find the format of rows by their columns. Columns of local files are read before the launch."""

import contextlib
import csv
from collections.abc import Collection, Iterable
from io import TextIOWrapper
from pathlib import Path

from recipes.errors import Problem, raise_errors
from recipes.mixture import Part, files_of, parts_of_run, paths_of
from recipes.rules.data_and_model import file_kind
from recipes.run import RunSpec, Settings
from recipes.run.files import files_in, nearest

Format = tuple[str, ...]  # the columns that a format needs; the last column holds the content to learn

IDS = ("input_ids",)
CHATS = (("messages",), ("conversations",), ("conversation",))  # OpenAI and TRL; ShareGPT; LMSYS and WildChat
COMPLETIONS = ("prompt", "completion")
ALPACA = ("instruction", "output")
LEARNED_ONLY = {"assistant_only_loss": "messages", "completion_only_loss": "prompt and completion"}  # flag -> columns

_FORMATS = "messages, conversations, prompt and completion, instruction and output, input_ids or a text column"
_BEGIN = 10 << 20  # `datasets` reads the columns of a JSON file from these first bytes


def formats(run: Settings, columns: Collection[str]) -> list[Format]:
    """List the formats that these columns allow (for a classifier, only text). A row is read in the
    first format whose last column is not null. The column `text` is tried last, but a text column
    of another name is tried first.
    """
    text = run["dataset_text_field"]
    if run["task"] == "sequence_classification":
        return [(text,)]
    others = [one for one in (IDS, *CHATS, COMPLETIONS, ALPACA) if text not in one]
    ordered = [*others, (text,)] if text == "text" else [(text,), *others]
    return [found for found in ordered if set(found) <= set(columns)]


def new_names(names: Iterable[str], part: Part) -> dict[str, str]:
    """Map old column names to new names. Leave out a column if another column gets its name."""
    new = part.columns
    return {name: new.get(name, name) for name in names if name in new or name not in new.values()}


def column_problems(run: Settings, part: Part, columns: Collection[str]) -> list[Problem]:
    """Return the reasons why rows with these columns cannot be read, and advice on labels."""
    # Excel separates columns by semicolons in countries that write 0,5 for a half.
    only = "".join(columns) if len(columns) == 1 else ""
    if separator := next((sign for sign in ";\t" if sign in only), ""):
        what = f"{part.name} separates its columns by {separator!r}; only commas are read"
        fix = f"run pandas.read_csv({part.name!r}, sep={separator!r}).to_csv({part.name!r}, index=False)"
        return [Problem("dataset_name", what, fix)]
    paths = paths_of(part.name)
    kinds = {file: file_kind(file) for file in (files_in(paths[0]) if paths and paths[0].is_dir() else paths)}
    if {*kinds.values()} - {None} == {"csv"} and (wrong := next(filter(_is_shifted, kinds), None)):
        what = f"{wrong} has more cells in its first row than in its header: a comma in a text needs quotes"
        fix = 'put each text in quotes ("Hello, dear",1), and end no row with a comma'
        return [Problem("dataset_name", what, fix)]
    if absent := [name for name in part.columns if name not in columns]:
        what = f"{part.name} has no column {absent[0]!r}; its columns are {', '.join(columns)}"
        flag = "dataset_columns" if run["dataset_columns"] else "dataset_name"
        old, new = nearest(absent[0], columns) or "NAME", part.columns[absent[0]]
        return [Problem(flag, what, f"write {old}={new}: the name in the data comes first")]
    has = new_names(columns, part).values()
    said = f"{part.name or 'the data'} has {', '.join(has)}"
    if run["task"] == "sequence_classification":
        fields = ["dataset_text_field", "dataset_label_field"]
        instead = "rename columns, as in --dataset_columns review=text sentiment=label; or "
    else:
        found = formats(run, has)
        is_text = found == [(run["dataset_text_field"],)]
        fields = [] if found else ["dataset_text_field"]
        instead = f"rename columns, as in --dataset_columns question=prompt answer=completion, to get {_FORMATS}; or "
        for flag, needed in LEARNED_ONLY.items():
            if run[flag] and is_text:
                return [Problem(flag, f"{said}, and no {needed}", f"use data with {needed}, or --{flag} false")]
        if is_text and run["dataset_label_field"] in has:
            what = f"{said}: --task {run['task']} learns the text and ignores {run['dataset_label_field']}"
            return [Problem("task", what, "--task sequence_classification, to learn the labels", severity="advice")]
    return [
        Problem(field, f"there is no column {run[field]!r}; {said}", f"{instead}set --{field} to an existing column")
        for field in fields
        if run[field] not in has
    ]


# --- Before the libraries are imported ------------------------------------------------------------


def require_columns(run: RunSpec) -> list[Problem]:
    """Check the columns of local files. Return the advice, or raise `UserError` with all errors."""
    return raise_errors(check_columns(run))


def check_columns(run: RunSpec) -> list[Problem]:
    """Return the problems with the columns of local files. Only the first file of each data set
    is read. The training itself checks folders, Hub data and files that cannot be read here.
    """
    found = []
    for part in parts_of_run(run):
        for file in files_of(part.name)[:1]:
            columns = _columns_of(file)
            found += column_problems(run, part, columns) if columns else []
    return [run.with_source(problem) for problem in found]


def _is_shifted(file: Path) -> bool:
    """True if the first row of a .csv has more cells than the header: pandas would take the first
    cells for row names, and shift the columns. One number in front is allowed: R writes row names.
    """
    from pyarrow import input_stream

    with contextlib.suppress(OSError, ValueError, csv.Error), input_stream(file) as stream:
        rows = filter(None, csv.reader(TextIOWrapper(stream, "utf-8-sig")))  # without blank lines
        header, row = next(rows, []), next(rows, [])
        return bool(row) and len(row) > len(header) + row[0].isdigit()
    return False


def _columns_of(file: Path) -> list[str]:
    """Return the columns of a file; empty if they are unknown."""
    kind = file_kind(file)
    if kind == "text":
        return ["text"]
    from pyarrow import input_stream, json, parquet  # imported here, because that takes a tenth of a second

    try:
        if kind == "parquet":
            return parquet.read_schema(file).names
        with input_stream(file) as stream:  # decompresses
            if kind == "csv":
                return next(filter(None, csv.reader(TextIOWrapper(stream, "utf-8-sig"))), [])
            return json.open_json(stream, json.ReadOptions(block_size=_BEGIN)).schema.names
    except (OSError, ValueError, csv.Error):  # the data's reader reports the error
        return []
