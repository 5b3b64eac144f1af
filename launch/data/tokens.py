"""The data's tokens on the disk: made once, on every core, before any process group is joined, and
mapped from there by every rank.

A folder in the cache of `datasets` holds the tokens of one version of some data, by one tokenizer,
in files of some 50 MB. index.json holds the place in the data where the last file ends: a start
that was killed resumes there, and so does one that wants more rows. Nothing in it depends on
packing, and only a classifier's depends on max_length: its tokenizer cuts. The `map` of `datasets`
keeps a copy of the raw data beside the tokens, starts anew after a kill, and its other ranks wait
inside a barrier.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import transformers
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.table import MemoryMappedTable, concat_tables
from filelock import FileLock, Timeout
from tqdm import tqdm

from launch.data import sources
from launch.data.batches import IGNORED
from launch.data.encode import encode_rows, in_library, is_text
from launch.host.files import flush, write_whole
from launch.host.signals import end_with_parent, ending_children
from launch.terminal import console
from recipes import __version__
from recipes.errors import Failure
from recipes.run import Json, RunSpec, Settings
from recipes.run.files import read_json

NOTHING = np.iinfo(np.int32).max  # as first_learned: no label at all
UNIT_BYTES = 50_000_000
ROWS_AT_ONCE = 256
PIECE_BYTES = 2_000_000  # a tokenizer takes a hundred times the memory of what it is given at once

_FORMAT = 3  # of the files: another one does not read these
_SETTINGS = ("dataset_text_field", "assistant_only_loss", "completion_only_loss")  # what encoding reads
_OF_CLASSIFIERS = ("task", "dataset_text_field", "dataset_label_field", "max_length")
_HOW_IT_WAS_FOUND = ("is_local", "local_files_only", "name_or_path")  # in a tokenizer's configuration
_INDEX = "index.json"

Encode = Callable[[pa.Table], pa.Table]

# `learned` takes a bit for each token where labels take four bytes. The labels are the tokens that
# are learned; `labels` holds those of the few rows whose own are others, and is null elsewhere.
# `first_learned` is the place of the first label that a token predicts.
TOKENS = Features(
    {
        "input_ids": List(Value("int32")),
        "learned": List(Value("bool")),
        "labels": List(Value("int32")),
        "first_learned": Value("int32"),
    }
)


# --- What a file holds ---------------------------------------------------------------------------


def token_table(ids: list[list[int]], labels: list[list[int]]) -> pa.Table:
    """Encoded rows as the cache holds them."""
    flat, offsets = _flat(ids)
    wanted = flat if labels is ids else _flat(labels)[0]
    learned = wanted != IGNORED
    others = np.repeat(np.arange(len(ids)), np.diff(offsets))[learned & (wanted != flat)]
    rows = set(others.tolist())
    own = [labels[row] if row in rows else None for row in range(len(ids))] if rows else pa.nulls(len(ids))
    # Nothing predicts the first token of a row, so that one does not count.
    places, starts = np.flatnonzero(learned), offsets[:-1]
    first = np.append(places, NOTHING)[np.searchsorted(places, starts + 1)]
    columns = [
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(learned)),
        pa.array(own, pa.list_(pa.int32())),
        pa.array(np.where(first < offsets[1:], first - starts, NOTHING).astype(np.int32)),
    ]
    return pa.Table.from_arrays(columns, schema=TOKENS.arrow_schema)


def labels_of(table: pa.Table) -> pa.ChunkedArray:
    """The labels of the rows of a table: each row's own, or else the tokens that are learned."""
    return pa.chunked_array([_labels(part) for part in table.to_batches()], pa.list_(pa.int32()))


def _labels(rows: pa.RecordBatch) -> pa.ListArray:
    ids, learned, own = (rows.column(name) for name in ("input_ids", "learned", "labels"))
    is_learned = learned.flatten().to_numpy(zero_copy_only=False)
    labels = np.where(is_learned, ids.flatten().to_numpy(), np.int32(IGNORED))
    offsets = ids.offsets.to_numpy() - ids.offsets[0].as_py()
    for row in np.flatnonzero(own.is_valid().to_numpy(zero_copy_only=False)):
        labels[offsets[row] : offsets[row + 1]] = own[row].values.to_numpy()
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(labels))


def of_examples(examples: Dataset, values: np.ndarray) -> np.ndarray:
    """Of values for each row of their table those of the examples, which may be a selection.

    It reads no tokens, where `datasets` would gather all columns of the selected rows.
    """
    return values if examples._indices is None else values[examples._indices.column(0).to_numpy()]


def lengths_of(examples: Dataset) -> np.ndarray:
    """The number of tokens of each example."""
    found = [chunk.value_lengths().to_numpy() for chunk in examples.data.column("input_ids").chunks]
    return of_examples(examples, np.concatenate([np.empty(0, np.int64), *found]))


