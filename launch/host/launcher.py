"""`accelerate launch` that leaves a failed run the last word, and what its ranks know of it.

Started by path, with the same arguments. accelerate and torch elastic answer the failure of a rank
with a traceback of their own and exit code 1. Here accelerate's own parser and launch_command run,
nothing is printed after what the rank has printed, and the exit code is that of the rank that
failed first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

# Run as a script: import the packages beside launch/, not the files of this folder.
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from launch.host.own_packages import import_own_packages

    import_own_packages()

import psutil

from launch.host.files import print_without_reader
from launch.host.signals import EXIT_CODE, PASSED_ON, SIGNALS, StopRequest, end_with_parent, is_being_ended
from recipes.errors import one_line

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

LAUNCHER = Path(__file__)
THREADS = "OMP_NUM_THREADS"
_LATE_SECONDS = 10
_LAUNCHERS = {"accelerate", "accelerate-launch", "accelerate.commands.launch", "torchrun", "torch.distributed.run"}
_KILLED = {
    signal.SIGKILL: ": the kernel does that when RAM runs out (`dmesg` tells)",
    signal.SIGSEGV: ": native code crashed (PYTHONFAULTHANDLER=1 shows where)",
}


def main(argv: list[str] | None = None) -> int:
    """Exit code: that of the first rank that failed, 128 + n if signal n killed it, 130 after
    Ctrl-C; 2 for a mistake in accelerate's own arguments or YAML.
    """
    signals = Signals()
    signals.listen()
    from accelerate.commands import launch  # seconds: it imports torch
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from yaml import YAMLError

    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.propagate = False
    elastic.addHandler(logging.NullHandler())
    args = launch.launch_command_parser().parse_args(argv)
    args.quiet = False  # it would turn every exit code into 1
    args.signals_to_handle = "none"  # or torch elastic takes the signals, and forgets how the ranks end
    try:
        launch.launch_command(args)
    except ChildFailedError as error:
        return signals.exit_code_of(*_root_cause(error))
    except subprocess.CalledProcessError as error:  # of a single process
        return signals.exit_code_of(0, error.returncode)
    except (DistError, RendezvousError, ConnectionError) as error:
        _say(f"accelerate launch: the processes cannot be started together: {one_line(error)}")
        return 1
    except (ValueError, YAMLError, FileNotFoundError, ImportError, AttributeError, TypeError, OverflowError) as error:
        _say(f"accelerate launch: {one_line(error)}")  # a mistake in its arguments or its YAML
        return 2
    return 0


class Signals:
    """Passes signals on to the ranks. A second Ctrl-C kills them, and SIGQUIT does at once.

    accelerate passes nothing on to a single process, and dies of SIGUSR1. A thread does it: while
    the main thread waits for another node inside torch, Python calls no handler.
    """

    def __init__(self) -> None:
        self.received: set[int] = set()
        self._arriving, arrived = os.pipe()
        os.set_blocking(arrived, False)
        signal.set_wakeup_fd(arrived)

    def listen(self) -> None:
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a job in a shell's background
                signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)  # `recipes train` has blocked them
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        while True:
            number = os.read(self._arriving, 1)[0]
            kills = number == signal.SIGQUIT or (number == signal.SIGINT and number in self.received)
            self.received.add(number)
            ranks = psutil.Process().children()
            if not ranks:  # nothing has started yet
                os._exit(self._without_a_word())
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    if kills or number == signal.SIGHUP:
                        os.kill(rank.pid, signal.SIGKILL if kills else signal.SIGTERM)
                    elif number != signal.SIGINT or os.getsid(rank.pid) != os.getsid(0):
                        os.kill(rank.pid, number)  # a terminal interrupts its whole session itself
            if number == signal.SIGINT and not kills:
                # `kill -INT` tells this process alone: a rank that goes on is told to stop.
                late = threading.Timer(_LATE_SECONDS, _end, (ranks,))
                late.daemon = True
                late.start()

    def exit_code_of(self, rank: int, code: int) -> int:
        """The exit code of the launcher. A rank that was killed could not print anything itself."""
        if code >= 0:
            return code
        if -code in {*self.received, *SIGNALS}:  # it did not handle the signal yet
            return self._without_a_word()
        if not self.received:
            how = signal.Signals(-code)
            _say(f"rank {rank} was killed by {how.name}{_KILLED.get(how, '')}")
            return 128 - code
        return self._exit_code

    def _without_a_word(self) -> int:
        """The exit code of a run whose ranks were ended before they could say why: this says it."""
        interrupted = self._exit_code == 130
        _say("interrupted" if interrupted else "told to stop before the training began: run the same command again")
        return self._exit_code

    @property
    def _exit_code(self) -> int:
        return 130 if self.received & {signal.SIGINT, signal.SIGQUIT} else EXIT_CODE


def _end(ranks: list[psutil.Process]) -> None:
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.terminate()


def _root_cause(error: ChildFailedError) -> tuple[int, int]:
    """The rank whose failure made the others fail, and its exit code.

    One that a signal killed comes first, then one with a message: the others have lost their
    connection to it, perhaps before torch saw its end. torch itself ends them by SIGTERM, and after
    30 seconds by SIGKILL.
    """
    failures = error.failures
    first = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        ended = failure.exitcode == -signal.SIGTERM or failure.timestamp > first + 20
        return ended, not isinstance(failure.error_file_data["message"], dict), failure.exitcode > 0, failure.timestamp

    rank = min(failures, key=order)
    return rank, failures[rank].exitcode


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- What a rank knows of its launcher ------------------------------------------------------------

_parent = os.getpid(), os.getppid()  # this process, and what started it
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PATIENCE_SECONDS = 10
_LOOK_SECONDS = 1.0


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
    environment that they were started with. More than 1 is what `--num_cpu_threads_per_process`
    says, or accelerate's own share of the cores.
    """
    first = first_environment() if launcher_argv() else os.environ
    for variables, least in ((first, 1), (os.environ, 2)):
        number = variables.get(THREADS, "").split(",")[0].strip()  # the levels of a nested loop: 4,2
        if number.isdigit() and int(number) >= least:  # OpenMP ignores other values
            return int(number)
    return None


