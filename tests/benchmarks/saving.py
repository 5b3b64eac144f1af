"""What manifest and flush add to a save: Trainer's own part of each save is timed inside it.

    python -m tests.benchmarks.saving [--rounds 12] [--folder FOLDER]

The model has 82 million parameters, a checkpoint of it 1 GB. Every save begins with all earlier
writes on the disk. Prints how long the training waits over how long it would wait for Trainer
alone, as the median of the saves with its quartiles, and what the background takes: flush,
checksums, and the deletion of older checkpoints. Exits with 1 if the training waits more than 10 %
longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from launch.output.saving import CommittingTrainer
from recipes import standard
from recipes.run import hardware

SHAPE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}


@dataclass
class Round:
    """Seconds that the training waits for a save, Trainer's part of them, and in the background."""

    waited: float
    trainers: float
    background: float


class TimedTrainer(Trainer):
    """Trainer, below ours. `seconds` is what its last save took."""

    seconds = 0.0

    def _save_checkpoint(self, model, trial) -> None:
        self.seconds = seconds(lambda: super(TimedTrainer, self)._save_checkpoint(model, trial))


class OurTrainer(CommittingTrainer, TimedTrainer):
    pass


def trained(model: LlamaForCausalLM, folder: Path) -> OurTrainer:
    """A trainer after one step: its optimizer has moments to save."""
    args = standard(str(folder), max_steps=1, save_strategy="no", logging_steps=10**6, disable_tqdm=True)
    row = torch.arange(8)
    trainer = OurTrainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row}] * 64)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measured(rounds: int, folder: Path) -> list[Round]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16384, max_position_embeddings=8, use_cache=False, **SHAPE))
    trainer = trained(model, folder)
    result = []
    for number in range(rounds + 1):
        os.sync()
        trainer.state.global_step = number
        waited = seconds(lambda: trainer._save_checkpoint(trainer.model, None))
        result.append(Round(waited, trainer.seconds, seconds(trainer.finish_saving)))
    return result[1:]  # the first one loads libraries


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; some 4 GB, deleted at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        rounds = measured(options.rounds, Path(name))
    low, ratio, high = statistics.quantiles([each.waited / each.trainers for each in rounds], n=4)
    wait, background = (
        statistics.median(getattr(each, name) for each in rounds) for name in ("trainers", "background")
    )
    print(f"{hardware.read()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"the training waits {ratio:.3f} times as long (quartiles {low:.3f} and {high:.3f}, {len(rounds)} saves)")
    print(f"Trainer's save {wait:.2f} s, then {background:.2f} s in the background")
    return int(ratio > 1.1)


if __name__ == "__main__":
    sys.exit(main())
