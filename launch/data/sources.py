"""Reading data: a file, a folder, the Hub or the demonstration, as rows not yet tokenized."""

from __future__ import annotations

import glob
import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import datasets
import pyarrow
from datasets import Dataset, DatasetDict, Features, IterableDataset, ReadInstruction
from datasets.table import table_cast
from huggingface_hub import HfApi

from launch.data.demo import demo_corpus, held_out
from recipes.errors import StreamBroke, UserError, mistake, one_line
from recipes.mixture import paths_of
from recipes.rules.data_and_model import FILE_KINDS, file_kind, nothing_to_evaluate_on
from recipes.run import Settings
from recipes.run.files import expanded

# A reader takes some 10 MB at a time, and each time the columns and types that it finds there.
_ALIKE = "the columns and types of the first rows in all others, or a file for each: --dataset_name FILE FILE"
_ON_HUB = "check the spelling, the network and `hf auth login`"
_NO_COLUMNS: Mapping[str, str] = MappingProxyType({})


# --- Splits --------------------------------------------------------------------------------------


def wanted_splits(run: Settings, names: list[str]) -> dict[str, str]:
    """The splits that the flags ask for: to train on, and to evaluate on if the run does."""
    wanted = {"dataset_train_split": run["dataset_train_split"]}
    if run["eval_strategy"] != "no":
        held_out = run["dataset_test_split"] or next((name for name in ("test", "validation") if name in names), None)
        if held_out is None:
            raise UserError(nothing_to_evaluate_on(f"the data has {', '.join(names)}", run["dataset_streaming"]))
        wanted["dataset_test_split"] = held_out
    return wanted


def rows_needed(run: Settings, names: list[str]) -> dict[str, float]:
    """The splits that a run reads, and how many rows from the start: infinity for all of them."""
    needed: dict[str, float] = {}
    for flag, wanted in wanted_splits(run, names).items():
        # A part that ends at the same row however long its split is needs no more than that.
        some, more = (_parts(dict.fromkeys(names, rows), flag, wanted) for rows in (10**12, 10**13))
        for part, longer in zip(some, more, strict=True):
            rows = part.to if part.to == longer.to and part.from_ == longer.from_ else math.inf
            needed[part.splitname] = max(needed.get(part.splitname, 0), rows)
    return needed


def take(splits: Mapping[str, Dataset], flag: str, wanted: str) -> Dataset:
    """The rows of `train`, `train[:95%]` or `train[:10]+test`."""
    parts = _parts({name: len(split) for name, split in splits.items()}, flag, wanted)
    rows = datasets.concatenate_datasets(
        [splits[part.splitname].select(range(part.from_, part.to) or []) for part in parts]
    )
    if not len(rows):
        listed = ", ".join(f"{name} ({len(split):,} rows)" for name, split in splits.items())
        raise mistake(flag, f"the split {wanted!r} is empty", f"a split with rows in it: {listed}")
    return rows


def _parts(rows: Mapping[str, int], flag: str, wanted: str) -> list:
    """The parts of splits that a text asks for, given how many rows each split has."""
    try:
        return ReadInstruction.from_spec(wanted).to_absolute(rows)
    except (ValueError, AssertionError):
        what = f"there is no split {wanted!r}; the data has {', '.join(rows)}"
        raise mistake(flag, what, "name one of them, or a slice of one") from None


# --- Which version of the data -------------------------------------------------------------------


