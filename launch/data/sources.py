"""Read rows, not yet tokenized, from files, a folder, the Hub or the demonstration."""

import contextlib
import glob
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow
from datasets import Dataset, DatasetBuilder, DatasetDict, Features, IterableDataset, ReadInstruction
from datasets.packaged_modules.csv.csv import Csv
from datasets.table import table_cast
from huggingface_hub import HfApi
from pandas._libs.parsers import STR_NA_VALUES

from launch.data.columns import column_problems, new_names
from launch.data.demo import demo_corpus, held_out
from launch.terminal import console, plural, print_note
from recipes.errors import StreamBroke, UserError, mistake, one_line, raise_errors
from recipes.mixture import Part, parts_of, paths_of
from recipes.rules.data_and_model import file_kind, nothing_to_evaluate_on
from recipes.run import Json, Settings
from recipes.run.files import files_in

_WHOLE = "use complete, well-formed files in UTF-8 whose rows all have the columns and types of the first row"
_ON_HUB = "check spelling, --dataset_config, network and `hf auth login`; paths are relative to the current folder"


# --- Splits --------------------------------------------------------------------------------------


def wanted_splits(run: Settings, part: Part, names: Sequence[str]) -> tuple[dict[str, str], dict[str, float]]:
    """Map `dataset_train_split` and, if the run evaluates, `dataset_test_split` to splits of this
    part of the data. Also map each of its splits to how many rows the run reads (inf: all).

    Raises `UserError` for a missing split, and if there is no split to evaluate on, except in a
    mixture, where another part may have such a split.
    """
    wanted = {"dataset_train_split": part.split or run["dataset_train_split"]}
    if run["eval_strategy"] != "no":
        held_out = run["dataset_test_split"] or next((name for name in ("test", "validation") if name in names), None)
        if held_out:
            wanted["dataset_test_split"] = held_out
        elif not parts_of(run["dataset_name"])[1:]:
            raise UserError(nothing_to_evaluate_on(f"the data has {', '.join(names)}", run["dataset_streaming"]))
    needed: dict[str, float] = {}
    for flag, split in wanted.items():
        for piece in _parts(dict.fromkeys(names, 10**12), flag, split):  # even 1 % of 10**12 exceeds 10**9: read all
            needed[piece.splitname] = max(needed.get(piece.splitname, 0), piece.to if piece.to < 10**9 else math.inf)
    return wanted, needed


def take(splits: Mapping[str, Dataset], flag: str, wanted: str) -> Dataset:
    """Return the rows of a split such as `train[:10]+test`. An empty split raises `UserError`."""
    parts = _parts({name: len(split) for name, split in splits.items()}, flag, wanted)
    pieces = [splits[part.splitname].select(range(part.from_, part.to) or []) for part in parts]
    rows = datasets.concatenate_datasets(pieces)
    if not len(rows):
        listed = ", ".join(f"{name} ({len(split):,} rows)" for name, split in splits.items())
        percent = "" if "%" in wanted or "[" not in wanted else "; for percent, write train[80%:]"
        raise mistake(flag, f"the split {wanted!r} is empty", f"name another split: {listed}{percent}")
    return rows


def _parts(rows: Mapping[str, int], flag: str, wanted: str) -> list:
    """Return the row ranges of a split such as `train[:95%]`. A wrong split raises `UserError`."""
    try:
        return ReadInstruction.from_spec(wanted).to_absolute(rows)
    except (ValueError, AssertionError):
        what = f"there is no split {wanted!r}; the data has {', '.join(rows)}"
        raise mistake(flag, what, "name one of these splits, or a slice of one") from None


# --- Which version of the data -------------------------------------------------------------------


