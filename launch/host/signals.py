"""Stop requests: after SIGTERM, SIGUSR1 or SIGHUP to any rank, all save the same step and exit.

Slurm, Azure ML, Kubernetes and torch elastic announce the end of a job by a signal, and kill it
some time later. A terminal that is closed sends SIGHUP. Ctrl-C (SIGINT) is such a request too after
the first step, and a second one stops at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import FrameType

EXIT_CODE = 75  # EX_TEMPFAIL in sysexits.h: nothing is wrong, the same command resumes
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
PASSED_ON = (signal.SIGINT, *SIGNALS)  # by the launcher, to the ranks

_received: set[int] = set()  # by this process, since it handles them
_PATIENCE_SECONDS = 10
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Preempted(BaseException):
    """The run was told to stop. Not an `Exception`, so that nothing catches it by accident."""


class StopRequest:
    """A request to stop this process. `signal` is the one that came, or None until then.

    `step` is the last optimizer step that has ended, of this run or of the one that it resumed.
    """

    signal: str | None = None
    step: int = 0
    _deferred = False

    def __init__(self) -> None:
        self._pid = os.getpid()

    def listen(self) -> None:
        """Handle the signals from now on."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)

    def defer(self) -> None:
        """From now on only remember a signal: the current step or save is completed first."""
        self._deferred = True
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker that loads data, which its parent ends
            return
        if self.signal or not self.step:  # before the first step there is nothing to save
            raise KeyboardInterrupt
        self._handle(number, frame)
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"\nstopping, after the step in progress; Ctrl-C again kills\n")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        _received.add(number)
        self.signal = self.signal or signal.Signals(number).name
        if not self._deferred:
            self._deferred = True  # a second signal must not interrupt the cleanup
            raise Preempted(f"told to stop by {self.signal}")


def block_until_listening() -> None:
    """Keep the signals waiting until `StopRequest.listen` handles them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)


def ignore_stop_requests() -> None:
    """From now on: this process has failed and says why, while the launcher ends all ranks."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: _received.add(number))


def is_spoken_for(met_by_all: bool = False) -> bool:
    """True if this failed rank need not say why: torch elastic ends it because another rank has
    failed first, and said so. Without torch elastic, only an error that is `met_by_all` counts.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return met_by_all
    until = time.monotonic() + _PATIENCE_SECONDS
    while signal.SIGTERM not in _received and time.monotonic() < until:
        time.sleep(0.1)
    return signal.SIGTERM in _received


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when its parent dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
