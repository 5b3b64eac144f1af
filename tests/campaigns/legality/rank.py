"""One rank of a tried run: train.py as it is, with somebody who watches what it really does.

With $LEGALITY_UNCHECKED train.py's own check is switched off. What was seen goes to
observed/RANK.json in the current folder.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

from tests.campaigns.legality.case import LIFTED

FOLDER = "observed"


def main(argv: list[str]) -> int:
    """Returns train.py's exit code; raises what train.py raises."""
    from launch import train
    from tests.campaigns.resuming import moment

    if os.environ.get("LEGALITY_UNCHECKED"):
        _switch_off_the_check()
    if os.environ.get(LIFTED):
        from tests.support.fsdp_on_cpu import lift_the_refusal

        lift_the_refusal()
    with moment.watched("out"), _watching() as seen:
        try:
            return train.main(argv)
        finally:
            Path(FOLDER).mkdir(exist_ok=True)
            file = Path(FOLDER, f"{os.environ.get('RANK', 0)}.json")
            part = file.with_suffix(".part")  # the rank may be killed meanwhile
            part.write_text(json.dumps(seen, default=str), encoding="utf-8")
            part.rename(file)


def _switch_off_the_check() -> None:
    """Nothing is refused, and a value that is not of its setting's type is passed on."""
    from launch import train
    from recipes.run import command_line

    coerce = command_line.coerce

    def anything(value: object, known) -> object:
        try:
            return coerce(value, known)
        except ValueError:
            return float(value) if isinstance(value, str) and value in ("nan", "inf", "1.5") else value

    train.require_legal = lambda run: []
    train.require_constructible = lambda run: None
    command_line.coerce = anything


class _watching:
    """Replaces two methods of Trainer for the length of a training. Gives what they saw."""

    def __enter__(self) -> dict[str, Any]:
        from transformers import Trainer

        self.train, self.step = Trainer.train, Trainer.training_step
        seen: dict[str, Any] = {"rows": {}, "losses": []}
        watched = self

        def train(trainer, *args, **kwargs):
            try:
                return watched.train(trainer, *args, **kwargs)
            finally:
                seen.update(_facts(trainer))

        def training_step(trainer, model, inputs, *args, **kwargs):
            seen["rows"].setdefault(str(trainer.state.global_step + 1), []).extend(_rows(inputs))
            loss = watched.step(trainer, model, inputs, *args, **kwargs)
            seen["losses"].append(float(loss))
            return loss

        Trainer.train, Trainer.training_step = train, training_step
        return seen

    def __exit__(self, *error) -> None:
        from transformers import Trainer

        Trainer.train, Trainer.training_step = self.train, self.step


def _rows(inputs) -> list[int]:
    """A checksum for each example of a micro-batch; a padding-free row holds several."""
    ids = inputs["input_ids"]
    if "position_ids" in inputs and len(ids) == 1:
        starts = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
        parts = [ids[0, a:b] for a, b in zip(starts, [*starts[1:], ids.shape[1]], strict=True)]
    elif inputs.get("attention_mask") is not None:
        parts = [row[mask.bool()] for row, mask in zip(ids, inputs["attention_mask"], strict=True)]
    else:
        parts = list(ids)
    return [zlib.crc32(part.cpu().numpy().tobytes()) for part in parts]


def _facts(trainer) -> dict[str, Any]:
    """How it really trained: what accelerate and Trainer made of the settings."""
    accelerator = trainer.accelerator
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return {
        "engine": accelerator.distributed_type.value,
        "processes": accelerator.num_processes,
        "precision": accelerator.mixed_precision,
        "compiled": accelerator.state.dynamo_plugin.backend.value != "NO",
        "optimizer": type(optimizer).__name__,
        "examples": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else sys.maxsize,
        "steps": trainer.state.global_step,
        "weights": sum(float(_local(one).double().abs().sum()) for one in trainer.model.parameters()),
        "evaluations": sum("eval_loss" in entry for entry in trainer.state.log_history),
        "checkpoints": sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")),
    }


def _local(parameter):
    """This rank's shard, where the parameter is sharded."""
    parameter = getattr(parameter, "ds_tensor", parameter)
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()
