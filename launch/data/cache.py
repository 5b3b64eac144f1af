"""The data's tokens on the disk: made once, before any process group is joined, and mapped from
there by every rank.

A folder in the cache of `datasets` holds the tokens of one version of some data, by one tokenizer,
in files of some 50 MB. Each is moved there whole, together with the place in the data where it
ends: a start that was killed goes on after the last one, and so does one that wants more rows.
Nothing in it depends on packing, and only a classifier's depends on max_length: its tokenizer cuts.
The `map` of `datasets` keeps a copy of the raw data beside the tokens, starts anew after a kill,
and its other ranks wait inside a barrier.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import datasets
import pyarrow as pa
import tokenizers
import transformers
from datasets import Dataset, Features, IterableDataset
from datasets.table import MemoryMappedTable, concat_tables
from filelock import FileLock, Timeout
from tqdm import tqdm

from launch.data import sources
from launch.data.tokenizing import encode_table, in_order
from launch.data.tokens import TOKENS
from launch.host.files import flush, write_whole
from launch.terminal import console
from recipes import __version__
from recipes.errors import mistake
from recipes.run import Json, RunSpec
from recipes.run.files import read_json

UNIT_BYTES = 50_000_000
ROWS_AT_ONCE = 256
_FORMAT = 2  # of the files: another one does not read these
_SETTINGS = ("dataset_text_field", "assistant_only_loss", "completion_only_loss")  # what `encoder` reads
_OF_CLASSIFIERS = ("task", "dataset_text_field", "dataset_label_field", "max_length")
_HOW_IT_WAS_FOUND = ("is_local", "local_files_only", "name_or_path")  # in a tokenizer's configuration
_INDEX = "index.json"


@dataclass(frozen=True)
class Tokenized:
    """The tokens of the splits of a run, and what is known of the data they were made of."""

    train: Dataset
    eval: Dataset | None
    columns: list[str]
    kind: str | None = None  # json, parquet, ...
    commit: str | None = None  # of the Hub
    folder: Path | None = None  # None if they are in memory only


def tokenized(run: RunSpec, tokenizer, columns: Mapping[str, str] = MappingProxyType({})) -> Tokenized:
    """The tokens of the run's data: from the cache, or made now by one process of each node.
    `columns` renames some of its columns before.

    The others wait without a deadline. Raises `UserError` for what the user can correct. A process
    that waited for one that failed begins after its last file, and so fails at once.
    """
    if not run["dataset_name"]:
        return _in_memory(run, tokenizer)
    folder, commit = _folder(run, tokenizer, columns)
    if (found := _open(folder, run)) is not None:
        return found
    if int(os.environ.get("LOCAL_RANK", 0)):
        time.sleep(1)  # the first rank begins, so that it is the one that reports
    with alone_in(folder):
        if (found := _open(folder, run)) is None:
            _make(folder, run, tokenizer, commit, columns)
            found = _open(folder, run)
    assert found is not None
    return found


def _in_memory(run: RunSpec, tokenizer) -> Tokenized:
    """The demonstration's, which is small."""
    splits = {}
    for name, rows in sources.demo_splits(run).items():
        table = encode_table(rows.with_format("arrow")[:], rows.features, run, tokenizer)
        splits[name] = Dataset(table, fingerprint=name)
    return Tokenized(splits["train"], splits.get("test"), ["text"])


