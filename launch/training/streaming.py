"""A Trainer that goes on in a stream at the very next example after a resume.

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

from launch.data.batches import Example
from launch.data.streams import PLACE, Stream
from launch.host.files import read_regular, write_whole
from launch.output.other_world import readers_of, stream_file
from launch.output.saving import CommittingTrainer
from recipes.errors import StreamBroke
from recipes.run import Json


@dataclass
class Places:
    """Where the workers of one rank go on, and whose turn it is. `round` is that of a new start."""

    ranks: int
    workers: int
    shards: list[int]  # of each part
    turn: int = 0
    round: int = 0
    of: dict[str, Json] = field(default_factory=dict)


class StreamingTrainer(CommittingTrainer):
    """Trainer, but a stream goes on where its checkpoint was. Other data is Trainer's matter."""

    _places: Places
    _resumes_from: str | None = None

    def train(self, resume_from_checkpoint=None, **kwargs):
        self._resumes_from = str(resume_from_checkpoint) if resume_from_checkpoint else None
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        if not isinstance(self.train_dataset, Stream):
            return super().get_train_dataloader()
        args, sharing = self.args, self.get_tp_size()
        places = self._places = self._found(args.world_size // sharing, self.train_dataset.shards)
        stream = replace(
            self.train_dataset,
            rank=args.process_index // sharing,  # these processes have the same examples
            ranks=places.ranks,
            places=places.of,
            turn=places.turn,
            first_round=places.round,
        )
        loader = DataLoader(
            stream,
            batch_size=self._train_batch_size,
            collate_fn=_WithPlace(self.data_collator),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            generator=torch.Generator(),  # it draws a number, which dropout would miss after a resume
        )
        return prepare_data_loader(
            loader, args.device, num_processes=1, process_index=0, put_on_device=True, dispatch_batches=False
        )

    def _found(self, ranks: int, shards: list[int]) -> Places:
        """The places in the checkpoint. Those of another number of readers or shards are of no use,
        as the shards are dealt out in another way: the stream begins another round.
        """
        new = Places(ranks, max(1, self.args.dataloader_num_workers), shards)
        if self._resumes_from is None or self.args.ignore_data_skip:
            return new
        checkpoint = Path(self._resumes_from)
        held = {file.name: json.loads(read_regular(file)) for file in checkpoint.glob(stream_file("*"))}
        own = held.get(stream_file(self.args.process_index))
        same = readers_of(checkpoint) == (self.args.world_size, new.workers)
        if own and same and own["shards"] == shards:
            return Places(**own)
        rounds = [part["round"] for own in held.values() for place in own["of"].values() for part in place["parts"]]
        return replace(new, round=1 + max(rounds, default=0))

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        for batch in samples:
            place = batch.pop(PLACE, None)
            if isinstance(place, Exception):
                raise StreamBroke(str(place).rstrip("."))  # a mistake too: one rank alone may meet it
            if place is not None:
                worker = place.pop("worker")
                self._places.of[str(worker)] = place
                self._places.turn = (worker + 1) % self._places.workers
        return samples, items

    def _init_training_state(self, *args, **kwargs) -> tuple[int, int]:
        epochs, batches = super()._init_training_state(*args, **kwargs)
        return epochs, 0 if isinstance(self.train_dataset, Stream) else batches  # which Trainer would skip

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        if isinstance(self.train_dataset, Stream):
            self.state.epoch = self.state.global_step / self.state.max_steps  # Trainer counts from the resume
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and isinstance(self.train_dataset, Stream):
            file = Path(output_dir) / stream_file(self.args.process_index)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(vars(self._places)).encode())


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
