"""Packing: rows of exactly `max_length` tokens. Whole examples side by side that do not see each
other (`bfd`, for best-fit decreasing), or all texts joined and cut (`wrapped`).

A row is made of the tokenized examples when it is asked for: packing looks at their lengths only
and stores nothing. trl's `pack_dataset` takes 20 s and a second copy of the tokens for a million
examples, against 0.5 s and none. It cuts long examples without a word, keeps rows without
anything to learn, and joins within each thousand examples only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import Dataset

from launch.data.batches import IGNORED, Example
from launch.data.tokens import NOTHING, arrays_of, lengths_of
from recipes.errors import UserError, mistake
from recipes.run import Settings

Row = dict[str, torch.Tensor]


@dataclass
class _Made(torch.utils.data.Dataset):
    """Rows that are made of examples when they are asked for."""

    examples: Dataset
    length: int

    def __post_init__(self) -> None:
        self._tables = self.examples.with_format("arrow")  # takes forty times as long as reading a row

    def cut(self) -> str:
        """How much of the examples is longer than a row, in words."""
        lengths = lengths_of(self.examples)
        lost = int(np.maximum(lengths - self.length, 0).sum())
        share = f"{lost / max(1, lengths.sum()):.1%}"
        return f", {lost:,} tokens cut ({share}): examples longer than {self.length:,}" if lost else ""


class Cut(_Made):
    """Each example on its own, cut to `length` tokens."""

    def __str__(self) -> str:
        shown = np.minimum(lengths_of(self.examples), self.length)
        return f"{len(self):,} examples of {shown.mean():,.0f} tokens, the longest {shown.max():,}{self.cut()}"

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> Example:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Example]:
        """A micro-batch at once, which torch's loader asks for."""
        rows = arrays_of(self._tables[numbers])
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

    def __str__(self) -> str:
        full = np.minimum(lengths_of(self.examples), self.length).sum() / (len(self) * self.length)
        inside = f"{len(self.examples):,} examples side by side, {full:.1%} full"
        return f"{len(self):,} sequences of {self.length:,} tokens ({inside}){self.cut()}"

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> Row:
        numbers = self.order[self.starts[number] : self.starts[number + 1]]
        table = self._tables[numbers]
        rows = [(ids[: self.length], labels[: self.length]) for ids, labels in arrays_of(table)]
        filled = sum(len(ids) for ids, _ in rows)
        rest = self.length - filled
        pieces = [*rows, (np.full(rest, self.padding, np.int32), np.full(rest, IGNORED, np.int32))]
        ids, labels = (np.concatenate(part) for part in zip(*pieces, strict=True))
        positions = np.concatenate([np.arange(len(ids)) for ids, _ in pieces])
        labels[positions == 0] = IGNORED
        return _row(input_ids=ids, labels=labels, position_ids=positions)


@dataclass
class Joined(_Made):
    """Row `i` is the part `i` of the examples joined end to end. The incomplete last part is left
    out.
    """

    ends: np.ndarray = field(repr=False)  # of each example, in the joined tokens

    def __str__(self) -> str:
        rest = int(self.ends[-1]) - len(self) * self.length
        more = f", {rest:,} tokens left over" if rest else ""
        return f"{len(self):,} sequences of {self.length:,} tokens{more}"

    def __len__(self) -> int:
        return int(self.ends[-1]) // self.length if len(self.ends) else 0

    def __getitem__(self, number: int) -> Row:
        if not 0 <= number < len(self):
            raise IndexError
        start = number * self.length
        first, last = np.searchsorted(self.ends, [start, start + self.length - 1], side="right")
        table = self._tables[range(first, last + 1)]
        ids, labels = (np.concatenate(part) for part in zip(*arrays_of(table), strict=True))
        begin = start - (int(self.ends[first - 1]) if first else 0)
        return _row(input_ids=ids[begin : begin + self.length], labels=labels[begin : begin + self.length])


def joins(run: Settings) -> bool:
    return run["packing"] and run["packing_strategy"] == "wrapped"


def teaches(run: Settings, first_learned: np.ndarray) -> np.ndarray:
    """True for each example that teaches something, by the place of its first label: labels beyond
    `max_length` are cut off. A micro-batch of only others would have a loss of nan.

    Raises `UserError` if texts are joined and parts of them are only read: a row could hold those
    alone.
    """
    if not joins(run):
        return first_learned < run["max_length"]
    found = first_learned < NOTHING
    if (first_learned[found] > 1).any():
        what = "wrapped joins texts of which all is learned, and the data has prompts that are only read"
        raise mistake("packing_strategy", what, "--packing_strategy bfd, or --completion_only_loss false")
    return found


def nothing_to_learn(flag: str, longest: int) -> UserError:
    what = f"there is nothing to learn within {longest:,} tokens: all labels are masked"
    return mistake(flag, what, "texts, completions or assistant messages that are not empty, a larger --max_length")


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
    return Joined(examples, length, lengths_of(examples).cumsum())


def best_fit(lengths: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing bin packing: the longest example first, each into the row with the least
    space that it fits in. Returns the examples' numbers row by row, and where each row begins.

    Examples above the limit count as long as it. A bit of `spaces` stands for each space that some
    row has left: a million examples take half a second.
    """
    lengths = np.minimum(lengths, limit)
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    row_of, count, spaces = [], 0, 0
    rows_with: dict[int, list[int]] = defaultdict(list)  # rows by the space that is left in them
    for length in lengths[order].tolist():
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1
            row = rows_with[space].pop()
            if not rows_with[space]:
                spaces ^= 1 << space
        else:
            row, space, count = count, limit, count + 1
        row_of.append(row)
        if left := space - length:
            rows_with[left].append(row)
            spaces |= 1 << left
    by_row = np.argsort(row_of, kind="stable")
    return order[by_row], np.searchsorted(np.array(row_of, np.int64)[by_row], np.arange(count + 1))


def _row(**columns: np.ndarray) -> Row:
    return {name: torch.from_numpy(column.astype(np.int64)) for name, column in columns.items()}
