"""`accelerate estimate-memory`, DeepSpeed's estimators and `plan_memory` on the same trainings.

    python -m tests.benchmarks.estimators

Prints three markdown tables: all three estimates; accelerate's and ours beside published readings;
the same beside what torch's allocator counts on this machine. Models are built from
configurations: nothing is downloaded, and no GPU is needed.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

GIB, MIB = 2**30, 2**20
LENGTH = 2048
COUNTED = """\
`accelerate estimate-memory` counts the base model without its head: in fp32 its weights, gradients and Adam's states,
in 16 bits only the largest of these. No activations, batch, length, sharding, offload or adapters.
DeepSpeed's estimators count weights, gradients and Adam's states under ZeRO, and of ZeRO-3's gathered weights the
largest layer. No activations, batch, length, communication buckets or adapters, and nothing without ZeRO.
`recipes plan` counts all of these, what torch's allocator keeps beside them, and what CUDA takes itself.
GiB on each GPU, then in the RAM of the node if a tool estimates it; AdamW throughout."""


@dataclass(frozen=True)
class Training:
    """One training to estimate; `flags` are flags of train.py besides recipe, batch and length."""

    model: str
    recipe: str
    gpus: int
    micro: int
    length: int = LENGTH
    flags: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        cards = f"{self.gpus} GPU{'s' * (self.gpus > 1)}"
        words = [self.recipe, cards, f"b{self.micro} s{self.length}", *(name for name, on in self.flags.items() if on)]
        return ", ".join(words)


CHECKPOINTED = {"gradient_checkpointing": True}
TRAININGS = (
    Training("GPT-2", "standard", 1, 8, 1024),
    Training("1.2B", "standard", 1, 1),
    Training("1.2B", "standard", 1, 8),
    Training("1.2B", "standard", 1, 8, flags=CHECKPOINTED),
    Training("1.2B", "standard", 1, 8, flags={**CHECKPOINTED, "use_peft": True}),
    Training("8B", "memory", 4, 4),
    Training("8B", "memory_zero3", 4, 4),
)


def config_of(model: str):
    from transformers import GPT2Config

    from recipes.planner.models import read_config

    return GPT2Config() if model == "GPT-2" else read_config(model)


# --- What each tool estimates, in bytes -----------------------------------------------------------


def by_accelerate(config, precision: str) -> int:
    """What `accelerate estimate-memory` prints as "Training using Adam", from its functions."""
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModel

    with init_empty_weights():  # as the command does for a Hub id
        model = AutoModel.from_config(config, dtype="float32")
    total, _ = calculate_maximum_sizes(model)
    return max(estimate_training_usage(total, precision).values())


def by_deepspeed(config, stage: int, gpus: int) -> tuple[int, int]:
    """What DeepSpeed's estimators print with all offloaded: bytes on each GPU, and in host RAM."""
    with contextlib.redirect_stdout(io.StringIO()):  # the import prints what it did not find
        from deepspeed.runtime.zero import stage3, stage_1_and_2

    total, largest = parameters(config)
    if stage == 2:
        host, gpu = stage_1_and_2.estimate_zero2_model_states_mem_needs(total, num_gpus_per_node=gpus)
    else:
        host, gpu, _ = stage3.estimate_zero3_model_states_mem_needs(total, largest, num_gpus_per_node=gpus)
    return gpu, host


def parameters(config) -> tuple[int, int]:
    """Counts of all parameters, and of those in the largest module, DeepSpeed's "layer".

    DeepSpeed itself counts on real weights; these are on torch's meta device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [sum(own.numel() for own in module.parameters(recurse=False)) for module in model.modules()]
    return sum(parameter.numel() for parameter in model.parameters()), max(layers)


def by_us(training: Training):
    """Our plan of the recipe, in bf16 on H200s: they hold all. Raises `UserError` if illegal."""
    from recipes import plan_memory

    batch = {"per_device_train_batch_size": training.micro, "global_batch_size": training.micro * training.gpus}
    flags = {**batch, "max_length": training.length, **training.flags}
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value).lower())]
    plan = plan_memory(
        config_of(training.model), recipe=training.recipe, gpu="H200", num_processes=training.gpus, argv=argv
    )
    return plan.recipes[0]


# --- The tables -----------------------------------------------------------------------------------


def compared(training: Training) -> list[str]:
    """A row of the first table."""
    from recipes.catalog import RECIPES
    from recipes.errors import UserError
    from recipes.run.engine_sources import from_yaml
    from recipes.run.files import shipped

    config = config_of(training.model)
    stage = from_yaml(shipped(RECIPES[training.recipe]().engine)).zero_stage
    theirs = [gib(by_accelerate(config, "bfloat16"))]
    theirs.append("-" if stage == 0 else ", ".join(map(gib, by_deepspeed(config, stage, training.gpus))))
    try:
        entry = by_us(training)
        ours = ", ".join(map(gib, (entry.total_bytes, entry.host_bytes_per_node)))
    except UserError as error:
        ours = error.problems[0].what
    return [f"{training.model}, {training}", *theirs, ours]


def published(reading) -> list[str]:
    """A row of the second table: MiB, and how far each estimate is from the reading."""
    from tests.benchmarks.published import bert_large, planned

    accelerate = by_accelerate(bert_large(), "float16" if "--fp16" in reading.flags else "float32")
    return [str(reading), f"{reading.mib:,}", *beside(reading.mib * MIB, accelerate, planned(reading).total)]


def measured() -> list[list[str]]:
    """The third table: two optimizer steps of RecipeTrainer as one DDP rank, in fp32.

    Each case runs in its own process.
    """
    from tests.gpu import memory

    found = []
    for micro, accumulation in ((1, 1), (4, 2)):
        case = memory.Case("llama", "0.05B", "fast", micro, 128, accumulation)
        row = memory.measured_apart(case)
        taken = row["allocated"]
        accelerate = by_accelerate(memory.config_of(case), "float32")
        found.append([str(case), f"{taken / MIB:,.0f}", *beside(taken, accelerate, row["planned"])])
    return found


def beside(truth: int, *estimates: int) -> list[str]:
    """Each estimate in MiB, and how far it is above the truth."""
    return [f"{estimate / MIB:,.0f} ({estimate / truth - 1:+.1%})" for estimate in estimates]


def gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    import torch
    import transformers

    from tests.benchmarks.published import BERT_LARGE

    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    heads = ["bf16 training", "accelerate estimate-memory", "DeepSpeed's estimators", "recipes plan"]
    print(f"\n{table(heads, [compared(training) for training in TRAININGS])}\n\n{COUNTED}")
    heads = ["bert-large on a V100, published", "MiB read", "accelerate estimate-memory", "recipes plan"]
    print(f"\n{table(heads, [published(reading) for reading in BERT_LARGE])}")
    heads = [
        "on this CPU, fp32, two steps of one DDP rank",
        "MiB allocated",
        "accelerate estimate-memory",
        "recipes plan",
    ]
    print(f"\n{table(heads, measured())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
