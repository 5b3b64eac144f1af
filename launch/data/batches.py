"""From tokens to batches: each example on its own, padded to a common length, or packed.

Packing makes rows of exactly `max_length` tokens. Whole examples side by side that do not see each
other (`bfd`, for best-fit decreasing), or all texts joined and cut (`wrapped`).

A row is made of the tokenized examples when it is asked for: packing looks at their lengths only
and stores nothing. trl's `pack_dataset` takes 20 s and a second copy of the tokens for a million
examples, against 0.5 s and none. It cuts long examples without a word, keeps rows without
anything to learn, and joins within each thousand examples only.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from launch.data.encode import IGNORED
from launch.data.tokens import NOTHING, arrays_of, lengths_of
from recipes.errors import UserError, mistake
from recipes.run import Settings

Example = dict[str, Any]  # input_ids, and labels: one for each token, or one class


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

    padding: int = 0  # a token: nothing is learned of it, and nothing sees it

    def __post_init__(self) -> None:
        super().__post_init__()
        self.order, self.starts = best_fit(lengths_of(self.examples), self.length)

    def __str__(self) -> str:
        full = np.minimum(lengths_of(self.examples), self.length).sum() / (len(self) * self.length)
        inside = f"{len(self.examples):,} examples side by side, {full:.1%} full"
        return f"{len(self):,} sequences of {self.length:,} tokens ({inside}){self.cut()}"

    @property
    def attended(self) -> float:
        """The length of a token's own example, averaged over all tokens."""
        lengths = np.minimum(lengths_of(self.examples), self.length).astype(float)
        return float((lengths**2).sum() / lengths.sum())

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ends = lengths_of(self.examples).cumsum()  # of each example, in the joined tokens

    def __str__(self) -> str:
        rest = int(self.ends[-1]) - len(self) * self.length
        return f"{len(self):,} sequences of {self.length:,} tokens" + (f", {rest:,} tokens left over" if rest else "")

    def __len__(self) -> int:
        return int(self.ends[-1]) // self.length if len(self.ends) else 0

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
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
    return Joined(examples, length) if joins(run) else Packs(examples, length, padding)


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


def _row(**columns: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(column.astype(np.int64)) for name, column in columns.items()}


# --- Batches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """Packed rows have one length and nothing to mask.

    FlashAttention finds where examples begin by position_ids in a batch of one row only, and lets
    them see each other in larger ones: for `flash`, it is told. The number of limits is a power of
    two, so that compiled code is rarely compiled again.
    """

    flash: bool = False

    def __call__(self, rows: list[Example]) -> dict[str, Any]:
        batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        if not self.flash or "position_ids" not in batch:
            return batch
        positions = batch["position_ids"]
        starts = (positions.flatten() == 0).nonzero().flatten()
        limits = torch.full(((1 << len(starts).bit_length()) + 1,), positions.numel(), dtype=torch.int32)
        limits[: len(starts)] = starts
        length = positions.shape[1]
        return batch | dict(cu_seq_lens_q=limits, cu_seq_lens_k=limits, max_length_q=length, max_length_k=length)


@dataclass(frozen=True)
class Pad:
    """Pads on the right. A row's labels are one per token, or one class for the whole row."""

    pad_token_id: int
    longest: int  # no batch is padded beyond it: the model may have no more positions

    def __call__(self, rows: list[Example]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        width = min(-(-length // 8) * 8, self.longest)  # tensor cores want lengths divisible by 8
        batch = {
            "input_ids": _padded([row["input_ids"] for row in rows], width, self.pad_token_id),
            "attention_mask": _padded([[1] * len(row["input_ids"]) for row in rows], width, 0),
        }
        labels = [row["labels"] for row in rows]
        per_token = isinstance(labels[0], list)
        batch["labels"] = _padded(labels, width, IGNORED) if per_token else torch.tensor(labels)
        return batch


def _padded(rows: list[list[int]], width: int, filler: int) -> torch.Tensor:
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])
