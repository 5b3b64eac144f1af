"""What `--measure` costs a step, paired: every other step of one training is timed.

    python -m tests.benchmarks.measuring_cost [--steps 600]

The model is small and a step takes milliseconds, so that the share is larger than in any training
worth measuring. Each pair of neighbouring steps gives one ratio; the answer is their median with
its quartiles. Ends with 1 above 1 %. Without `--measure` none of this code is there: another class
trains.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from launch.training.callbacks import StepTiming
from launch.training.trainer import RecipeTrainer
from recipes import standard
from recipes.run import hardware, resolve
from recipes.scaling.timings import WARM_UP_STEPS

LENGTH, MICRO, ACCUMULATION = 32, 2, 2


class EveryOther(TrainerCallback):
    """Marks every other step. `seconds` of each step, from one's beginning to the next one's."""

    def __init__(self) -> None:
        self.timer: StepTiming | None = None
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._begun: float | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        now = time.perf_counter()
        if self.timer is None or state.global_step <= 2 * WARM_UP_STEPS:
            return
        if self._begun is not None:
            self.seconds[self.timer.on].append(now - self._begun)
        self.timer.on = not self.timer.on
        self._begun = time.perf_counter()


def measured(steps: int) -> dict[bool, list[float]]:
    """Seconds of steps that were marked, and of those between them."""
    rows = torch.randint(0, 512, (64, LENGTH), generator=torch.Generator().manual_seed(0))
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=LENGTH, use_cache=False, **shape))
    turns = EveryOther()
    with tempfile.TemporaryDirectory() as folder:
        args = standard(
            folder,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=steps + 2 * WARM_UP_STEPS + 2,
            logging_steps=10**6,
            save_strategy="no",
            disable_tqdm=True,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        run = resolve(settings={"measure": "timings.jsonl"})
        trainer = RecipeTrainer(model=model, args=args, train_dataset=data, callbacks=[turns], run=run)
        turns.timer = trainer.timing
        trainer.train()
    return turns.seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measured(options.steps)
    ratios = [marked / plain for marked, plain in zip(seconds[True], seconds[False], strict=False)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    plain = statistics.median(seconds[False])
    print(f"{hardware.read()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{len(ratios)} pairs of steps of {plain * 1000:.1f} ms (median)")
    print(f"a measured step over one that is not: median {ratio:.4f}, quartiles {low:.4f} and {high:.4f}")
    return 0 if ratio <= 1.01 else 1


if __name__ == "__main__":
    sys.exit(main())