def file_versions(name: str) -> list | None:
    """Path, size and times of each file: with another one it is other data. None for the Hub's.

    The time of the last change of the file itself is one that no program can set back, as `rsync
    -t` and `tar` do with that of its contents.
    """
    paths = paths_of(name)
    if not paths:
        return None
    if (folder := paths[0]).is_dir():  # the library reads no hidden ones
        inside = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        paths = [file for file in inside if not re.search(r"/(\.|__)", f"/{file.relative_to(folder)}")]
    found = [(file, file.stat()) for file in paths]
    return [(str(file.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for file, stat in found]


def newest_commit(name: str) -> str | None:
    """The newest commit of a data set on the Hub. None if it cannot be reached."""
    if datasets.config.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(name, timeout=30).sha
    except Exception:  # reading it says why, or finds what an earlier start has left in the cache
        return None


def hub_commit(rows: Dataset) -> str | None:
    """The commit of data from the Hub. `datasets` names a folder of its cache after it
    (load.py, `HubDatasetModuleFactory`: the builder's hash). None for any other data.
    """
    names = (part for file in rows.cache_files for part in Path(file["filename"]).parts)
    return next((name for name in names if re.fullmatch(r"[0-9a-f]{40}", name)), None)


# --- Reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streams:
    """All splits of a data set, read piece by piece when they are asked for."""

    splits: dict[str, IterableDataset]
    commit: str | None = None  # of the Hub

    @property
    def kind(self) -> str:
        """The reader's name: json, csv, parquet, ..."""
        return next(iter(self.splits.values())).info.builder_name or ""


def demo_splits(run: Settings) -> dict[str, Dataset]:
    texts = demo_corpus()
    evaluates = run["eval_strategy"] != "no"
    parts = dict(zip(("train", "test"), held_out(texts), strict=True)) if evaluates else {"train": texts}
    return {name: Dataset.from_dict({"text": part}) for name, part in parts.items()}


def open_streams(run: Settings, commit: str | None, shards: int = 1) -> Streams:
    """The run's data; `commit` is that of `newest_commit`.

    Rows that lie on the disk as Arrow tables get so many `shards`; others have their own.
    """
    name, config = run["dataset_name"], run["dataset_config"]
    if not name:
        return Streams(_from_tables(demo_splits(run), shards))
    paths = paths_of(name)
    if not paths:
        return _stream_hub(name, config, commit, shards)
    path = paths[0]
    try:
        if path.is_dir() and _is_saved(path):
            saved = datasets.load_from_disk(str(path))
            return Streams(_from_tables(saved if isinstance(saved, DatasetDict) else {"train": saved}, shards))
        if path.is_dir():
            builder = datasets.load_dataset_builder(str(path), config)
        else:
            kind = str(file_kind(path))
            options = {"encoding": "utf-8-sig"} if kind == "text" else {}  # or the mark stays in the first line
            # Absolute and escaped: the library takes brackets for a pattern, `a:` for an address.
            files = [glob.escape(str(file.absolute())) for file in paths]
            builder = datasets.load_dataset_builder(kind, data_files=files, **options)
        return Streams(dict(builder.as_streaming_dataset()))
    except Exception as error:  # parsers raise anything, and always about these files or this folder
        raise unreadable(name, error) from None


def _from_tables(splits: Mapping[str, Dataset], shards: int) -> dict[str, IterableDataset]:
    return {name: rows.to_iterable_dataset(max(1, min(shards, len(rows)))) for name, rows in splits.items()}


def _stream_hub(name: str, config: str | None, commit: str | None, shards: int) -> Streams:
    try:
        if commit is not None:
            return Streams(dict(datasets.load_dataset(name, config, revision=commit, streaming=True)), commit)
        cached = dict(datasets.load_dataset(name, config))  # out of reach: in the library's own cache
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        # No such configuration, or one must be chosen: the library lists them.
        if isinstance(error, ValueError) and "config" in str(error).lower():
            raise mistake("dataset_config", _cause(error), "--dataset_config with one of them") from None
        what = "is neither a local file or folder nor a data set that can be read from the Hub"
        fix = f"{_ON_HUB}; a local path is found from the current folder"
        raise mistake("dataset_name", f"{name!r} {what}: {_cause(error)}", fix) from None
    return Streams(_from_tables(cached, shards), hub_commit(next(iter(cached.values()))))


def pieces(
    stream: IterableDataset,
    name: str,
    rows: int,
    features: Features | None = None,
    columns: Mapping[str, str] = _NO_COLUMNS,
    explained: Callable[[str, Exception], Exception] | None = None,
) -> Iterator[pyarrow.Table]:
    """The rows of a stream of Arrow tables, so many at a time, with the types of `features` once
    their columns are renamed.

    Raises what `explained` makes of an error: `UserError` for what cannot be read.
    """
    try:
        for table in stream.iter(rows):
            yield table if features is None else table_cast(_renamed(table, columns), features.arrow_schema)
    except Exception as error:  # parsers and networks raise anything
        raise (explained or unreadable)(name, error) from None


def features_of(stream: IterableDataset, name: str, columns: Mapping[str, str] = _NO_COLUMNS) -> Features:
    """Those of the first rows, with columns renamed: some readers say none, and later rows must be
    like them.
    """
    features = stream.features
    if features is None:
        first = next(pieces(stream, name, 1), None)
        features = Features() if first is None else Features.from_arrow_schema(first.schema)
    if absent := [column for column in columns if column not in features]:
        what = f"{name} has no column {absent[0]!r}; it has {', '.join(features)}"
        raise mistake("dataset_name", what, "columns with names that are there")
    return Features({new: features[old] for old, new in _new_names(features, columns).items()})


def _new_names(names: Iterable[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Old name -> new name. A column is left out if another one gets its name."""
    return {name: columns.get(name, name) for name in names if name in columns or name not in columns.values()}


def _renamed(table: pyarrow.Table, columns: Mapping[str, str]) -> pyarrow.Table:
    names = _new_names(table.column_names, columns)
    return table.select(list(names)).rename_columns(list(names.values())) if columns else table


def _is_saved(folder: Path) -> bool:
    """True if save_to_disk wrote it."""
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def unread_files(name: str, kind: str | None) -> str:
    """A note on a folder's data files that were left out: the library reads one kind only."""
    folder = expanded(name)
    if not folder.is_dir() or _is_saved(folder):
        return ""
    others = [path for path in folder.rglob("*") if (file_kind(path) or kind) != kind]
    names = sorted(path.name for path in others if not path.name.startswith((".", "_")))
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return f"; not read, since most files are {kind}: {names[0]}{more}" if names else ""


# --- What cannot be read -------------------------------------------------------------------------


def unreadable(name: str, error: Exception) -> UserError:
    """The mistake in data whose reader has raised `error`. The library's log names the file."""
    if isinstance(error, UserError):
        return error
    paths, cause = paths_of(name), _cause(error)
    if "Couldn't cast" in cause or "column names don't match" in cause:
        fix = _ALIKE
    elif not paths:
        fix = _ON_HUB
    elif paths[0].is_dir():
        fix = "a folder that save_to_disk wrote, or one of " + ", ".join(FILE_KINDS) + " files"
    elif "utf" in cause.lower():
        fix = f"UTF-8: iconv -f LATIN1 (or UTF-16) -t UTF-8 {name}"
    else:
        fix = "correct the file"
    return mistake("dataset_name", f"{name} cannot be read: {cause}", fix)


def stream_broke(name: str, error: Exception) -> UserError | StreamBroke:
    """An error of a stream while it was read: a mistake in the data, or a failure."""
    damaged = (gzip.BadGzipFile, EOFError, zlib.error)  # a .gz that was not copied whole, or is none
    if isinstance(error, (ValueError, TypeError, LookupError, UserError, *damaged)):
        return unreadable(name, error)
    return StreamBroke(f"{name} could not be read on: {_cause(error)}")


def _cause(error: BaseException) -> str:
    """The innermost explicit cause, on one short line."""
    while error.__cause__:
        error = error.__cause__
    return one_line(error)
