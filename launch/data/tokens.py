"""Tokenize data once, on every core, before any process group is joined. Every rank then maps the
tokens from the disk into memory.

A folder in the cache of `datasets` is for one version of data, code, tokenizer and settings, and
holds the tokens in files of about 50 MB. index.json records where in the data the last file ends: a
start after a kill resumes there, and so does a start that needs more rows. Tokens do not depend on
packing. Only a classifier's tokens depend on max_length, because the tokenizer truncates.
`Dataset.map` is not used: it would copy the raw data, and start anew after a kill.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import transformers
import xxhash
from datasets import Dataset, Features, IterableDataset, List, Value
from datasets.table import MemoryMappedTable, concat_tables
from filelock import FileLock
from tqdm import tqdm

from launch.data import sources
from launch.data.encode import IGNORED, Tokens, encode_rows
from launch.data.sources import Source
from launch.host.files import write_whole, writing
from recipes.errors import UserError
from recipes.mixture import Part, parts_of_run
from recipes.rules.local_model import text_config
from recipes.run import Json, RunSpec, Settings
from recipes.run.files import read_json

NOTHING = np.iinfo(np.int32).max  # the `first_learned` of a row with nothing to learn
UNIT_BYTES = 50_000_000
ROWS_AT_ONCE = 256
PIECE_BYTES = 2_000_000  # size of the rows in one tokenizer call; the call takes a hundred times as much memory

_SETTINGS = ("dataset_text_field", "assistant_only_loss", "completion_only_loss")  # the settings that encoding reads
_OF_CLASSIFIERS = ("task", "dataset_text_field", "dataset_label_field", "max_length")
_HOW_IT_WAS_FOUND = ("is_local", "local_files_only", "name_or_path")  # keys of the config that change no token
_INDEX = "index.json"

# A learned token is its own label, so `learned` takes one bit per token, where labels would take
# four bytes. `first_learned` is the index of the first learned token after the row's first token.
_NUMBER = Value("int32")
TOKENS = Features(input_ids=List(_NUMBER), length=_NUMBER, learned=List(Value("bool")), first_learned=_NUMBER)
TOKENS["empty_answers"] = _NUMBER  # of a chat, which does not learn them


# --- What a file holds ---------------------------------------------------------------------------


def token_table(rows: Sequence[Tokens]) -> pa.Table:
    """Return encoded rows as an Arrow table with the columns that the cache stores."""
    ids = pa.array([row[0] for row in rows], pa.list_(pa.int32()))
    offsets = ids.offsets.to_numpy()
    starts, ends = offsets[:-1], offsets[1:]
    learned = np.ones(offsets[-1], bool)
    for (own, labels, *_), start, end in zip(rows, starts, ends, strict=True):
        if labels is not own:
            learned[start:end] = np.array(labels) != IGNORED
    # No token predicts the first token of a row, so `first_learned` skips it.
    places = np.flatnonzero(learned)
    first = np.append(places, NOTHING)[np.searchsorted(places, starts + 1)]
    columns = [
        ids,
        ids.value_lengths(),
        pa.ListArray.from_arrays(ids.offsets, pa.array(learned)),
        pa.array(np.where(first < ends, first - starts, NOTHING).astype(np.int32)),
        pa.array([sum(row[2:]) for row in rows], pa.int32()),
    ]
    return pa.Table.from_arrays(columns, schema=TOKENS.arrow_schema)


def arrays_of(table: pa.Table) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the input_ids and labels of each row of a table."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for batch in table.to_batches():
        ids, learned = batch["input_ids"], batch["learned"].flatten().to_numpy(zero_copy_only=False)
        flat, borders = ids.flatten().to_numpy(), ids.offsets.to_numpy()[1:-1] - ids.offsets[0].as_py()
        labels = np.where(learned, flat, np.int32(IGNORED))
        if len(batch):
            found += zip(np.split(flat, borders), np.split(labels, borders), strict=True)
    return found


def numbers_of(examples: Dataset, column: str) -> np.ndarray:
    """Return a column of numbers, without reading any tokens."""
    return examples.select_columns(column).with_format("numpy")[:][column]


def lengths_of(examples: Dataset) -> np.ndarray:
    return numbers_of(examples, "length")


def hashes_of(parts: Sequence[Dataset]) -> Iterator[int]:
    """Yield a hash of the tokens of each row that has any."""
    for part in parts:
        for table in part.select_columns("input_ids").with_format("arrow").iter(10_000):
            ids, start = table["input_ids"].combine_chunks(), 0
            tokens = memoryview(ids.flatten().to_numpy())
            for length in filter(None, ids.value_lengths().to_pylist()):
                yield xxhash.xxh3_64_intdigest(tokens[start : start + length])
                start += length


# --- Tokenizing on every core --------------------------------------------------------------------


@dataclass(frozen=True)
class Encoder:
    """Encode the rows of a source as tokens."""

    source: Source
    run: Settings
    tokenizer: Any
    embeddings: int  # number of the tokenizer's tokens that have an embedding in the model

    def __call__(self, rows: pa.Table, first: int | None = None) -> pa.Table:
        """Return a table of the rows' tokens. `first` is the first row's index, None if unknown.
        Raises `UserError` for a malformed row.
        """
        tokens: list[Tokens] = []
        size = max(1, len(rows) * PIECE_BYTES // max(PIECE_BYTES, rows.nbytes))
        features = self.source.features
        for at in range(0, len(rows), size):
            number = None if first is None else first + at
            try:
                tokens += encode_rows(rows.slice(at, size), features, self.run, self.tokenizer, self.embeddings, number)
            except UnicodeDecodeError as error:  # pyarrow's JSON reader accepts text that is not UTF-8
                raise sources.unreadable(self.source.part.name, error) from None
        table = token_table(tokens)
        if self.run["task"] == "sequence_classification":  # the label of each row is kept as the data has it
            name = self.run["dataset_label_field"]
            schema = Features(TOKENS | {"label": features[name]}).arrow_schema
            table = pa.Table.from_arrays([*table.columns, rows.column(name)], schema=schema)
        return table


def encoder_of(run: RunSpec, tokenizer, part: Part, rows: IterableDataset) -> Encoder:
    # Pass a dict: a worker may get the Encoder as a pickle, and a RunSpec may hold a lambda.
    return Encoder(
        sources.source_of(run, part, rows), {name: run[name] for name in run}, tokenizer, _known(run, tokenizer)
    )


def _known(run: RunSpec, tokenizer) -> int:
    """Return the number of the tokenizer's tokens that have an embedding in the model."""
    return min(len(tokenizer), text_config(run.model or {}).get("vocab_size") or len(tokenizer))