def write_error_file(text: str, since: float | None = None) -> None:
    """Have the box that torch elastic prints at the end hold this text. Nothing happens without it.

    torch's root cause is the earliest failure, in whole seconds. `since` is the time of this one
    [now], which is dated earlier than that of a rank without a file.
    """
    if file := os.environ.get(_ERROR_FILE):
        failed = str(int(since or time.time()) - 1)
        message = {"message": text, "extraInfo": {"py_callstack": f"\n{text}", "timestamp": failed}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")


def is_spoken_for(met_by_all: bool = False) -> bool:
    """True if this rank, which has failed, need not say why: torch elastic ends all ranks as soon
    as one has failed, which has said it. Without it only an error that is `met_by_all` is.
    """
    if _ERROR_FILE not in os.environ:
        return met_by_all
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until and not is_being_ended():
        time.sleep(0.1)
    return is_being_ended()


def end_with_launcher(stop: StopRequest, rank: int) -> None:
    """From now on: when the launcher ends, complete the step, save and end as if told to stop.

    No launcher that is killed tells its ranks, and `accelerate launch` dies of SIGUSR1. Nothing
    happens in a run that none has started: a shell may exit and leave it in the background.
    """
    own, parent = _parent
    is_orphan = own == os.getpid() and os.getppid() != parent  # it has ended since this process began
    if launcher_argv() or (is_orphan and {"RANK", "ACCELERATE_MIXED_PRECISION"} & set(os.environ)):
        end_with_parent(signal.SIGCONT)  # a rank that is stopped would never see it
        threading.Thread(target=_watch, args=(stop, rank), daemon=True).start()


def _watch(stop: StopRequest, rank: int) -> None:
    """A step that does not end is given up: the ranks that it waits for may have been killed too,
    and nobody is left who would end it.
    """
    while os.getppid() == _parent[1]:
        time.sleep(_LOOK_SECONDS)
    stop.request("the end of its launcher")
    step, since = stop.step, time.monotonic()
    while time.monotonic() - since <= stop.patience:
        time.sleep(_LOOK_SECONDS)
        if stop.step != step:
            step, since = stop.step, time.monotonic()
    what = f"the launcher has ended, and nothing after step {step} within {stop.patience} s (ddp_timeout)"
    _say(f"rank {rank}: {what}")
    os._exit(1)


if __name__ == "__main__":
    print_without_reader()
    sys.exit(main())