def file_versions(name: str) -> list | None:
    """Return each file's path, size, mtime and ctime, to identify local data; None for Hub data.
    `rsync -t` and `tar` set back the mtime, but no program can set back the ctime.
    """
    if not (paths := paths_of(name)):
        return None
    found = [(file, file.stat()) for file in (files_in(paths[0]) if paths[0].is_dir() else paths)]
    return [(str(file.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in found]


def newest_commit(name: str) -> str | None:
    """Return a Hub data set's newest commit; None for other data, or if the Hub is unreachable."""
    if not name or paths_of(name) or datasets.config.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(name, timeout=30).sha
    except Exception:  # the reader then reports why, or reads the cache of an earlier start
        return None


# --- Reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A split of one data set (`part`), read as Arrow tables on demand. `features` are the renamed
    columns and their types in the first rows. Later rows must fit these types.
    """

    part: Part
    rows: IterableDataset
    features: Features

    def tables(self, size: int, place: Json | None = None) -> Iterator[tuple[pyarrow.Table, Json]]:
        """Yield tables of `size` rows from `place` on, each with the place at which the table ends.
        Raises `UserError` for malformed rows, and `StreamBroke` if the disk or the network fails.
        """
        if place is not None:
            self.rows.load_state_dict(place)
        with _reading(self.part.name):
            for table in self.rows.iter(size):
                if self.part.columns:
                    names = new_names(table.column_names, self.part)
                    table = table.select(list(names)).rename_columns(list(names.values()))
                yield table_cast(table, self.features.arrow_schema), self.rows.state_dict()


def source_of(run: Settings, part: Part, rows: IterableDataset) -> Source:
    """Return the source of these rows. Raises `UserError` if their columns cannot be read."""
    features = rows.features
    if features is None:  # some readers report no features
        with _reading(part.name):
            first = next(iter(rows.iter(1)), None)
        features = Features() if first is None else Features.from_arrow_schema(first.schema)
    if features:
        raise_errors(column_problems(run, part, features))
    names = new_names(features, part)
    return Source(part, rows, Features({new: features[old] for old, new in names.items()}))


def open_splits(run: Settings, part: Part, commit: str | None, shards: int = 1) -> dict[str, IterableDataset]:
    """Open the splits of a part of the run's data, at the `commit` that `newest_commit` returned.
    A `Dataset` is split into at most `shards` shards. Raises `UserError` if the data is unreadable.
    """
    splits = {}
    for name, rows in _open(run, part, commit).items():
        if isinstance(rows, Dataset):
            rows = rows.to_iterable_dataset(max(1, min(shards, len(rows))))
        splits[name] = rows.with_format("arrow")
    return splits


def _open(run: Settings, part: Part, commit: str | None) -> Mapping:
    """Open the splits of one data set, each as a `Dataset` or as an `IterableDataset`."""
    name, config = part.name, part.config or run["dataset_config"]
    if not name:
        texts = demo_corpus()
        train, test = (texts, []) if run["eval_strategy"] == "no" else held_out(texts)
        return {split: Dataset.from_dict({"text": part}) for split, part in (("train", train), ("test", test)) if part}
    if not (paths := paths_of(name)):
        return _open_hub(name, config, commit)
    path = paths[0]
    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():  # save_to_disk wrote it
            saved = datasets.load_from_disk(str(path))
            return saved if isinstance(saved, DatasetDict) else {"train": saved}
        if path.is_dir():
            builder = datasets.load_dataset_builder(str(path), config)
            read = {Path(file).resolve() for files in (builder.config.data_files or {}).values() for file in files}
            unread = [file.name for file in files_in(path) if file_kind(file) and file.resolve() not in read]
            if unread and read:  # `datasets` finds splits by file name, perhaps in some of the files only
                note = f"{plural(len(unread), 'file')} in {name} not read, such as {unread[0]}: '{name}/*' reads all"
                print_note(note, console(os.environ.get("RANK", "0") == "0"))
            return _stream(builder)
        kind = str(file_kind(path))
        options = {"encoding": "utf-8-sig"} if kind == "text" else {}  # else the BOM stays in the first line
        # Use absolute, escaped paths: `datasets` reads brackets as a pattern, and `a:` as a URL.
        files = [glob.escape(str(file.absolute())) for file in paths]
        return _stream(datasets.load_dataset_builder(kind, data_files=files, **options))
    except Exception as error:  # parsers raise anything, and always about these files or this folder
        raise unreadable(name, error) from None


def _stream(builder: DatasetBuilder) -> Mapping:
    """Open a builder's splits. A .csv column that is text in the first rows stays text: pandas
    infers types anew for each 10,000 rows, and would turn 007 into 7 in rows with only digits.
    """
    splits = builder.as_streaming_dataset()
    if isinstance(builder, Csv):
        first = next(iter(next(iter(splits.values())).with_format("arrow").iter(1)), None)
        texts = [field.name for field in (first.schema if first else ()) if "string" in str(field.type)]
        builder.config.converters = dict.fromkeys(texts, _text_of)
    return splits


def _text_of(cell: str) -> str | None:
    return None if cell in STR_NA_VALUES else cell  # only pandas 3.1 looks for missing values after a converter


def _open_hub(name: str, config: str | None, commit: str | None) -> Mapping:
    try:
        if commit is not None:
            return _stream(datasets.load_dataset_builder(name, config, revision=commit))
        return datasets.load_dataset(name, config)  # the Hub is unreachable: use the cache of `datasets`
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        what = f"{name!r} is neither a local file or folder nor a data set that can be read from the Hub"
        raise mistake("dataset_name", f"{what}: {_cause(error)}", _ON_HUB) from None


# --- What cannot be read -------------------------------------------------------------------------


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn a reader's error into `UserError` (bad data) or `StreamBroke` (disk or network)."""
    try:
        yield
    except Exception as error:  # parsers and networks raise anything
        # The last three are raised for a .gz that is incomplete or is no gzip file.
        if isinstance(error, (ValueError, TypeError, LookupError, gzip.BadGzipFile, EOFError, zlib.error)):
            raise unreadable(name, error) from None
        raise StreamBroke(f"{name} could not be read any further: {_cause(error)}") from None


def unreadable(name: str, error: Exception) -> UserError:
    """Return the error for data whose reader raised `error`. The `datasets` log names the file."""
    what = f"{name} cannot be read: {_broken_line(name)}{_cause(error)}"
    return mistake("dataset_name", what, _WHOLE if paths_of(name) else _ON_HUB)


def _broken_line(name: str) -> str:
    """Return the place of the first line that is no JSON in a .jsonl file; empty if all are."""
    for path in (path for path, *_ in file_versions(name) or () if path.endswith(".jsonl")):
        with contextlib.suppress(OSError), Path(path).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    json.loads(line if line.strip() else "null")
                except ValueError:
                    return f"line {number:,} of {Path(path).name}: "
    return ""


def _cause(error: BaseException) -> str:
    """Return the innermost explicit cause of an error, on one short line."""
    while error.__cause__:
        error = error.__cause__
    return re.sub(r" in row \d+", "", one_line(error))  # pyarrow counts from 0, in a chunk of the file