def in_order(encode: Encoder, place: Json | None, first: int, workers: int) -> Generator[tuple[pa.Table, Json]]:
    """Yield the tokens of a source in tables, each with the place where the table ends. Begin at
    `place`. `first` is the index, in the whole split, of the first row to yield.

    From the second table on, the tokenizer uses `workers` threads: processes took 50 % more memory.
    Chat templates, a sixth of the work, run in one thread. At the end the threads are turned off,
    unless TOKENIZERS_PARALLELISM was true, because the threads would hang a forked process.
    """
    before = os.environ.get("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("RAYON_NUM_THREADS", str(workers))  # read once, when the threads start
    try:
        for number, (table, after) in enumerate(encode.source.tables(ROWS_AT_ONCE, place)):
            if number and workers > 1:  # not for little data: after threads have run, a fork could hang
                os.environ["TOKENIZERS_PARALLELISM"] = "true"
            yield encode(table, first), after
            first += len(table)
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before


# --- The folder ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokenized:
    """The tokens of one data set's splits, and the data set's commit if it is on the Hub."""

    train: Any  # a Dataset, or the Encoder of a stream
    eval: Dataset | None
    commit: str | None = None
    folder: Path | None = None  # None if the tokens are in memory only


def tokenized(run: RunSpec, tokenizer, part: Part) -> Tokenized:
    """Return a data set's tokens: from the cache, or made now by one process of each node.

    The other processes wait without a deadline. If the first process fails, the next one resumes
    after the last complete file, and meets the same error: a `UserError` for bad data.
    """
    if not part.name:  # the demonstration, which is small
        splits = {}
        for name, rows in sources.open_splits(run, part, None).items():
            encode = encoder_of(run, tokenizer, part, rows)
            tables = [encode(table) for table, _ in encode.source.tables(ROWS_AT_ONCE)]
            splits[name] = Dataset(pa.concat_tables(tables), fingerprint=name)
        return Tokenized(splits["train"], splits.get("test"))
    folder, commit = _folder(run, tokenizer, part)
    if (found := _open(folder, run, part)) is not None:
        return found
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(1)  # the node's first rank begins, so that it also reports mistakes
    fix = "set HF_HOME in the environment to a writable folder"
    with writing(f"the folder for tokens, {folder},", "HF_HOME", fix):
        folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        return _open(folder, run, part) or _make(folder, run, tokenizer, part, commit)


def of_parts(
    run: RunSpec, tokenizer, read: Callable[[RunSpec, Any, Part], Tokenized] = tokenized
) -> list[tuple[Part, Tokenized]]:
    """Return pairs (part of the data, its tokens). The part of the demonstration has no name."""
    parts = parts_of_run(run) or [Part("")]
    found = []
    for part in parts:
        with naming(part.name if parts[1:] else ""):
            found.append((part, read(run, tokenizer, part)))
    return found


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Add a data set's `name` (empty without a mixture) to each problem of a `UserError`."""
    try:
        yield
    except UserError as error:
        named = (one if name in one.what else replace(one, what=f"{name}: {one.what}") for one in error.problems)
        raise UserError(*named) from None


def cache_folder() -> Path:
    """Return the folder for tokens. `datasets` skips a folder with this name, so tokens are not
    read as data if the cache lies inside a data folder.
    """
    return Path(datasets.config.HF_DATASETS_CACHE) / "__tokens__"


def _folder(run: RunSpec, tokenizer, part: Part) -> tuple[Path, str | None]:
    """Return the folder of the tokens, and the commit of Hub data (None offline or if local)."""
    files = sources.file_versions(part.name)
    packages = [package.__version__ for package in (datasets, tokenizers, transformers)]
    read = _OF_CLASSIFIERS if run["task"] == "sequence_classification" else _SETTINGS
    settings = [part.name, part.config or run["dataset_config"], dict(part.columns), *(run[name] for name in read)]
    code = [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))]
    made_of = json.dumps([code, packages, settings, files, _contents(tokenizer), _known(run, tokenizer)])
    name = re.sub(r"[^\w.-]", "_", Path(part.name).name)[:40]
    stem = f"{name}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    root = cache_folder()
    if files is not None:
        return root / stem, None
    if (commit := sources.newest_commit(part.name)) is not None:
        return root / f"{stem}-{commit}", commit
    # The Hub is unreachable: use the newest folder of this data, even if it was made offline.
    made = sorted(root.glob(f"{stem}-*"), key=lambda folder: folder.stat().st_mtime)
    return made[-1] if made else root / f"{stem}-offline", None


