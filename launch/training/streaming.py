"""Where a training is in a stream, so that a resume starts at the very next example.

Trainer would read all that was trained once more, and rank 0 would tokenize for all ranks. Its
loader is ahead of the training, by a batch and by what each worker prepares. So a batch carries
the place of its last example, and a checkpoint holds the places of the batches that were trained.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from launch.data.batches import Example
from launch.data.streams import PLACE, Stream
from launch.host.files import read_regular, write_whole
from launch.output.other_world import readers_of, stream_file
from recipes.errors import StreamBroke
from recipes.run import Json


@dataclass
class Places:
    """Where the workers of a rank resume, and which is next. `round` is that of a new start."""

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
        held = {file.name: json.loads(read_regular(file)) for file in checkpoint.glob(stream_file("*"))}
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
            collate_fn=_WithPlace(collate),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            generator=torch.Generator(),  # it draws a number, which dropout would miss after a resume
        )
        return prepare_data_loader(
            loader, args.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
        )


@dataclass(frozen=True)
class _WithPlace:
    """A collator that puts the place after a micro-batch into it, or why there is none."""

    collate: Callable[[list[Example]], dict[str, torch.Tensor]]

    def __call__(self, rows: list[Example]) -> dict[str, Any]:
        broken = next((row[PLACE] for row in rows if isinstance(row[PLACE], Exception)), None)
        if broken is not None:
            return {PLACE: broken}
        place = rows[-1][PLACE]
        return {**self.collate([{name: row[name] for name in row if name != PLACE} for row in rows]), PLACE: place}
