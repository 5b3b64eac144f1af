"""Gives a case to the real code, in a fork of this process, which has imported everything.

What would start a training, a launcher or a job ends the case instead: the input was taken.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tests.campaigns.bad_input.case import Case
from tests.campaigns.legality.start import forked

SECONDS = 10
BUSY = 6  # so many times as long, once more, where it may only be the machine that is busy
MEMORY = 4 << 30  # bytes that a case may add to what is imported
TAKEN = 42  # the exit code of a case that would have started something


@dataclass(frozen=True)
class Answer:
    """`code` is the exit code, negative for a signal, None if it took too long."""

    code: int | None
    output: str
    seconds: float

    @property
    def taken(self) -> bool:
        return self.code in (0, TAKEN)


def attempt(case: Case, folder: Path, seconds: float = SECONDS, wall_seconds: float = SECONDS) -> Answer:
    """The answer to a case whose files lie in the folder. It took too long beyond either limit, of
    which `seconds` is the processor's time.
    """
    log = folder.with_suffix(".log")
    started = time.monotonic()
    pid = forked(partial(_in_folder, case, folder, log, seconds))
    status, used = _wait(pid, started + wall_seconds)
    took = time.monotonic() - started
    output = log.read_bytes().decode(errors="backslashreplace")
    if status is None or used > seconds:
        return Answer(None, output, took)
    return Answer(os.waitstatus_to_exitcode(status), output, took)


def _wait(pid: int, until: float) -> tuple[int | None, float]:
    """Its wait status, None if it took too long, and the processor time that it used."""
    pause = 0.002
    while time.monotonic() < until:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            return status, used.ru_utime + used.ru_stime
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None, 0.0


def _in_folder(case: Case, folder: Path, log: Path, seconds: float) -> int:
    os.setsid()
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    _limit(seconds)
    return _run(case)


def _limit(seconds: float) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run(case: Case) -> int:
    from launch import cli, train

    _end_where_something_starts(case.to_the_end)
    os.environ["XDG_CONFIG_HOME"] = str(Path.cwd() / "site")
    name, *argv = case.argv
    sys.argv = [str(Path(train.__file__)) if name == "train.py" else "recipes", *argv]
    return train.main(argv) if name == "train.py" else cli.main(case.argv)


def _end_where_something_starts(to_the_end: bool) -> None:
    from launch.host import processes
    from launch.jobs import local

    def starts(*arguments: Any, **options: Any) -> NoReturn:
        raise SystemExit(TAKEN)

    os.execv = starts
    for module, names in {processes: ("start",), local: ("run_script",)}.items():
        _replace(module, names, starts)
    if "launch.training.model" in sys.modules and not to_the_end:
        sys.modules["launch.training.model"].load_model = starts


def _replace(module: Any, names: tuple[str, ...], function: Callable) -> None:
    """The functions in their module, and wherever they were imported by name."""
    for name in names:
        original = getattr(module, name)
        for other in list(sys.modules.values()):
            if getattr(other, "__name__", "").startswith("launch.") and vars(other).get(name) is original:
                setattr(other, name, function)
