"""Packing: rows of exactly `max_length` tokens. Whole examples side by side that do not see each
other (`bfd`, for best-fit decreasing), or all texts joined and cut (`wrapped`).

A row is made of the tokenized examples when it is asked for: packing looks at their lengths only
and stores nothing. trl's `pack_dataset` takes 20 s and a second copy of the tokens for a million
examples, against 0.2 s and none. It cuts long examples without a word, keeps rows without
anything to learn, and joins within each thousand examples only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset

from launch.data.batches import IGNORED, Example
from launch.data.tokens import NOTHING, labels_of, lengths_of
from recipes.run import Settings

Row = dict[str, torch.Tensor]


@dataclass
class _Made(torch.utils.data.Dataset):
    """Rows that are made of examples when they are asked for."""

    examples: Dataset
    length: int

    def __post_init__(self) -> None:
        self._tables = self.examples.with_format("arrow")  # takes forty times as long as reading a row


class Cut(_Made):
    """Each example on its own, cut to `length` tokens."""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> Example:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Example]:
        """A micro-batch at once, which torch's loader asks for."""
        rows = _tokens(self._tables[numbers])
        return [
            {"input_ids": ids[: self.length].tolist(), "labels": labels[: self.length].tolist()} for ids, labels in rows
        ]


@dataclass
class Packs(_Made):
    """Row `i` holds the examples `order[starts[i]:starts[i + 1]]`, and at its end padding.

    Their position_ids restart, which is how a model knows where one begins. The first label of
    each is ignored: the token before it is another's.
    """

    order: np.ndarray
    starts: np.ndarray
    padding: int = 0  # a token: nothing is learned of it, and nothing sees it

    @property
    def most_examples(self) -> int:
        """In one row, where the padding counts as one more."""
        return int(np.diff(self.starts).max()) + 1

    @property
    def attended(self) -> float:
        """Tokens of the example that a token belongs to, on average."""
        lengths = np.minimum(lengths_of(self.examples), self.length).astype(float)
        return float((lengths**2).sum() / lengths.sum())

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> Row:
        numbers = self.order[self.starts[number] : self.starts[number + 1]]
        table = self._tables[numbers]
        rows = [(ids[: self.length], labels[: self.length]) for ids, labels in _tokens(table)]
        filled = sum(len(ids) for ids, _ in rows)
        rest = self.length - filled
        pieces = [*rows, (np.full(rest, self.padding, np.int32), np.full(rest, IGNORED, np.int32))]
        ids, labels = (np.concatenate(part) for part in zip(*pieces, strict=True))
        positions = np.concatenate([np.arange(len(ids)) for ids, _ in pieces])
        labels[positions == 0] = IGNORED
        return _row(input_ids=ids, labels=labels, position_ids=positions)


@dataclass
class Joined(_Made):
    """Row `i` is the part `rows[i]` of the examples joined end to end.

    The incomplete last part is left out, and so are those with nothing to learn: a micro-batch of
    only such rows has a loss of nan.
    """

    rows: np.ndarray
    ends: np.ndarray = field(repr=False)  # of each example, in the joined tokens

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Row:
        start = int(self.rows[number]) * self.length
        first, last = np.searchsorted(self.ends, [start, start + self.length - 1], side="right")
        table = self._tables[range(first, last + 1)]
        ids, labels = (np.concatenate(part) for part in zip(*_tokens(table), strict=True))
        begin = start - (int(self.ends[first - 1]) if first else 0)
        return _row(input_ids=ids[begin : begin + self.length], labels=labels[begin : begin + self.length])


def joins(run: Settings) -> bool:
    return run["packing"] and run["packing_strategy"] == "wrapped"


def reach(run: Settings) -> int:
    """An example teaches something if it learns a token before this one: the others are cut off.

    A micro-batch of only such examples has a loss of nan.
    """
    return NOTHING if joins(run) else run["max_length"]


def in_rows(run: Settings, examples: Dataset, padding: int) -> Cut | Packs | Joined:
    """The examples as the run trains on them."""
    length = run["max_length"]
    if not run["packing"]:
        return Cut(examples, length)
    return joined(examples, length) if joins(run) else packed(examples, length, padding)


