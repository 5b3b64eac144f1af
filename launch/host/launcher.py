"""A quiet `accelerate launch`, and functions with which a rank learns about its launcher.

This file is run as a script, with the arguments of `accelerate launch`. When a rank fails,
accelerate and torch elastic print tracebacks of their own and exit with code 1. This launcher runs
accelerate's own parser and launch_command, adds at most one line to the output of the failed rank,
and exits with the code of the rank that failed first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

# Run as a script: import the packages beside launch/, not the files of this folder.
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from launch.host.processes import import_own_packages

    import_own_packages()

import psutil

from launch.host.files import exit_with, print_without_reader
from launch.host.processes import how_it_ended
from launch.host.signals import EXIT_CODE, PASSED_ON, SIGNALS, end_with_parent
from recipes.errors import one_line

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

LAUNCHER = Path(__file__)
THREADS = "OMP_NUM_THREADS"
_LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}


def main(argv: list[str] | None = None) -> int:
    """Launch a run. Return 0, or the first failed rank's exit code, or 1 if accelerate fails. If
    signal n killed the rank, return 130 after Ctrl-C, 75 after another stop signal, else 128 + n.
    """
    listen()
    from accelerate.commands import launch  # takes seconds: it imports torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.CRITICAL)  # torch elastic logs the end of every rank
    args = launch.launch_command_parser().parse_args(argv)
    args.quiet = False  # `quiet` turns every exit code into 1
    args.signals_to_handle = "none"  # else torch elastic handles signals, and loses the ranks' exit codes
    try:
        launch.launch_command(args)
    except ChildFailedError as error:
        return _exit_code_of(*_first_to_fail(error))
    except subprocess.CalledProcessError as error:  # the run has a single process
        return _exit_code_of(0, error.returncode)
    except Exception as error:
        print(f"accelerate launch: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


# --- Signals --------------------------------------------------------------------------------------

_received: set[int] = set()
_is_passed_on = threading.Semaphore(0)


def listen() -> None:
    """From now on, forward stop signals to the ranks. A second Ctrl-C kills the ranks.

    accelerate does not forward signals to a single process, and SIGUSR1 kills accelerate. A thread
    reads the signals, because torch may block the main thread until an absent node joins.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    threading.Thread(target=_pass_on_all, args=(reading,), daemon=True).start()
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and background jobs ignore some
            signal.signal(number, lambda *_: _is_passed_on.acquire())  # the main thread waits here, and starts no rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)  # `recipes train` has blocked the signals


def _pass_on_all(pipe: int) -> None:
    while True:
        with contextlib.suppress(psutil.Error):  # a process that ends meanwhile must not end this thread
            _pass_on(os.read(pipe, 1)[0])
        _is_passed_on.release()


def _pass_on(number: int) -> None:
    kills = number == signal.SIGINT and number in _received
    _received.add(number)
    ranks = psutil.Process().children()
    if not ranks:  # no rank has started yet
        os._exit(_exit_code_after_stop())
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            if kills:
                os.kill(rank.pid, signal.SIGKILL)
            elif number != signal.SIGINT or os.getsid(rank.pid) != os.getsid(0):
                os.kill(rank.pid, number)  # a rank in our session gets Ctrl-C from the terminal


def _exit_code_of(rank: int, code: int) -> int:
    """Return the launcher's exit code. If a signal killed the rank, print a line that says so."""
    if code >= 0:
        return code
    if _received or -code in SIGNALS:  # the rank did not handle the signal yet
        return _exit_code_after_stop()
    why = ": the kernel kills a process when RAM runs out (see `dmesg`)" if -code == signal.SIGKILL else ""
    print(f"rank {rank} was {how_it_ended(code)}{why}", file=sys.stderr)
    return 128 - code


def _exit_code_after_stop() -> int:
    """Print why the run ends, because its ranks ended too early to print. Return the exit code."""
    interrupted = signal.SIGINT in _received
    print("interrupted" if interrupted else "told to stop: run the same command again to resume", file=sys.stderr)
    return 130 if interrupted else EXIT_CODE


def _first_to_fail(error: ChildFailedError) -> tuple[int, int]:
    """Return the rank whose failure made the other ranks fail, and its exit code.

    torch ends the other ranks by SIGTERM, after which a rank of train.py exits with 75. A rank that
    lost its connection to the failed rank exits with 1, perhaps before torch saw the failed rank
    end. torch's time stamps are whole seconds, so several ranks may have the same time stamp.
    """
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    late = {-signal.SIGTERM: 2, EXIT_CODE: 1, 1: 1}

    def order(rank: int) -> tuple[int, int, bool]:
        return late.get(codes[rank], 0), error.failures[rank].timestamp, codes[rank] == EXIT_CODE

    rank = min(codes, key=order)
    return rank, codes[rank]


# --- The launcher of a rank -----------------------------------------------------------------------

_parent = os.getpid(), os.getppid()  # this process and its parent at the start


def launcher_argv() -> list[str]:
    """Return the command line of the launcher that started this process; empty if there is no
    launcher, or if the system does not show the command line.
    """
    with contextlib.suppress(psutil.Error, OSError):
        words = psutil.Process(os.getppid()).cmdline()
        if str(LAUNCHER) in words or _LAUNCHERS & {Path(word).name for word in words}:
            return words
    return []


def first_environment() -> Mapping[str, str]:
    """Return the environment that the user gave to the launcher, or to a process without launcher.
    If the system hides this environment, return `os.environ`, which also holds later variables.
    """
    try:
        return psutil.Process(os.getppid() if launcher_argv() else None).environ()
    except (psutil.Error, OSError):
        return os.environ


def threads_per_process(cores: int, processes: int) -> int:
    """Return OMP_NUM_THREADS if the user has set it, or else an equal share of the cores."""
    return own_threads() or max(1, cores // processes)


def own_threads() -> int | None:
    """Return OMP_NUM_THREADS if the user has set it to a number above 0, else None.

    Launchers set the variable too, mostly to 1, which leaves all other cores idle. The launcher's
    number is not in the environment in which the launcher started, so it is not returned.
    """
    number = (first_environment() if launcher_argv() else os.environ).get(THREADS, "")
    return int(number) if number.isdigit() and number != "0" else None


def end_with_launcher() -> None:
    """Send SIGTERM to this rank when its launcher ends, or at once if the launcher has ended.

    A killed launcher does not stop its ranks, and `accelerate launch` dies of SIGUSR1. A run
    without a launcher continues, because its shell may exit and leave the run in the background.
    """
    own, parent = _parent
    if launcher_argv():
        end_with_parent(signal.SIGTERM)
    is_orphan = own == os.getpid() and os.getppid() != parent  # the parent ended after this process began
    if is_orphan and {"RANK", "ACCELERATE_MIXED_PRECISION"} & set(os.environ):
        os.kill(own, signal.SIGTERM)


if __name__ == "__main__":
    print_without_reader()
    exit_with(main)
