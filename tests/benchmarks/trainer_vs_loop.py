"""How much of a hand-written loop's throughput a recipe keeps, paired in one run.

    python -m tests.benchmarks.trainer_vs_loop [--rounds 6] [--steps 6]

Trainer and loop take turns on the same model, data and batch, in one process, so that a noisy machine hurts both;
each round gives one ratio of median step times, and the answer is the median of the ratios. Printed with the hardware
and versions. Ends with 1 below 0.97.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from launch.trainer import Meter, RecipeTrainer
from recipes import fast, hardware
from tests.loop import train_loop

MICRO, ACCUMULATION, LENGTH, RATE = 4, 2, 256, 1e-4


def small_real_model() -> LlamaForCausalLM:
    """26 million parameters: large enough that a step is compute, small enough for two cores."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=6,
            num_attention_heads=8,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def trainer_seconds(rows: torch.Tensor, steps: int) -> list[float]:
    """Seconds of each step of Trainer with the fast recipe."""
    with tempfile.TemporaryDirectory() as folder:
        args = fast(
            folder,
            per_device_train_batch_size=MICRO,
            gradient_accumulation_steps=ACCUMULATION,
            max_steps=steps + Meter.WARM_UP_STEPS + 2,
            learning_rate=RATE,
            save_strategy="no",
            train_sampling_strategy="sequential",
            disable_tqdm=True,
        )
        meter = Meter()
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = RecipeTrainer(model=small_real_model(), args=args, train_dataset=data, callbacks=[meter])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return meter.durations


def loop_seconds(rows: torch.Tensor, steps: int) -> list[float]:
    """Seconds of each step of the hand-written loop, without its warm-up."""
    skipped = Meter.WARM_UP_STEPS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    _, seconds = train_loop(
        small_real_model(),
        rows,
        steps=steps + skipped,
        micro=MICRO,
        accumulation=ACCUMULATION,
        learning_rate=RATE,
        device=device,
    )
    return seconds[skipped:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(hardware.read().cores)
    rows = torch.randint(0, 8192, (512, LENGTH), generator=torch.Generator().manual_seed(0))
    ratios = []
    for number in range(options.rounds):
        turns = [trainer_seconds, loop_seconds]
        first, second = turns if number % 2 else reversed(turns)
        medians = {turn.__name__: statistics.median(turn(rows, options.steps)) for turn in (first, second)}
        ratios.append(medians["loop_seconds"] / medians["trainer_seconds"])
        loop, recipe = medians["loop_seconds"], medians["trainer_seconds"]
        print(f"round {number + 1}: loop {loop:.3f} s, recipe {recipe:.3f} s a step")
    ratio = statistics.median(ratios)
    print(f"{hardware.read()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"throughput of the recipe over the loop's: median {ratio:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    return 0 if ratio >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
