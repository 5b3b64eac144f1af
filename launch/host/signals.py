"""Told to stop: SIGTERM or SIGUSR1 to any rank leads to one step that all ranks agree on, a checkpoint, an exit code.

Slurm, Azure ML, Kubernetes and torch elastic announce the end of a job by a signal, and kill some time later.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

EXIT_CODE = 75  # EX_TEMPFAIL in sysexits.h: nothing is wrong, the same command goes on
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}


class Preempted(BaseException):
    """Told to stop. Like KeyboardInterrupt no `Exception`: nothing that expects errors may take it for one."""


class StopRequest:
    """Whether this process was told to stop, and by which signal."""

    signal: str | None = None
    _deferred = False

    def listen(self) -> None:
        """Hear the signals from now on. Only a main thread can."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._told)
            _hear_of_the_launchers_death()

    def defer(self) -> None:
        """From now on a signal is only noted: what is being trained or saved goes on to a point where it can end."""
        self._deferred = True

    def _told(self, number: int, frame: Any) -> None:
        self.signal = self.signal or signal.Signals(number).name
        if not self._deferred:
            self.defer()  # a second signal must not disturb the cleaning up
            raise Preempted(f"told to stop by {self.signal}")


def launchers_words() -> list[str]:
    """The command line of the launcher that started this process; empty where none did, or it cannot be read."""
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []
    return parent if _LAUNCHERS & {Path(word).name for word in parent} else []


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Get a signal when the process that started this one dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _hear_of_the_launchers_death() -> None:
    """Get SIGTERM when the launcher dies: `accelerate launch` forwards nothing to a single process, and just dies."""
    if launchers_words():  # a shell may die and leave a run behind
        end_with_parent(signal.SIGTERM)
