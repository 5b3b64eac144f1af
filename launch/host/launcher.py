"""`accelerate launch` that prints nothing after a failed rank, and what ranks know of their
launcher.

Started by path, with the same arguments. accelerate and torch elastic answer the failure of a rank
with a traceback of their own and exit code 1. Here accelerate's own parser and launch_command run,
nothing is printed after what the rank has printed, and the exit code is that of the rank that
failed first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

# Run as a script: import the packages beside launch/, not the files of this folder.
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from launch.host.processes import import_own_packages

    import_own_packages()

import psutil

from launch.host.files import print_without_reader
from launch.host.processes import how_it_ended
from launch.host.signals import EXIT_CODE, PASSED_ON, SIGNALS, end_with_parent
from recipes.errors import one_line

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

LAUNCHER = Path(__file__)
THREADS = "OMP_NUM_THREADS"
_LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}
_say = partial(print, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Exit code: that of the first rank that failed, 128 + n if signal n killed it, 130 after
    Ctrl-C.
    """
    listen()
    from accelerate.commands import launch  # seconds: it imports torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.CRITICAL)  # torch elastic logs every end of a rank
    args = launch.launch_command_parser().parse_args(argv)
    args.quiet = False  # it would turn every exit code into 1
    args.signals_to_handle = "none"  # or torch elastic takes the signals, and forgets how the ranks end
    try:
        launch.launch_command(args)
    except ChildFailedError as error:
        return _exit_code_of(*_first_to_fail(error))
    except subprocess.CalledProcessError as error:  # of a single process
        return _exit_code_of(0, error.returncode)
    except Exception as error:
        _say(f"accelerate launch: {one_line(error)}")
        return 1
    return 0


# --- Signals --------------------------------------------------------------------------------------

_received: set[int] = set()


def listen() -> None:
    """Pass signals on to the ranks. A second Ctrl-C kills them.

    accelerate passes nothing on to a single process, and dies of SIGUSR1.
    """
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a job in a shell's background
            signal.signal(number, _pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)  # `recipes train` has blocked them


def _pass_on(number: int, frame: FrameType | None) -> None:
    kills = number == signal.SIGINT and number in _received
    _received.add(number)
    ranks = psutil.Process().children()
    if not ranks:  # nothing has started yet
        os._exit(_exit_code_of_the_told())
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            if kills:
                os.kill(rank.pid, signal.SIGKILL)
            elif number != signal.SIGINT or os.getsid(rank.pid) != os.getsid(0):
                os.kill(rank.pid, number)  # a terminal interrupts its whole session itself


def _exit_code_of(rank: int, code: int) -> int:
    """The exit code of the launcher. A rank that was killed could not print anything itself."""
    if code >= 0:
        return code
    if _received or -code in SIGNALS:  # it did not handle the signal yet
        return _exit_code_of_the_told()
    why = ": the kernel does that when RAM runs out (`dmesg` tells)" if -code == signal.SIGKILL else ""
    _say(f"rank {rank} was {how_it_ended(code)}{why}")
    return 128 - code


def _exit_code_of_the_told() -> int:
    """The exit code of a run whose ranks were ended before they could say why: this says it."""
    interrupted = signal.SIGINT in _received
    _say("interrupted" if interrupted else "told to stop: run the same command again")
    return 130 if interrupted else EXIT_CODE


def _first_to_fail(error: ChildFailedError) -> tuple[int, int]:
    """The rank whose failure made the others fail, and its exit code.

    torch itself ends the others by SIGTERM, unless they have lost their connection to it: then
    their exit code is 1, perhaps before torch saw its end.
    """
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    late = {-signal.SIGTERM: 2, 1: 1}
    rank = min(codes, key=lambda rank: (late.get(codes[rank], 0), error.failures[rank].timestamp))
    return rank, codes[rank]


# --- What a rank knows of its launcher ------------------------------------------------------------

_parent = os.getpid(), os.getppid()  # this process, and what started it


def launcher_argv() -> list[str]:
    """The command line of the launcher that started this process; empty if none did, or the system
    does not tell.
    """
    with contextlib.suppress(psutil.Error, OSError):
        words = psutil.Process(os.getppid()).cmdline()
        if str(LAUNCHER) in words or _LAUNCHERS & {Path(word).name for word in words}:
            return words
    return []


def first_environment() -> Mapping[str, str]:
    """The variables that the user has set: those that the launcher was started with, or this
    process if there is none. Since then launchers, libraries and we have set more.
    """
    try:
        return psutil.Process(os.getppid() if launcher_argv() else None).environ()
    except (psutil.Error, OSError):
        return os.environ


def threads_per_process(cores: int, processes: int) -> int:
    """What a person asked for, or an equal share of the cores."""
    return own_threads() or max(1, cores // processes)


def own_threads() -> int | None:
    """The number in OMP_NUM_THREADS if a person has set it; None if nobody did.

    Launchers set it too, mostly to 1, which leaves all other cores idle: that one is not in the
    environment that they were started with.
    """
    number = (first_environment() if launcher_argv() else os.environ).get(THREADS, "")
    return int(number) if number.isdigit() and number != "0" else None


def end_with_launcher() -> None:
    """From now on: when the launcher ends, the kernel tells this rank to stop.

    No launcher that is killed tells its ranks, and `accelerate launch` dies of SIGUSR1. Nothing
    happens in a run that none has started: a shell may exit and leave it in the background.
    """
    own, parent = _parent
    if launcher_argv():
        end_with_parent(signal.SIGTERM)
    is_orphan = own == os.getpid() and os.getppid() != parent  # it has ended since this process began
    if is_orphan and {"RANK", "ACCELERATE_MIXED_PRECISION"} & set(os.environ):
        os.kill(own, signal.SIGTERM)


if __name__ == "__main__":
    print_without_reader()
    sys.exit(main())
