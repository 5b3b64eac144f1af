"""Published readings of memory beside the planner's prediction for the same training.

    python -m tests.benchmarks.published

Predicts each one twice: with dropout's mask in the tensor's own type, as on a CPU and so in a
trace, and with a mask of one byte per element, as CUDA's kernel keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import torch
from transformers import BertConfig

from recipes.planner.footprint import Need, need
from recipes.planner.shapes import Case
from recipes.planner.trace import trace, weigh
from recipes.run import resolve
from recipes.run.hardware import Gpu, Hardware

MIB = 2**20
V100 = Hardware((Gpu("V100", (7, 0), 16 << 30),), cores=8)
TASK = "sequence_classification"


@dataclass(frozen=True)
class Reading:
    """MiB that nvidia-smi showed while bert-large trained on sequences of 512 tokens."""

    mib: int
    batch: int
    accumulation: int
    fp16: bool = False
    checkpointing: bool = False

    def __str__(self) -> str:
        precision = "fp16" if self.fp16 else "fp32"
        return f"{precision}, {self.batch}x{self.accumulation} of 512" + ", checkpointed" * self.checkpointing


# Hugging Face's guide "Methods and tools for efficient training on a single GPU" (2023), on a V100,
# with 1343 MiB in use before the model is loaded. With transformers and torch of that time:
# attention is eager, zero_grad keeps the gradients, AdamW updates one parameter at a time.
BERT_LARGE = (
    Reading(14949, 4, 1),
    Reading(8681, 1, 4),
    Reading(6775, 1, 4, checkpointing=True),
    Reading(13939, 4, 1, fp16=True),
    Reading(7275, 1, 4, fp16=True, checkpointing=True),
)


def bert_large() -> BertConfig:
    return BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)


def predicted(reading: Reading) -> Need:
    """The plan for the same training, with the same bytes in use before it."""
    flags = {"fp16": reading.fp16, "gradient_checkpointing": reading.checkpointing, "optim": "adamw_torch_fused"}
    run = resolve(settings={"task": TASK, **flags}, world_size=1, hardware=V100, environment={}, demonstrate=False)
    mixed = "float16" if run["fp16"] else None
    case = Case(reading.batch, 512, TASK, attention="eager", autocast=mixed, checkpointing=reading.checkpointing)
    config = bert_large()
    kept = max(reading.accumulation, 2)  # as zero_grad keeps gradients, they exist from the start
    return need(run, weigh(config, TASK), trace(config, case), kept, context=1343 * MIB)


def _dropout_of_cuda(tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False):
    return torch.native_dropout(tensor, p, training)[0] if training and p else tensor


def main() -> None:
    print("| bert-large | MiB read | predicted | with CUDA's masks |\n|---|---|---|---|")
    for reading in BERT_LARGE:
        errors = [predicted(reading).gpu.total / MIB / reading.mib - 1]
        with patch("torch.nn.functional.dropout", _dropout_of_cuda):
            errors.append(predicted(reading).gpu.total / MIB / reading.mib - 1)
        print(f"| {reading} | {reading.mib:,} | " + " | ".join(f"{error:+.1%}" for error in errors) + " |")


if __name__ == "__main__":
    main()
