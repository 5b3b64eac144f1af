"""The order of the examples, which of them a batch holds, and what BatchNorm makes of them."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

from launch.data.batches import IGNORED
from recipes.errors import mistake

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from recipes.run import Settings


class GroupedByLength(LengthGroupedSampler):
    """Trainer's order of examples by length, but the same one on any hardware and after any resume.

    Trainer groups what one process trains on in a step, and shuffles with random numbers that a
    resume in the second epoch does not have.
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
    in an epoch from its beginning; -1 or 0: all.
    """
    try:
        return -1 if loader._drop_last else len(loader.dataset) % loader.total_batch_size
    except (AttributeError, TypeError):  # batches of different sizes
        return -1


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to the sampler, whatever wraps it."""
    sampler = loader
    while sampler is not None:
        inner = getattr(sampler, "batch_sampler", None)  # without a length, in a stream: `or` would ask for it
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def example_numbers(batch: Mapping[str, torch.Tensor], padding_free: bool) -> torch.Tensor:
    """For each label the number of its example: the row, or the position in a padding-free row."""
    labels = batch["labels"]
    if padding_free:
        return (batch["position_ids"] == 0).cumsum(-1) - 1
    rows = torch.arange(len(labels), device=labels.device)
    return rows if labels.dim() == 1 else rows[:, None].expand_as(labels)


def tokens_of(batch: Mapping[str, torch.Tensor], padding_free: bool) -> torch.Tensor | int:
    """Tokens of a micro-batch without padding. What is counted stays on the device."""
    if batch.get("attention_mask") is not None:
        return batch["attention_mask"].sum()
    tokens = batch["input_ids"].numel()
    if "position_ids" not in batch or padding_free:
        return tokens
    # In a packed row only padding has no label at all from where its positions begin.
    place = torch.arange(batch["input_ids"].shape[1], device=batch["input_ids"].device)
    last_start = (place * (batch["position_ids"] == 0)).amax(-1)
    last_label = (place * (batch["labels"] != IGNORED)).amax(-1)
    return tokens - torch.where(last_label < last_start, len(place) - last_start, 0).sum()


def has_batch_norm(model: torch.nn.Module) -> bool:
    """True if a layer normalises over the micro-batch of its own process."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    return any(not isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms)


def require_batches_for_batch_norm(run: Settings, model: PreTrainedModel, examples: int) -> None:
    """BatchNorm fails on one value per channel, as a lone example may be: try it with one."""
    micro, world = run["per_device_train_batch_size"], int(os.environ.get("WORLD_SIZE", 1))
    # On several processes accelerate fills the last batch of an epoch up.
    is_reached = run["max_steps"] < 1 or run["max_steps"] * run["global_batch_size"] >= examples
    leaves_one = world == 1 and examples % micro == 1 and is_reached and not run["dataloader_drop_last"]
    if not (micro == 1 or leaves_one) or not has_batch_norm(model) or is_deepspeed_zero3_enabled():
        return
    trial, row = copy.deepcopy(model).train(), torch.arange(1, 9, device=model.device).unsqueeze(0)
    try:
        with torch.random.fork_rng(), torch.no_grad():
            trial(input_ids=row)
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        setting, fix = "dataloader_drop_last", "--dataloader_drop_last, or a --dataset_train_split of one example less"
        if micro == 1:
            setting = "per_device_train_batch_size"
            fix = f"--per_device_train_batch_size 2, and a --global_batch_size that {2 * world} divides"
        raise mistake(setting, "leaves a micro-batch of 1 example, and this model's BatchNorm needs 2", fix) from None