def _flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All values in one array, and where each row begins in it."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.fromiter((value for row in rows for value in row), np.int32, offsets[-1]), offsets


# --- Tokenizing on every core --------------------------------------------------------------------


def encode_table(rows: pa.Table, features: Features, run: Settings, tokenizer) -> pa.Table:
    """The tokens of some rows. Raises `UserError` for rows that cannot be learned from."""
    parts = -(-rows.nbytes // PIECE_BYTES) or 1
    size = -(-len(rows) // parts) or 1
    pieces = (rows.slice(start, size) for start in range(0, max(1, len(rows)), size))
    return pa.concat_tables([_encode_piece(piece, features, run, tokenizer) for piece in pieces])


def _encode_piece(rows: pa.Table, features: Features, run: Settings, tokenizer) -> pa.Table:
    try:
        ids, labels = encode_rows(rows, features, run, tokenizer)
    except UnicodeDecodeError as error:  # pyarrow's JSON reader does not look at bytes: only a use of the text does
        raise sources.unreadable(run["dataset_name"], error) from None
    if run["task"] != "sequence_classification":
        return token_table(ids, labels)
    flat, offsets = _flat(ids)  # with the label of each row as the data has it
    name = run["dataset_label_field"]
    schema = Features({"input_ids": TOKENS["input_ids"], "label": features[name]}).arrow_schema
    label = in_library(rows, features).data.column(name).combine_chunks()
    return pa.Table.from_arrays([pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)), label], schema=schema)


