"""Count the last examples of an epoch and the tokens of a batch; resume a stream of data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from launch.data.batches import Example
from launch.data.encode import IGNORED
from launch.data.streams import PLACE, Stream
from launch.host.files import write_whole
from launch.output.other_world import stream_file, writers
from recipes.errors import StreamBroke
from recipes.run import Json


def examples_in_last_round(loader: Any) -> int:
    """Return the number of examples in an epoch's last round. In a round, each process takes one
    micro-batch. Return 0 or less if accelerate repeats no example to fill up the last round.
    """
    try:
        return -1 if loader._drop_last else len(loader.dataset) % loader.total_batch_size
    except (AttributeError, TypeError):  # batches of different sizes
        return -1


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of the loader's sampler, even if other samplers wrap this sampler."""
    sampler = loader
    while sampler is not None:
        inner = getattr(sampler, "batch_sampler", None)  # `or` would call len(), which a stream's sampler lacks
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def tokens_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor | int:
    """Count a micro-batch's tokens, but not its padding. A count may be a tensor on the device."""
    if batch.get("attention_mask") is not None:
        return batch["attention_mask"].sum()
    tokens = batch["input_ids"].numel()
    if "position_ids" not in batch:
        return tokens
    # In a packed row, tokens after the last restart of positions are padding if they have no label.
    place = torch.arange(batch["input_ids"].shape[1], device=batch["input_ids"].device)
    last_start = (place * (batch["position_ids"] == 0)).amax(-1)
    last_label = (place * (batch["labels"] != IGNORED)).amax(-1)
    return tokens - torch.where(last_label < last_start, len(place) - last_start, 0).sum()


# --- Streams --------------------------------------------------------------------------------------


@dataclass
class Places:
    """The positions ("places") in a stream where the workers of one rank resume.

    `of` maps each worker to the place of its next example. `turn` is the worker that yields the
    next batch. `round` is the epoch in which the stream begins if no place is known.

    Trainer's own resume would read all trained examples again, and rank 0 would tokenize for all
    ranks. The loader reads ahead of the training. Therefore each batch carries the place after its
    last example, and a checkpoint holds the places of trained batches only.
    """

    ranks: int  # number of ranks, or of groups that get the same examples
    workers: int  # of each rank, at least 1
    shards: list[int]  # the number of shards of each part of the data
    turn: int = 0
    round: int = 0
    of: dict[str, Json] = field(default_factory=dict)

    def found_in(self, checkpoint: Path, rank: int, world: int) -> Places:
        """Return the places that a checkpoint holds. If the number of processes, workers or shards
        has changed, shards are assigned anew, so the stream begins its next epoch instead.
        """
        held = {file.name: json.loads(file.read_bytes()) for file in checkpoint.glob(stream_file("*"))}
        own = held.get(stream_file(rank))
        if own and writers(checkpoint) == world and (own["workers"], own["shards"]) == (self.workers, self.shards):
            return Places(**own)
        rounds = [part["round"] for own in held.values() for place in own["of"].values() for part in place["parts"]]
        return replace(self, round=1 + max(rounds, default=0))

    def advance(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Move a batch's place into `self.of`. Raises `StreamBroke` if a worker sent an error."""
        place = batch.pop(PLACE)
        if isinstance(place, Exception):
            raise StreamBroke(str(place).rstrip("."))  # also for a UserError, which only one rank may meet
        worker = place.pop("worker")
        self.of[str(worker)] = place
        self.turn = (worker + 1) % self.workers
        return batch

    def save(self, folder: Path, rank: int) -> None:
        write_whole(folder / stream_file(rank), json.dumps(vars(self)).encode())

    def loader(
        self, stream: Stream, collate: Callable[[list[Example]], dict[str, Any]], reader: int, args: TrainingArguments
    ) -> DataLoader:
        """Return the loader of group number `reader`, whose ranks all get the same examples."""
        loader = DataLoader(
            replace(stream, rank=reader, ranks=self.ranks, places=self.of, turn=self.turn, first_round=self.round),
            batch_size=args.train_batch_size,
            collate_fn=partial(_with_place, collate),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            generator=torch.Generator(),  # a seed from torch's global generator would change dropout after a resume
        )
        return prepare_data_loader(
            loader, args.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
        )


def _with_place(collate: Callable[[list[Example]], dict[str, Any]], rows: list[Example]) -> dict[str, Any]:
    """Return the collated rows with the place after the last row, or the error that a row holds."""
    places = [row.pop(PLACE) for row in rows]
    if errors := [place for place in places if isinstance(place, Exception)]:
        return {PLACE: errors[0]}
    return {**collate(rows), PLACE: places[-1]}
