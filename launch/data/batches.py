"""From tokens to batches: packed rows of one length, or rows padded to a common length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

IGNORED = -100  # the label that cross-entropy skips
MULTIPLE = 8  # tensor cores want lengths divisible by 8

Example = dict[str, Any]  # input_ids, and labels: one for each token, or one class


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
