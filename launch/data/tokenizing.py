"""Tokenizing on every core: texts by the tokenizer's own threads, chats by processes, since their
templates are Python. The rows stay in order, so that the number of either makes no difference.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import pyarrow as pa
from datasets import Dataset, Features

from launch.data.encode import (
    encode_completions,
    encode_rows,
    encode_texts,
    encode_whole_texts,
    encoder,
    formats,
    in_library,
)
from launch.data.sources import unreadable
from launch.data.tokens import labelled_table, token_table
from launch.host.signals import end_with_parent, ending_children
from recipes.errors import Failure
from recipes.run import Settings

PIECE_BYTES = 2_000_000  # a tokenizer takes a hundred times the memory of what it is given at once

Encode = Callable[[pa.Table], pa.Table]


def encode_table(rows: pa.Table, features: Features, run: Settings, tokenizer) -> pa.Table:
    """The tokens of some rows. Raises `UserError` for rows that cannot be learned from."""
    try:
        encoded = encode_rows(rows, features, run, tokenizer)
    except UnicodeDecodeError as error:  # pyarrow's JSON reader does not look at bytes: only a use of the text does
        raise unreadable(run["dataset_name"], error) from None
    if len(encoded["input_ids"]) != len(rows):
        raise ValueError(f"{len(rows)} rows have become {len(encoded['input_ids'])}")
    if run["task"] == "sequence_classification":
        return labelled_table(encoded["input_ids"], in_library(rows, features), run["dataset_label_field"])
    return token_table(encoded["input_ids"], encoded["labels"])


def in_order(
    tables: Iterable[pa.Table], features: Features, run: Settings, tokenizer, workers: int
) -> Generator[pa.Table]:
    """The tokens of each table, with the same number of rows."""
    tables = iter(tables)
    encode = partial(encode_table, features=features, run=run, tokenizer=tokenizer)
    for first in tables:  # here, so that little data starts no processes, and wrong data fails at once
        yield encode_in_pieces(first, encode)
        break
    else:
        return
    if workers == 1:
        yield from (encode_in_pieces(table, encode) for table in tables)
    elif _is_threaded(run, tokenizer, in_library(first, features)):
        with _threads(workers):
            yield from (encode_in_pieces(table, encode) for table in tables)
    else:
        yield from _in_processes(tables, encode, workers)


def encode_in_pieces(rows: pa.Table, encode: Encode) -> pa.Table:
    parts = -(-rows.nbytes // PIECE_BYTES) or 1
    size = -(-len(rows) // parts) or 1
    return pa.concat_tables([encode(rows.slice(start, size)) for start in range(0, max(1, len(rows)), size)])


def _is_threaded(run: Settings, tokenizer, rows: Dataset) -> bool:
    if not tokenizer.is_fast or formats(run, rows.column_names)[1:]:  # of several formats one may be chats
        return False
    encode = encoder(run, tokenizer, rows)
    return getattr(encode, "func", None) in (encode_texts, encode_completions, encode_whole_texts)


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
    return encode_in_pieces(table, _encode)
