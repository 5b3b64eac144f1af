"""The order of the examples and those that a batch holds, also after a resume in mid-stream."""

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
from launch.output.other_world import readers_of, stream_file
from recipes.errors import StreamBroke
from recipes.run import Json


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


def tokens_of(batch: Mapping[str, torch.Tensor]) -> torch.Tensor | int:
    """Tokens of a micro-batch without padding. What is counted stays on the device."""
    if batch.get("attention_mask") is not None:
        return batch["attention_mask"].sum()
    tokens = batch["input_ids"].numel()
    if "position_ids" not in batch:
        return tokens
    # In a packed row only padding has no label at all from where its positions begin.
    place = torch.arange(batch["input_ids"].shape[1], device=batch["input_ids"].device)
    last_start = (place * (batch["position_ids"] == 0)).amax(-1)
    last_label = (place * (batch["labels"] != IGNORED)).amax(-1)
    return tokens - torch.where(last_label < last_start, len(place) - last_start, 0).sum()


# --- Streams --------------------------------------------------------------------------------------


@dataclass
class Places:
    """The places in a stream at which the workers of a rank resume, each at the very next example,
    and the worker whose turn it is. `round` is that of a new start.

    Trainer would read all that was trained once more, and rank 0 would tokenize for all ranks. Its
    loader is ahead of the training, by a batch and by what each worker prepares. So a batch carries
    the place of its last example, and a checkpoint holds those of the batches that were trained.
    """

    ranks: int
    workers: int
    shards: list[int]  # of each part
    turn: int = 0
    round: int = 0
    of: dict[str, Json] = field(default_factory=dict)

    def found_in(self, checkpoint: Path, rank: int, world: int) -> Places:
        """The places in a checkpoint. Those of another number of readers or shards are of no use,
        as the shards are dealt out in another way: the stream begins another round.
        """
        held = {file.name: json.loads(file.read_bytes()) for file in checkpoint.glob(stream_file("*"))}
        own = held.get(stream_file(rank))
        if own and readers_of(checkpoint) == (world, self.workers) and own["shards"] == self.shards:
            return Places(**own)
        rounds = [part["round"] for own in held.values() for place in own["of"].values() for part in place["parts"]]
        return replace(self, round=1 + max(rounds, default=0))

    def advance(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch that is trained next, without its place, which is kept here."""
        place = batch.pop(PLACE)
        if isinstance(place, Exception):
            raise StreamBroke(str(place).rstrip("."))  # a mistake too: one rank alone may meet it
        worker = place.pop("worker")
        self.of[str(worker)] = place
        self.turn = (worker + 1) % self.workers
        return batch

    def save(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / stream_file(rank), json.dumps(vars(self)).encode())

    def loader(
        self, stream: Stream, collate: Callable[[list[Example]], dict[str, Any]], reader: int, args: TrainingArguments
    ) -> DataLoader:
        """The batches of one `reader`, the processes that have the same examples."""
        loader = DataLoader(
            replace(stream, rank=reader, ranks=self.ranks, places=self.of, turn=self.turn, first_round=self.round),
            batch_size=args.train_batch_size,
            collate_fn=partial(_with_place, collate),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            generator=torch.Generator(),  # it draws a number, which dropout would miss after a resume
        )
        return prepare_data_loader(
            loader, args.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
        )


def _with_place(collate: Callable[[list[Example]], dict[str, Any]], rows: list[Example]) -> dict[str, Any]:
    """A micro-batch with the place after it, or only the reason why there is none."""
    place = next((row[PLACE] for row in rows if isinstance(row[PLACE], Exception)), rows[-1][PLACE])
    if isinstance(place, Exception):
        return {PLACE: place}
    return {**collate([{name: row[name] for name in row if name != PLACE} for row in rows]), PLACE: place}
