"""From tokens to batches: packed rows of one length, or rows padded to a common length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

if TYPE_CHECKING:  # RecipeTrainer needs neither: it also trains where they are not installed
    import pyarrow as pa
    from datasets import Dataset

IGNORED = -100  # the label that cross-entropy skips
MULTIPLE = 8  # tensor cores want lengths divisible by 8

Example = dict[str, Any]  # input_ids, and labels: one for each token, or one class


def pack(examples: Dataset, length: int) -> Dataset:
    """Join the examples end to end and cut them into rows of exactly `length` tokens.

    The incomplete last row is dropped. So are rows without any label: a micro-batch of only such
    rows has a loss of nan.
    """
    return examples.with_format("arrow").map(_Packer(length), batched=True, desc="Packing").with_format("torch")


class _Packer:
    """Packs batch after batch. Tokens that do not fill a row are kept for the next batch."""

    def __init__(self, length: int):
        self.length = length
        self.rest = {name: np.empty(0, dtype=np.int32) for name in ("input_ids", "labels")}

    def __call__(self, examples: pa.Table) -> pa.Table:
        import pyarrow as pa

        rows = {name: self._cut(name, examples[name]) for name in self.rest}
        teaches = (rows["labels"][:, 1:] != IGNORED).any(axis=1)  # nothing predicts the first label
        return pa.table({name: _list_array(cut[teaches]) for name, cut in rows.items()})

    def _cut(self, name: str, column: pa.ChunkedArray) -> np.ndarray:
        tokens = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
        stream = np.concatenate([self.rest[name], *tokens])
        end = len(stream) // self.length * self.length
        self.rest[name] = stream[end:]
        return stream[:end].reshape(-1, self.length)


def _list_array(rows: np.ndarray) -> pa.ListArray:
    import pyarrow as pa

    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(rows.ravel(), type=pa.int32()))


def stack(rows: list[Example]) -> dict[str, torch.Tensor]:
    """Packed rows have one length and nothing to mask."""
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("input_ids", "labels")}


@dataclass(frozen=True)
class Pad:
    """Pads on the right. A row's labels are one per token, or one class for the whole row."""

    pad_token_id: int
    longest: int  # no batch is padded beyond it: the model may have no more positions

    def __call__(self, rows: list[Example]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        width = min(-(-length // MULTIPLE) * MULTIPLE, self.longest)
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


class GroupedByLength(LengthGroupedSampler):
    """Trainer's order of examples by length, but the same one on any hardware and after any resume.

    Trainer groups what one process trains on in a step, and shuffles with the state of its random
    numbers: another number of processes has another order, and so has a run that was resumed in
    the middle of its second epoch.
    """

    def __init__(self, global_batch: int, lengths: list[int], seed: int):
        super().__init__(global_batch, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        numbers = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(get_length_grouped_indices(self.lengths, self.batch_size, generator=numbers))


def examples_in_last_round(loader: Any) -> int:
    """The examples in the last round of micro-batches of all processes, as accelerate counts them
    where it does; -1 or 0: all.
    """
    try:
        return -1 if loader._drop_last else len(loader.dataset) % loader.total_batch_size
    except (AttributeError, TypeError):  # batches of different sizes
        return -1


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to the sampler, whatever wraps it."""
    sampler = loader
    while (sampler := getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)) is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def example_numbers(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """For each label the number of its example: the row, or the position in a padding-free row."""
    labels = batch["labels"]
    if "position_ids" in batch and labels.dim() == 2 and len(labels) == 1:
        return (batch["position_ids"] == 0).cumsum(-1) - 1
    rows = torch.arange(len(labels), device=labels.device)
    return rows if labels.dim() == 1 else rows[:, None].expand_as(labels)