def in_order(
    tables: Iterable[pa.Table], features: Features, run: Settings, tokenizer, workers: int
) -> Generator[pa.Table]:
    """The tokens of each table, with the same number of rows and in their order.

    Texts are tokenized by the tokenizer's own threads, chats by processes: templates are Python.
    """
    tables = iter(tables)
    encode = partial(encode_table, features=features, run=run, tokenizer=tokenizer)
    first = next(tables, None)
    if first is None:
        return
    yield encode(first)  # here, so that little data starts no processes, and wrong data fails at once
    if workers == 1:
        yield from map(encode, tables)
    elif tokenizer.is_fast and is_text(run, in_library(first, features)):
        with _threads(workers):
            yield from map(encode, tables)
    else:
        yield from _in_processes(tables, encode, workers)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """The tokenizer's threads, which `quiet_libraries` has turned off: it warns if a process with
    such threads forks.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(count))  # read once, when they start
    before = os.environ.get("TOKENIZERS_PARALLELISM", "false")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before


_encode: Encode  # of a process of the pool


def _in_processes(tables: Iterable[pa.Table], encode: Encode, workers: int) -> Iterator[pa.Table]:
    """`multiprocessing.Pool.imap` would read all the data ahead, and wait for ever for a process
    that the kernel has killed.
    """
    with ending_children():
        # Forked, so that the tokenizer is not copied.
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin, (encode,))
        waiting: deque[Future[pa.Table]] = deque()
        try:
            for table in tables:
                waiting.append(pool.submit(_encode_here, table))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
            pool.shutdown()
        except BrokenProcessPool:
            fewer = "fewer of them need less memory: --dataset_num_proc"
            raise Failure(f"a process that tokenizes the data was killed; {fewer}") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin(encode: Encode) -> None:
    global _encode
    _encode = encode
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all, and the parent ends the pool
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _encode_here(table: pa.Table) -> pa.Table:
    return _encode(table)


# --- The folder ----------------------------------------------------------------------------------


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
    if not run["dataset_name"]:  # the demonstration's, which is small
        splits = {}
        for name, rows in sources.demo_splits(run).items():
            table = encode_table(rows.with_format("arrow")[:], rows.features, run, tokenizer)
            splits[name] = Dataset(table, fingerprint=name)
        return Tokenized(splits["train"], splits.get("test"), ["text"])
    folder, commit = _folder(run, tokenizer, columns)
    if (found := _open(folder, run)) is not None:
        return found
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not is_first:
        time.sleep(1)  # the first rank begins, so that it is the one that reports
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        text = f"waiting for another process that reads the data: {folder}"
        console(is_first).print(text, highlight=False, markup=False)
        lock.acquire()
    try:
        if (found := _open(folder, run)) is None:
            _make(folder, run, tokenizer, commit, columns)
            found = _open(folder, run)
    finally:
        lock.release()
    assert found is not None
    return found


def cache_folder() -> Path:
    """The folder for tokens. `datasets` skips a folder with such a name, so tokens are not read as
    data if the cache lies inside a data folder.
    """
    return Path(datasets.config.HF_DATASETS_CACHE) / "__tokens__"


def _folder(run: RunSpec, tokenizer, columns: Mapping[str, str]) -> tuple[Path, str | None]:
    """Where the tokens are or will be, and the commit of data from the Hub; None if unknown."""
    files = sources.file_versions(run["dataset_name"])
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
    if not all(_is_enough(index["made"].get(split), rows) for split, rows in needed.items()):
        return None
    splits = {split: _mapped(folder / split, index["made"][split]["files"]) for split in needed}
    splits |= {split: _mapped(folder, 0) for split in index["splits"] if split not in splits}
    train, *others = (sources.take(splits, *wanted) for wanted in sources.wanted_splits(run, index["splits"]).items())
    return Tokenized(train, others[0] if others else None, index["columns"], index["kind"], index["commit"], folder)


def _is_enough(made: Json | None, rows: float) -> bool:
    return made is not None and made["files"] and (made["ended"] or made["rows"] >= rows)


def _mapped(folder: Path, files: int) -> Dataset:
    tables = [MemoryMappedTable.from_file(str(folder / f"{number:05}.arrow")) for number in range(files)]
    table = concat_tables(tables) if tables else TOKENS.arrow_schema.empty_table()
    return Dataset(table, fingerprint=f"{folder.parent.name}-{folder.name}")


# --- Making it -----------------------------------------------------------------------------------


def _make(folder: Path, run: RunSpec, tokenizer, commit: str | None, columns: Mapping[str, str]) -> None:
    """Tokenize what is not there yet of the splits that the run reads."""
    streams = sources.open_streams(run, commit)
    needed = sources.rows_needed(run, list(streams.splits))
    arrow = {split: streams.splits[split].with_format("arrow") for split in needed}
    features = {split: sources.features_of(arrow[split], run["dataset_name"], columns) for split in needed}
    index = read_json(folder / _INDEX)[0] or {"made": {}}
    index |= {"splits": list(streams.splits), "columns": list(features[next(iter(needed))])}
    index |= {"kind": streams.kind, "commit": streams.commit}
    workers = run["dataset_num_proc"] or run.hardware.cores
    for split, rows in needed.items():
        made = index["made"].setdefault(split, {"files": 0, "rows": 0, "state": None, "ended": False})
        if _is_enough(made, rows):
            continue
        name = f"{run['dataset_name']} ({split})"
        states: deque[Json] = deque()  # of the tables that are being tokenized
        tables = _tables(arrow[split], made["state"], run["dataset_name"], features[split], columns, states)
        encoded = in_order(tables, features[split], run, tokenizer, workers)
        with closing(encoded), _progress(name) as progress:
            for unit in _units(encoded, made, rows, states, progress.update):
                if unit or not made["files"]:
                    _write_unit(folder / split / f"{made['files']:05}.arrow", unit)
                    made["files"] += 1
                write_whole(folder / _INDEX, json.dumps(index).encode())


def _tables(
    stream: IterableDataset, state: Json | None, name: str, features: Features, columns, states: deque[Json]
) -> Iterator[pa.Table]:
    """The rows behind a place, and in `states` the place behind each table."""
    if state is not None:
        stream.load_state_dict(state)
    for table in sources.pieces(stream, name, ROWS_AT_ONCE, features, columns):
        states.append(stream.state_dict())
        yield table


def _units(
    encoded: Iterable[pa.Table], made: Json, wanted: float, states: deque[Json], count: Callable[[int], object]
) -> Iterator[list[pa.Table]]:
    """Tables of tokens for a file each, until there are as many rows as wanted or none are left.
    `made` then describes all files with this one.
    """
    unit: list[pa.Table] = []
    rows, state = made["rows"], made["state"]
    for table in encoded:
        unit.append(table)
        rows, state = rows + len(table), states.popleft()
        count(len(table["input_ids"].combine_chunks().flatten()))
        if rows >= wanted or sum(part.nbytes for part in unit) >= UNIT_BYTES:
            made |= {"rows": rows, "state": state}
            yield unit
            unit = []
        if rows >= wanted:
            return
    made |= {"rows": rows, "state": state, "ended": True}
    yield unit


def _progress(name: str) -> tqdm:
    """Counts tokens, on a terminal at once, and every ten seconds elsewhere."""
    tqdm.monitor_interval = 0  # its thread would be forked with the processes that tokenize
    seconds = 0.2 if sys.stderr.isatty() else 10
    return tqdm(desc=f"tokenizing {name}", unit=" tokens", unit_scale=True, mininterval=seconds, delay=1)


def _write_unit(file: Path, tables: list[pa.Table]) -> None:
    table = pa.concat_tables(tables or [TOKENS.arrow_schema.empty_table()]).combine_chunks()
    file.parent.mkdir(exist_ok=True)
    node = os.uname().nodename
    for left in file.parent.glob(f".*-{node}-*"):  # by a process that was killed
        left.unlink()
    unfinished = file.with_name(f".{file.stem}-{node}-{os.getpid()}")
    with pa.ipc.new_stream(str(unfinished), table.schema) as writer:
        writer.write_table(table)
    flush(unfinished)
    unfinished.replace(file)
