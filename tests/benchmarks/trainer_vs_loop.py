"""How much of a hand-written loop's throughput a recipe reaches, paired step by step in one run.

    python -m tests.benchmarks.trainer_vs_loop [--steps 60]

Trainer and loop train the same model on the same data in one process and take turns at every step,
so that other load on the machine slows both. Each pair of steps gives one ratio. Prints their
median, their quartiles, the hardware and the versions. Exits with 1 below 0.97.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from launch.training.trainer import RecipeTrainer
from recipes import fast
from recipes.run import hardware, resolve
from tests.support.loop import loop_steps

MICRO, ACCUMULATION, LENGTH, RATE, WARM_UP_STEPS = 4, 2, 256, 1e-4, 3


def real_model() -> LlamaForCausalLM:
    """27 million parameters: nearly all of a step is compute, a few seconds on two cores."""
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
    more = {"vocab_size": 8192, "max_position_embeddings": LENGTH, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**shape, **more))


class TakeTurns(TrainerCallback):
    """Runs one step of the loop before each of Trainer's; `pairs` are (loop, Trainer) seconds."""

    def __init__(self, loop: Iterator[tuple[float, float]]) -> None:
        self.loop = loop
        self.pairs: list[tuple[float, float]] = []
        self._loop_seconds = self._resumed = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if self._resumed:  # from the start of one step to the start of the next: all that Trainer does
            self.pairs.append((self._loop_seconds, time.perf_counter() - self._resumed))
        _, self._loop_seconds = next(self.loop)
        self._resumed = time.perf_counter()


def measured_pairs(steps: int) -> list[tuple[float, float]]:
    rows = torch.randint(0, 8192, (512, LENGTH), generator=torch.Generator().manual_seed(0))
    total = steps + WARM_UP_STEPS + 1
    shape = {"micro": MICRO, "accumulation": ACCUMULATION, "learning_rate": RATE}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    turns = TakeTurns(loop_steps(real_model(), rows, steps=total, device=device, **shape))
    with tempfile.TemporaryDirectory() as folder:
        args = fast(
            folder,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=total,
            learning_rate=RATE,
            save_strategy="no",
            train_sampling_strategy="sequential",
            disable_tqdm=True,
            torch_compile=False,
            bf16=False,
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = RecipeTrainer(
            model=real_model(), args=args, train_dataset=data, callbacks=[turns], run=resolve(["--recipe", "fast"])
        )
        trainer.train()
    return turns.pairs[WARM_UP_STEPS:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    machine = hardware.read()
    torch.set_num_threads(machine.cores)
    pairs = measured_pairs(options.steps)
    ratios = [loop / trainer for loop, trainer in pairs]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    loop, trainer = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    print(f"{machine}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{len(pairs)} pairs of steps: loop {loop:.3f} s, recipe {trainer:.3f} s (medians)")
    print(f"throughput of the recipe over the loop's: median {ratio:.3f}, quartiles {low:.3f} and {high:.3f}")
    return 0 if ratio >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