def packed(examples: Dataset, length: int, padding: int = 0) -> Packs:
    """All examples, each cut to `length` tokens, in as few rows as best fit finds."""
    return Packs(examples, length, *best_fit(lengths_of(examples), length), padding)


def joined(examples: Dataset, length: int) -> Joined:
    """All examples end to end, cut into rows of `length` tokens."""
    ends = lengths_of(examples).cumsum()
    count = int(ends[-1]) // length if len(ends) else 0
    return Joined(examples, length, _rows_that_teach(examples, length, count), ends)


def best_fit(lengths: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing bin packing: the longest example first, each into the row with the least
    space that it fits in. Returns the examples' numbers row by row, and where each row begins.

    Examples of one length are placed at once: a million take a fifth of a second. Those above the
    limit count as long as it.
    """
    lengths = np.minimum(lengths, limit)
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    counts = np.bincount(lengths, minlength=limit + 1)
    row_of = np.empty(len(order), np.int64)
    rooms, placed = _Rooms(limit), 0
    for length in range(limit, 0, -1):
        end = placed + int(counts[length])
        while placed < end:
            rows, space = rooms.take(length, end - placed)
            each = space // length  # the next of this length fits best where the last one went
            assigned = np.repeat(rows, each)[: end - placed]
            row_of[placed : placed + len(assigned)] = assigned
            placed += len(assigned)
            rooms.give_back(rows[:-1], space - each * length)
            rooms.give_back(rows[-1:], space - (len(assigned) - each * (len(rows) - 1)) * length)
    by_row = np.argsort(row_of, kind="stable")
    return order[by_row], np.searchsorted(row_of[by_row], np.arange(rooms.count + 1))


class _Rooms:
    """Rows by the space that is left in them."""

    def __init__(self, limit: int):
        self.limit, self.count = limit, 0
        self.rows: dict[int, list[np.ndarray]] = defaultdict(list)
        self.free = np.zeros(limit + 1, np.int64)  # how many rows have so much space

    def take(self, length: int, wanted: int) -> tuple[np.ndarray, int]:
        """Rows with the least space that `length` fits in, at most as many as `wanted` examples of
        that length fill, and their space. New rows if it fits in none.
        """
        spaces = np.flatnonzero(self.free[length:])
        if not len(spaces):
            new = np.arange(self.count, self.count + -(-wanted // (self.limit // length)))
            self.count += len(new)
            return new, self.limit
        space = length + int(spaces[0])
        rows, most = self.rows[space].pop(), -(-wanted // (space // length))
        if len(rows) > most:
            self.rows[space].append(rows[most:])
        self.free[space] -= min(len(rows), most)
        return rows[:most], space

    def give_back(self, rows: np.ndarray, space: int) -> None:
        if space and len(rows):
            self.rows[space].append(rows)
            self.free[space] += len(rows)


def _tokens(table: pa.Table) -> list[tuple[np.ndarray, np.ndarray]]:
    """The input_ids and labels of each row of a table."""
    return list(zip(_arrays(table["input_ids"]), _arrays(labels_of(table)), strict=True))


def _arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    return [
        chunk.values.to_numpy(zero_copy_only=False)[start:end]
        for chunk in column.chunks
        for start, end in zip(chunk.offsets.to_numpy()[:-1], chunk.offsets.to_numpy()[1:], strict=True)
    ]


def _rows_that_teach(examples: Dataset, length: int, count: int) -> np.ndarray:
    """The numbers of the rows with a label. Nothing predicts the first, so it does not count."""
    learned = np.zeros(count, bool)
    start = 0
    for table in examples.with_format("arrow").iter(1_000):
        labels = np.concatenate([np.empty(0, np.int32), *(label for _, label in _tokens(table))])
        place = np.flatnonzero(labels != IGNORED) + start
        rows = place[(place % length > 0) & (place < count * length)] // length
        learned[rows] = True
        start += len(labels)
    return np.flatnonzero(learned)


def _row(**columns: np.ndarray) -> Row:
    return {name: torch.from_numpy(column.astype(np.int64)) for name, column in columns.items()}
