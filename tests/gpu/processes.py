"""Run a command and kill every process it started: when it ends, at its deadline, and at Ctrl-C."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from launch.host.processes import start

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Become the parent of any descendant whose own parent dies, so that it can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def run_alone(command: Sequence[str], log: Path, deadline: float, env: Mapping[str, str] | None = None) -> int | None:
    """The exit code of a command, None if it was killed after `deadline` seconds.

    Its output goes to `log`. At the end all descendants of this process are killed, so it must
    run nothing else meanwhile. Killing the command's process group is not enough: launchers and
    probes start their own groups.
    """
    with log.open("wb") as stream:
        try:
            return start([*command], stream, {**os.environ, **(env or {})}).wait(deadline)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_all_below()


def kill_all_below() -> None:
    """Kill all descendants of this process, also those that start meanwhile."""
    for _ in range(5):  # not forever: a process that waits for a broken driver cannot be killed
        below = psutil.Process().children(recursive=True)
        if not below:
            return
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=2)
