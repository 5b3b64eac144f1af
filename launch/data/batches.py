"""Make batches from tokens: of single examples, padded to a common length, or of packed rows.

Packing makes rows of exactly `max_length` tokens. The strategy `bfd` (best-fit decreasing) puts
examples side by side, and they do not attend to each other. `wrapped` joins all texts and cuts
them.

Packing reads only the examples' lengths and stores no tokens, because a row is built from the
tokenized examples when the row is read. Packing a million examples takes 0.5 s; trl's
`pack_dataset` takes 20 s and copies all tokens. trl also cuts long examples silently,
keeps rows with nothing to learn, and joins only within each thousand examples.
"""

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

Example = dict[str, Any]  # input_ids, and labels: one for each token, or one target


@dataclass
class _Made(torch.utils.data.Dataset):
    """Rows that are built from examples when they are read."""

    examples: Dataset
    length: int

    def __post_init__(self) -> None:
        self._tables = self.examples.with_format("arrow")  # once, because with_format takes as long as reading 40 rows

    def cut(self) -> str:
        """Describe the tokens that max_length cuts from long examples; empty if no token is cut."""
        lengths = lengths_of(self.examples)
        lost = int(np.maximum(lengths - self.length, 0).sum())
        share = f"{lost / max(1, lengths.sum()):.1%}"
        return f", {lost:,} tokens cut ({share}) from examples longer than {self.length:,}" if lost else ""


class Cut(_Made):
    """Rows of one example each, cut to `length` tokens."""

    def __str__(self) -> str:
        shown = np.minimum(lengths_of(self.examples), self.length)
        return f"{len(self):,} examples, {shown.mean():,.0f} tokens on average, {shown.max():,} at most{self.cut()}"

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, number: int) -> Example:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Example]:
        """Return the rows of a micro-batch in one call: torch's DataLoader uses this method."""
        rows = arrays_of(self._tables[numbers])
        return [
            {"input_ids": ids[: self.length].tolist(), "labels": labels[: self.length].tolist()} for ids, labels in rows
        ]


@dataclass
class Packs(_Made):
    """Packed rows: row `i` holds the examples `order[starts[i]:starts[i + 1]]`, then padding.

    The position_ids restart with each example, so that a model knows where an example begins. The
    first label of each example is ignored, because the token before belongs to another example.
    """

    padding: int = 0  # the id of padding tokens, which have no loss and which no example attends to

    def __post_init__(self) -> None:
        super().__post_init__()
        self.order, self.starts = best_fit(lengths_of(self.examples), self.length)

    def __str__(self) -> str:
        full = np.minimum(lengths_of(self.examples), self.length).sum() / (len(self) * self.length)
        inside = f"{len(self.examples):,} examples side by side, {full:.1%} full"
        return f"{len(self):,} sequences of {self.length:,} tokens ({inside}){self.cut()}"

    @property
    def attended(self) -> float:
        """The mean length of the examples, where an example of n tokens counts n times."""
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
    """Rows cut from all examples joined end to end. An incomplete last row is dropped."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ends = lengths_of(self.examples).cumsum()  # where each example ends in the joined tokens

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
    """Return an array that is True for each example with something to learn. A micro-batch with
    nothing to learn would have a loss of nan.

    `first_learned` holds the index of each example's first learned token. Examples are cut at
    `max_length` unless texts are joined, so later tokens do not count. Raises `UserError` if texts
    are joined and a prompt is not learned, because a row could then hold nothing but a prompt.
    """
    if not joins(run):
        return first_learned < run["max_length"]
    found = first_learned < NOTHING
    if (first_learned[found] > 1).any():
        what = "`wrapped` joins only texts that are learned in full, but the data has prompts that are not learned"
        raise mistake("packing_strategy", what, "--packing_strategy bfd, or --completion_only_loss false")
    return found


def nothing_to_learn(flag: str, longest: int) -> UserError:
    what = f"there is nothing to learn within {longest:,} tokens: all labels are masked"
    return mistake(flag, what, "use non-empty texts, completions or assistant messages, or a larger --max_length")


def in_rows(run: Settings, examples: Dataset, padding: int) -> Cut | Packs | Joined:
    """Return the rows that the run trains on: single examples, packs, or pieces of joined texts."""
    length = run["max_length"]
    if not run["packing"]:
        return Cut(examples, length)
    return Joined(examples, length) if joins(run) else Packs(examples, length, padding)


def best_fit(lengths: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack examples by best-fit decreasing: longest first, each into the fullest row where it fits.

    Returns the indices of the non-empty examples, row after row, and the positions in this list
    where each row begins and the last row ends. Examples are cut to `limit` tokens. Bit `n` of
    `spaces` is set while some row has `n` tokens left, so that finding a row needs no search.
    """
    lengths = np.minimum(lengths, limit)
    order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
    row_of, count, spaces = [], 0, 0
    rows_with: dict[int, list[int]] = defaultdict(list)  # space left -> the rows with that space
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
    """Stack packed rows into a batch: the rows are equally long and need no attention mask.

    FlashAttention takes the examples' starts from position_ids only if the batch has one row. In
    larger batches, examples would attend to each other. With `flash`, the batch therefore lists the
    starts of the examples. The number of starts is padded to a power of two, so that torch.compile
    rarely compiles the model again.
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
    """Pad rows on the right or left. Each token has a label; a classifier's row has one target."""

    pad_token_id: int
    longest: int  # rows are padded to at most this length, because the model may have no more positions
    left: bool = False

    def __call__(self, rows: list[Example]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        width = min(-(-length // 8) * 8, self.longest)  # tensor cores want lengths divisible by 8

        def padded(values: list[list[int]], filler: int) -> torch.Tensor:
            filled = [([filler] * (width - len(value)), value) for value in values]
            return torch.tensor([more + value if self.left else value + more for more, value in filled])

        batch = {
            "input_ids": padded([row["input_ids"] for row in rows], filler=self.pad_token_id),
            "attention_mask": padded([[1] * len(row["input_ids"]) for row in rows], filler=0),
        }
        labels = [row["labels"] for row in rows]
        per_token = isinstance(labels[0], list)
        batch["labels"] = padded(labels, filler=IGNORED) if per_token else torch.tensor(labels)
        return batch
