"""train.py on CPU ranks that writes down what every step trains on, and stops where it is told to.

`examples-RANK.jsonl` beside the results gets a line per micro-batch: the step, and a name for each
of its examples. FSDP trains, too (fsdp_on_cpu.py). At STOP_AT_STEP the last rank gets SIGTERM.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

from transformers import TrainerCallback

from launch import train
from launch.data.encode import IGNORED
from launch.training import trainer
from tests.support.fsdp_on_cpu import lift_the_refusal


def write_down_examples() -> None:
    of_trainer = trainer.RecipeTrainer.get_batch_samples

    def seen(self, epoch_iterator, num_batches, device):
        samples, items = of_trainer(self, epoch_iterator, num_batches, device)
        file = Path(self.args.output_dir, f"examples-{self.args.process_index}.jsonl")
        with file.open("a") as stream:
            for batch in samples:
                rows = (
                    [label for label in row if label != IGNORED]
                    for row in batch["labels"].reshape(len(batch["labels"]), -1).tolist()
                )
                stream.write(json.dumps([self.state.global_step, [_name(row) for row in rows if row]]) + "\n")
        return samples, items

    trainer.RecipeTrainer.get_batch_samples = seen


def _name(tokens: list[int]) -> str:
    return hashlib.sha256(str(tokens).encode()).hexdigest()[:8]


def stop_the_last_rank(step: int) -> None:
    """The last rank gets SIGTERM at the end of a step, as from a node that is taken away."""
    build_trainer = trainer.build_trainer

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step and args.process_index == args.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    def stopping(*args, **kwargs):
        trainer = build_trainer(*args, **kwargs)
        trainer.callback_handler.callbacks.insert(0, Stop())
        return trainer

    trainer.build_trainer = stopping


if __name__ == "__main__":
    lift_the_refusal()
    write_down_examples()
    if "STOP_AT_STEP" in os.environ:
        stop_the_last_rank(int(os.environ["STOP_AT_STEP"]))
    sys.exit(train.main())
