"""Stop requests. During the training, SIGTERM, SIGUSR1 or SIGHUP to any rank makes all ranks save
the same step and exit. Before the training, such a signal ends the run at once, without a save.

Slurm, Azure ML, Kubernetes and torch elastic signal a job some time before they kill it; a closed
terminal sends SIGHUP. After the first step, Ctrl-C asks to stop too; a second one stops at once.
"""

import ctypes
import os
import signal
import sys
import time
from types import FrameType

EXIT_CODE = 75  # EX_TEMPFAIL in sysexits.h: nothing is wrong, the same command resumes
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
PASSED_ON = (signal.SIGINT, *SIGNALS)  # the launcher forwards these to the ranks

_received: set[int] = set()  # the signals that this process has handled
_PATIENCE_SECONDS = 10
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Preempted(BaseException):
    """A signal told the run to stop. Not an `Exception`, so that nothing catches it by accident."""


class StopRequest:
    """A request to stop this process. `signal` names the first signal; None before a signal came.

    `step` is the last optimizer step that has ended, in this start of the run or an earlier one.
    """

    signal: str | None = None
    step: int = 0
    _deferred = False

    def __init__(self) -> None:
        self._pid = os.getpid()

    def listen(self) -> None:
        """Handle the stop signals from now on."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)

    def defer(self) -> None:
        """From now on, only record stop signals, so that the current step or save is completed."""
        self._deferred = True
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a data-loading worker, which its parent ends
            return
        if self.signal or not self.step:  # before the first step there is nothing to save
            raise KeyboardInterrupt
        self._handle(number, frame)
        if os.environ.get("RANK", "0") == "0":
            os.write(2, b"\nstopping after the step in progress; press Ctrl-C again to kill the run\n")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        _received.add(number)
        self.signal = self.signal or signal.Signals(number).name
        if not self._deferred:
            self._deferred = True  # a second signal must not interrupt the cleanup
            raise Preempted(f"told to stop by {self.signal}")


def block_until_listening() -> None:
    """Hold the signals back until `listen`, of `StopRequest` or of the launcher, handles them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)


def ignore_stop_requests() -> None:
    """From now on, only record stop signals: this rank is ending, and first prints why."""
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: _received.add(number))


def is_spoken_for(met_by_all: bool = False) -> bool:
    """True if another rank prints this failed rank's error. Under torch elastic, wait up to 10 s
    for a SIGTERM, which torch sends if a rank failed earlier and printed why. Otherwise, return
    `met_by_all`, which is True if all ranks meet the error: each node's first rank prints it.
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