# --- The folder ----------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The folder for tokens. `datasets` skips a folder with such a name, so tokens are not read as
    data if the cache lies inside a data folder.
    """
    return Path(datasets.config.HF_DATASETS_CACHE) / "__tokens__"


def _folder(run: RunSpec, tokenizer, columns: Mapping[str, str] = MappingProxyType({})) -> tuple[Path, str | None]:
    """Where the tokens are or will be, and the commit of data from the Hub; None if unknown."""
    files = sources.file_versions(run)
    packages = [package.__version__ for package in (datasets, tokenizers, transformers)]
    read = _OF_CLASSIFIERS if run["task"] == "sequence_classification" else _SETTINGS
    settings = [run[name] for name in ("dataset_name", "dataset_config", *read)] + [dict(columns)]
    made_of = json.dumps([_FORMAT, __version__, packages, settings, files, _contents(tokenizer)])
    name = re.sub(r"[^\w.-]", "_", Path(run["dataset_name"]).name)[:40]
    stem = f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    root = cache_folder()
    if files is not None:
        return root / stem, None
    if (commit := sources.newest_commit(run["dataset_name"])) is not None:
        return root / f"{stem}-{commit}", commit
    # The Hub cannot be reached: use the newest folder that was made while it could.
    made = sorted(root.glob(f"{stem}-*"), key=lambda folder: folder.stat().st_mtime)
    return made[-1] if made else root / f"{stem}-offline", None


def _contents(tokenizer) -> list[str]:
    """Hashes of what a tokenizer consists of: two with equal hashes make the same tokens."""
    if tokenizer.is_fast:  # it keeps what its last call asked for, and each call asks anew
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        contents = {file.name: file.read_bytes() for file in files}
    if config := json.loads(contents.pop("tokenizer_config.json", b"{}")):
        lasting = {name: value for name, value in config.items() if name not in _HOW_IT_WAS_FOUND}
        contents["config"] = json.dumps(lasting, sort_keys=True).encode()
    return [type(tokenizer).__name__, *(hashlib.sha256(content).hexdigest() for content in contents.values())]


def _open(folder: Path, run: RunSpec) -> Tokenized | None:
    """The tokens in a folder, mapped into memory. None if they are not all there."""
    index = read_json(folder / _INDEX)[0]
    if index is None:
        return None
    needed = sources.rows_needed(run, index["splits"])
    units = {split: _units(folder / split) for split in needed}
    if not all(_is_enough(units[split], rows) for split, rows in needed.items()):
        return None
    splits = {split: _mapped(folder / split, units[split]) for split in needed}
    splits |= {split: _mapped(folder, []) for split in index["splits"] if split not in splits}
    train, *others = (sources.take(splits, *wanted) for wanted in sources.wanted_splits(run, index["splits"]).items())
    return Tokenized(train, others[0] if others else None, index["columns"], index["kind"], index["commit"], folder)


def _units(folder: Path) -> list[Json]:
    """What is known of the files of a split, as far as they follow each other."""
    found: list[Json] = []
    while (folder / f"{len(found):05}.arrow").exists():
        unit = read_json(folder / f"{len(found):05}.json")[0]
        if unit is None:
            break
        found.append(unit)
    return found


def _is_enough(units: list[Json], rows: float) -> bool:
    return bool(units) and (units[-1]["ended"] or sum(unit["rows"] for unit in units) >= rows)


def _mapped(folder: Path, units: list[Json]) -> Dataset:
    files = [folder / f"{number:05}.arrow" for number in range(len(units))]
    tables = [MemoryMappedTable.from_file(str(file)) for file in files]
    table = concat_tables(tables) if tables else TOKENS.arrow_schema.empty_table()
    return Dataset(table, fingerprint=f"{folder.parent.name}-{folder.name}")


# --- One process at a time -----------------------------------------------------------------------


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait, without a deadline, until no other process makes the tokens of this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        text = f"waiting for another process that reads the data: {folder}"
        console(os.environ.get("LOCAL_RANK", "0") == "0").print(text, highlight=False, markup=False)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


class _Progress(tqdm):
    """Counts tokens, on a terminal at once, and every ten seconds elsewhere."""

    monitor_interval = 0  # its thread would be forked with the processes that tokenize

    def __init__(self, name: str) -> None:
        seconds = 0.2 if sys.stderr.isatty() else 10
        super().__init__(desc=f"tokenizing {name}", unit=" tokens", unit_scale=True, mininterval=seconds, delay=1)


# --- Making it -----------------------------------------------------------------------------------


def _make(folder: Path, run: RunSpec, tokenizer, commit: str | None, columns: Mapping[str, str]) -> None:
    """Tokenize what is not there yet of the splits that the run reads."""
    streams = sources.open_streams(run, commit)
    names = list(streams.splits)
    needed = sources.rows_needed(run, names)
    arrow = {split: streams.splits[split].with_format("arrow") for split in needed}
    features = {split: features_of(arrow[split], run["dataset_name"], columns) for split in needed}
    train = next(iter(needed))
    index = {"splits": names, "columns": list(features[train]), "kind": streams.kind, "commit": streams.commit}
    write_whole(folder / _INDEX, json.dumps(index).encode())
    for split, rows in needed.items():
        _make_split(folder / split, arrow[split], features[split], rows, run, tokenizer, columns)


def features_of(stream: IterableDataset, name: str, columns: Mapping[str, str]) -> Features:
    """Those of the first rows: some readers say none, and later rows must be like them."""
    features = stream.features
    if features is None:
        first = next(sources.pieces(stream, name, 1), None)
        features = Features() if first is None else Features.from_arrow_schema(first.schema)
    if absent := [column for column in columns if column not in features]:
        what = f"{name} has no column {absent[0]!r}; it has {', '.join(features)}"
        raise mistake("dataset_name", what, "columns with names that are there")
    return Features({new: features[old] for old, new in sources.new_names(features, columns).items()})


def _make_split(
    folder: Path,
    stream: IterableDataset,
    features: Features,
    wanted: float,
    run: RunSpec,
    tokenizer,
    columns: Mapping[str, str],
) -> None:
    """Write units until there are as many rows as wanted, or none are left."""
    units = _units(folder)
    if _is_enough(units, wanted):
        return
    if units:
        stream.load_state_dict(units[-1]["state"])
    for left in folder.glob(f".*-{os.uname().nodename}-*"):  # by a process that was killed
        left.unlink()
    count = sum(unit["rows"] for unit in units)
    states: deque[Json] = deque()  # of the tables that are being tokenized

    def tables() -> Iterator[pa.Table]:
        for table in sources.pieces(stream, run["dataset_name"], ROWS_AT_ONCE, features, columns):
            states.append(stream.state_dict())
            yield table

    workers = run["dataset_num_proc"] or run.hardware.cores
    unit: list[pa.Table] = []
    ended, state = True, {}
    name = f"{run['dataset_name']} ({folder.name})"
    with closing(in_order(tables(), features, run, tokenizer, workers)) as encoded, _Progress(name) as progress:
        for table in encoded:
            unit.append(table)
            state = states.popleft()
            count += len(table)
            progress.update(len(table["input_ids"].combine_chunks().flatten()))
            ended = count < wanted
            if not ended:
                break
            if sum(part.nbytes for part in unit) >= UNIT_BYTES:
                units.append(_write_unit(folder, len(units), unit, state, ended=False))
                unit = []
    if not count:
        sources.require_rows(run["dataset_name"])
    units.append(_write_unit(folder, len(units), unit, state, ended))


def _write_unit(folder: Path, number: int, tables: list[pa.Table], state: Json, ended: bool) -> Json:
    """Its description first: it counts from the moment that the tokens are there."""
    table = pa.concat_tables(tables or [TOKENS.arrow_schema.empty_table()]).combine_chunks()
    known = {"rows": len(table), "state": state, "ended": ended}
    write_whole(folder / f"{number:05}.json", json.dumps(known).encode())
    file = folder / f"{number:05}.arrow"
    unfinished = folder / f".{number:05}-{os.uname().nodename}-{os.getpid()}"
    try:
        with pa.ipc.new_stream(str(unfinished), table.schema) as writer:
            writer.write_table(table)
        flush(unfinished)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return known
