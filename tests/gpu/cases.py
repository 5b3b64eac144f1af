"""The table of cases that need a GPU, the most valuable first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """The folder a case writes to, and whether it is a rehearsal on a CPU with a tiny model."""

    folder: Path
    rehearse: bool


@dataclass(frozen=True)
class Case:
    """One measurement, which runs in its own process.

    It is expected to take `seconds` and is killed after `deadline` seconds. `needs` names packages
    that not every case needs.
    """

    group: str
    name: str
    seconds: int
    deadline: int
    measure: Callable[[Setup], Figures]
    needs: tuple[str, ...] = ()


# Expected seconds for 0.5B and for 1.2B, with imports and compilation: guesses for an H100.
SPEED = {"loop": (30, 40), "loop compiled": (80, 100), "baseline": (90, 180), "standard": (35, 50), "fast": (90, 110)}
VARIANTS = {
    "fast, no compile": (35, 50),
    "fast, micro 16": (90, 120),
    "fast, checkpointing": (90, 120),
    "fast, 8-bit Adam": (90, 110),
}
PARTS = {"baseline": 120, "standard": 60, "fast": 120, "sharded": 60}
NEEDS = {"adamw_bnb_8bit": "bitsandbytes", "use_peft": "peft"}  # package by the flag or value that needs it


def all_cases(rehearse: bool, gpus: int = 1) -> list[Case]:
    """The cases for a machine with this number of GPUs, or those of the rehearsal."""
    from tests.gpu import commands

    return [
        _case(rehearse, "doctor", "doctor", 60, commands.doctor),
        *_speed(rehearse, SPEED),
        *_memory(rehearse),
        *_parts(rehearse, gpus),
        _case(rehearse, "fit", "largest micro-batch by --fit", 150, commands.fit),
        _case(rehearse, "fit", "out of memory, --on_oom next", 150, commands.out_of_memory),
        *_speed(rehearse, VARIANTS),
    ]


def _case(rehearse: bool, group: str, name: str, seconds: int, measure: Callable[[Setup], Figures], **needs) -> Case:
    if rehearse:  # generous: other processes may use the same cores
        return Case(group, name, 30, 900, measure, **needs)
    return Case(group, name, seconds, 60 + 3 * seconds, measure, **needs)


def _speed(rehearse: bool, expected: dict[str, tuple[int, int]]) -> Iterator[Case]:
    from tests.gpu import speed

    for place, size in enumerate(["tiny"] if rehearse else ["0.5B", "1.2B"]):
        for name, seconds in expected.items():
            measure, needs = partial(speed.measure, name, size), _needs(speed.CASES[name])
            yield _case(rehearse, "speed", f"{size} {name}", seconds[place], measure, needs=needs)


def _memory(rehearse: bool) -> Iterator[Case]:
    from tests.gpu import memory

    for case in memory.tiny_cases() if rehearse else memory.CASES:
        seconds, measure = 50 if case.size == "3B" else 35, partial(memory.measure, case)
        yield _case(rehearse, "memory", str(case), seconds, measure, needs=_needs(case.flags))


def _parts(rehearse: bool, gpus: int) -> Iterator[Case]:
    from tests.gpu import commands

    for processes in (number for number in (1, 2, 4, 8) if number <= gpus):
        for recipe, seconds in PARTS.items():
            if recipe == "baseline" and processes > 1:
                continue  # baseline is a recipe for one process
            name = f"{recipe}, {processes} process{'es' * (processes > 1)}"
            measure = partial(commands.parts_of_a_step, recipe, processes)
            yield _case(rehearse, "parts of a step", name, seconds, measure)


def _needs(flags: dict[str, Any]) -> tuple[str, ...]:
    words = {*flags, *(value for value in flags.values() if isinstance(value, str))}
    return tuple(NEEDS[word] for word in sorted(words & set(NEEDS)))