def _contents(tokenizer) -> list:
    """Return all that decides a tokenizer's tokens: its class, config and hashes of other files."""
    if tokenizer.is_fast:  # saved files would hold the options of the last call: drop them
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        contents = {file.name: file.read_bytes() for file in files}
    config = json.loads(contents.pop("tokenizer_config.json", b"{}"))
    lasting = sorted((name, value) for name, value in config.items() if name not in _HOW_IT_WAS_FOUND)
    return [type(tokenizer).__name__, lasting, *(hashlib.sha256(one).hexdigest() for one in contents.values())]


def _open(folder: Path, run: RunSpec, part: Part) -> Tokenized | None:
    """Map a folder's tokens into memory; return None if rows that the run needs are missing."""
    index = read_json(folder / _INDEX)[0]
    if not index:
        return None
    names, made = index["names"], index["made"]
    wanted, needed = sources.wanted_splits(run, part, names)
    if not all(split in made and _is_enough(made[split], rows) for split, rows in needed.items()):
        return None
    splits = {split: _mapped(folder / split, made[split]["files"] if split in needed else 0) for split in names}
    rows = {flag: sources.take(splits, flag, split) for flag, split in wanted.items()}
    return Tokenized(rows["dataset_train_split"], rows.get("dataset_test_split"), index["commit"], folder)


def _is_enough(made: Json, rows: float) -> bool:
    return made["files"] and (made["ended"] or made["rows"] >= rows)


def _mapped(folder: Path, files: int) -> Dataset:
    tables = [MemoryMappedTable.from_file(str(folder / f"{number:05}.arrow")) for number in range(files)]
    table = concat_tables(tables) if tables else TOKENS.arrow_schema.empty_table()
    return Dataset(table, fingerprint=f"{folder.parent.name}-{folder.name}")


# --- Making it -----------------------------------------------------------------------------------


def _make(folder: Path, run: RunSpec, tokenizer, part: Part, commit: str | None) -> Tokenized:
    """Tokenize the rows that the run reads and the folder lacks."""
    splits = sources.open_splits(run, part, commit)
    _, needed = sources.wanted_splits(run, part, list(splits))
    index = {"made": {}, **(read_json(folder / _INDEX)[0] or {}), "names": list(splits), "commit": commit}
    for split, wanted in needed.items():
        made = index["made"].setdefault(split, {"files": 0, "rows": 0, "place": None, "ended": False})
        encode = encoder_of(run, tokenizer, part, splits[split])
        encoded = in_order(encode, made["place"], made["rows"], run["dataset_num_proc"] or run.hardware.cores)
        # A terminal shows progress at once, a log file every ten seconds.
        seconds, title = 0.2 if sys.stderr.isatty() else 10, f"tokenizing {part.name} ({split})"
        progress = tqdm(desc=title, unit=" tokens", unit_scale=True, mininterval=seconds, delay=1)
        with contextlib.closing(encoded), progress:
            while not _is_enough(made, wanted):
                _make_file(folder / split, made, wanted, encoded, progress)
                write_whole(folder / _INDEX, json.dumps(index).encode())
    return cast(Tokenized, _open(folder, run, part))


def _make_file(
    folder: Path, made: Json, wanted: float, encoded: Iterator[tuple[pa.Table, Json]], progress: tqdm
) -> None:
    """Write the next file of a split, and update `made`, which describes the split's files."""
    unit: list[pa.Table] = []
    made["ended"] = True
    for table, place in encoded:
        unit.append(table)
        made |= {"rows": made["rows"] + len(table), "place": place}
        progress.update(len(table["input_ids"].combine_chunks().flatten()))
        if made["rows"] >= wanted or sum(one.nbytes for one in unit) >= UNIT_BYTES:
            made["ended"] = False
            break
    if unit or not made["files"]:
        table = pa.concat_tables(unit or [TOKENS.arrow_schema.empty_table()]).combine_chunks()
        content = pa.BufferOutputStream()
        with pa.ipc.new_stream(content, table.schema) as writer:
            writer.write_table(table)
        write_whole(folder / f"{made['files']:05}.arrow", content.getvalue().to_pybytes())
        made["files"] += 1
