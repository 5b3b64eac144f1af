"""The process that started this one, usually a launcher: what a person told it.

A launcher does not hand everything on. Its command line and the environment that it was started
with are read from the system.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

THREADS = "OMP_NUM_THREADS"
LAUNCHER = Path(__file__).with_name("launcher.py")  # ours
_LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}


@dataclass(frozen=True)
class Parent:
    """`argv` is its command line, `environment` that of its start."""

    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def flag(self, name: str) -> str | None:
        """The value of a flag of `accelerate launch`, which takes dashes and underscores alike."""
        words = [word for argument in self.argv for word in argument.split("=", 1)]
        for word, value in pairwise(words):
            if word.startswith("--") and word[2:].replace("-", "_") == name:
                return value
        return None


def parent() -> Parent | None:
    """None if the system does not tell."""
    try:
        process = psutil.Process().parent()
        return Parent(tuple(process.cmdline()), process.environ()) if process else None
    except (psutil.Error, OSError):
        return None


def launcher() -> Parent | None:
    """The launcher that started this process; None if none did, or the system does not tell."""
    found = parent()
    if found is None:
        return None
    names = {Path(word).name for word in found.argv}
    return found if str(LAUNCHER) in found.argv or _LAUNCHERS & names else None


def first_environment() -> Mapping[str, str]:
    """The variables that the user has set: those that the launcher was started with, or this
    process if there is none. Since then launchers, libraries and we have set more.
    """
    found = launcher()
    if found:
        return found.environment
    try:
        return psutil.Process().environ()
    except (psutil.Error, OSError):
        return os.environ


def threads_per_process(cores: int, processes: int) -> int:
    """The CPU threads of each process: what a person asked for, or an equal share of the cores."""
    return own_threads() or max(1, cores // processes)


def own_threads(environment: Mapping[str, str] = os.environ, launcher: Parent | None = None) -> int | None:
    """What a person asked for with OMP_NUM_THREADS; None if nobody did.

    Launchers set it too, to 1, which leaves all other cores idle: `accelerate launch` always (to
    what `--num_cpu_threads_per_process` says), torchrun for several processes. Theirs is not in
    the environment that they were started with.
    """
    threads = _threads(environment)
    launched = {"RANK", "ACCELERATE_MIXED_PRECISION"} & set(environment)
    launcher = launcher or parent()
    if launched and launcher and not _threads(launcher.environment):
        return threads if launcher.flag("num_cpu_threads_per_process") else None
    return threads


def _threads(environment: Mapping[str, str]) -> int | None:
    """None for what OpenMP ignores."""
    first = environment.get(THREADS, "").split(",")[0].strip()  # the levels of a nested loop: 4,2
    return int(first) if first.isdigit() and int(first) else None
