"""The table of what needs a GPU, the most valuable first. Each case runs in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """A folder for models and outputs; a rehearsal trains tiny models on a CPU."""

    folder: Path
    rehearse: bool


@dataclass(frozen=True)
class Case:
    """One measurement, which is expected to take `seconds`."""

    group: str
    name: str
    seconds: int
    measure: Callable[[Setup], Figures]


# Flags of `recipes train` by the name of a case. All sequences have one length: none needs packing.
RECIPES = {
    "baseline": "--recipe baseline",
    "standard": "--recipe standard",
    "fast": "--recipe fast",
    "memory": "--recipe memory",
    "fast, 8-bit Adam": "--recipe fast --optim adamw_bnb_8bit",
}
VARIANTS = {
    "fast, no compile": "--recipe fast --torch_compile false",
    "fast, micro 16": "--recipe fast --per_device_train_batch_size 16",
    "fast, checkpointing": "--recipe fast --gradient_checkpointing",
}
LORA = "--recipe fast --use_peft --dtype bfloat16 --gradient_checkpointing"
SHARED = ("standard", "fast", "sharded")  # measured on all GPUs too


def all_cases(rehearse: bool, gpus: int = 1) -> list[Case]:
    """The cases for a machine with this number of GPUs, or those of the rehearsal.

    Seconds are guesses for an H100, with imports and compilation.
    """
    from tests.gpu import memory, trainings

    memory_cases = memory.tiny_cases() if rehearse else memory.CASES
    return [
        Case("doctor", "doctor", 60, trainings.doctor),
        *(case for size in (["tiny"] if rehearse else ["0.5B", "1.2B"]) for case in _speed(size)),
        _recipe("tiny" if rehearse else "7B", "LoRA", LORA, 240),
        *(Case("memory", str(case), 50, partial(memory.measure, case)) for case in memory_cases),
        Case("fit", "largest micro-batch by --fit", 150, trainings.fit),
        Case("fit", "out of memory, --on_oom next", 150, trainings.out_of_memory),
        *(_recipe("tiny" if rehearse else "0.5B", name, flags, 120) for name, flags in VARIANTS.items()),
        *(_on_all(name, gpus) for name in SHARED if gpus > 1),
    ]


def _speed(size: str) -> Iterator[Case]:
    from tests.gpu import trainings

    yield Case("speed", f"{size} loop", 40, partial(trainings.loop, size, False))
    yield Case("speed", f"{size} loop, compiled", 100, partial(trainings.loop, size, True))
    yield Case("speed", f"{size} Trainer's defaults", 120, partial(trainings.plain_trainer, size))
    for name, flags in RECIPES.items():
        yield _recipe(size, name, flags, 120)


def _recipe(size: str, name: str, flags: str, seconds: int) -> Case:
    from tests.gpu import trainings

    return Case("speed", f"{size} {name}", seconds, partial(trainings.recipe, size, flags.split()))


def _on_all(recipe: str, gpus: int) -> Case:
    return _recipe("0.5B", f"{recipe}, {gpus} GPUs", f"--recipe {recipe} --num_processes {gpus}", 120)
