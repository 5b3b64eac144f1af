"""Readings of memory that others have published, and what ours predicts for the same training."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import BertConfig

from recipes.footprint import Need, need
from recipes.hardware import Gpu, Hardware
from recipes.run import resolve
from recipes.trace import Case, trace, weigh

MIB = 2**20
V100 = Hardware((Gpu("V100", (7, 0), 16 << 30),), cores=8)
TASK = "sequence_classification"


@dataclass(frozen=True)
class Reading:
    """MiB that nvidia-smi showed while bert-large trained on 512 tokens a sequence."""

    mib: int
    batch: int
    accumulation: int
    fp16: bool = False
    checkpointing: bool = False

    def __str__(self) -> str:
        precision = "fp16" if self.fp16 else "fp32"
        return f"{precision}, {self.batch}x{self.accumulation} of 512" + ", checkpointed" * self.checkpointing


# Hugging Face's guide "Methods and tools for efficient training on a single GPU" (2023), on a V100, with 1343 MiB in
# use before the model is loaded. Eager attention; zero_grad kept the gradients, and AdamW updated one parameter after
# the other: transformers and torch of that time.
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
    flags = {"fp16": reading.fp16, "gradient_checkpointing": reading.checkpointing, "optim": "adamw_torch_fused"}
    run = resolve(settings={"task": TASK, **flags}, world_size=1, hardware=V100, environment={}, demonstrate=False)
    mixed = "float16" if run["fp16"] else None
    case = Case(reading.batch, 512, TASK, attention="eager", autocast=mixed, checkpointing=reading.checkpointing)
    config = bert_large()
    kept = max(reading.accumulation, 2)  # gradients are there from the start, as zero_grad left them
    return need(run, weigh(config, TASK), trace(config, case), kept, context=1343 * MIB)
