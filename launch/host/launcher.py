"""`accelerate launch` that leaves a failed run the last word. Started by path, same arguments.

accelerate and torch elastic answer the failure of a rank with a traceback of their own and with
exit code 1. Here accelerate's own parser and launch_command run too, but nothing is printed after
what the rank has printed, and the exit code is that of the first rank that failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

# Run as a script: import the packages beside launch/, not the files of this folder.
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from launch.host.own_packages import import_own_packages

    import_own_packages()

from launch.host.elastic import PRINTED
from launch.host.files import print_without_reader
from launch.host.signals import EXIT_CODE, PASSED_ON, SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_SLOW_SECONDS = 2
_LATE_SECONDS = 10
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

    _silence("torch.distributed.elastic")
    parser = launch.launch_command_parser()
    parser.error = _refuse  # type: ignore[method-assign] # its own prints two screens of usage
    args = parser.parse_args(argv)
    args.quiet = False  # it would turn every exit code into 1
    args.signals_to_handle = "none"  # or torch elastic takes the signals, and forgets how the ranks end
    try:
        launch.launch_command(args)
    except ChildFailedError as error:
        _print_untold(error)
        return _exit_code(*_root_cause(error), signals)
    except subprocess.CalledProcessError as error:  # of a single process
        return _exit_code(0, error.returncode, signals)
    except (ValueError, YAMLError, FileNotFoundError, ImportError, AttributeError, TypeError, OverflowError) as error:
        _refuse(str(error))
    except (DistError, RendezvousError, ConnectionError) as error:
        _print(f"the processes cannot be started together: {error}")
        return 1
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
        threading.Thread(target=self._pass_on_all, daemon=True).start()

    def _pass_on_all(self) -> None:
        while number := os.read(self._arriving, 1):
            self._pass_on(number[0])

    def _pass_on(self, number: int) -> None:
        again = number in self.received
        self.received.add(number)
        ranks = _ranks()
        if not ranks:  # nothing has started yet
            self.say_why()
            os._exit(self.exit_code)
        if number == signal.SIGQUIT or (number == signal.SIGINT and again):
            _send(ranks, signal.SIGKILL)
        elif number == signal.SIGINT:
            self._interrupt(ranks)
        else:
            _send(ranks, signal.SIGTERM if number == signal.SIGHUP else number)

    def _interrupt(self, ranks: list[int]) -> None:
        """A terminal tells all processes of this one's session, but `kill -INT` only this one: a
        rank that was not told goes on, and is then told to stop. Most have ended before a second
        Ctrl-C is possible.
        """
        _send([rank for rank in ranks if _session(rank) != os.getsid(0)], signal.SIGINT)
        _later(_SLOW_SECONDS, _say, "interrupted; Ctrl-C again kills")
        _later(_LATE_SECONDS, _send, ranks, signal.SIGTERM)

    def say_why(self) -> None:
        """In place of ranks that could not."""
        interrupted = self.exit_code == 130
        _say("interrupted" if interrupted else "told to stop before the training began: run the same command again")

    @property
    def exit_code(self) -> int:
        """Of a run that was ended by the signals received."""
        return 130 if self.received & {signal.SIGINT, signal.SIGQUIT} else EXIT_CODE


def _later(seconds: float, do: Callable[..., None], *arguments: object) -> None:
    """Unless this process has ended by then."""
    timer = threading.Timer(seconds, do, arguments)
    timer.daemon = True
    timer.start()


def _session(rank: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(rank)
    return None


def _ranks() -> list[int]:
    """The processes that this one has started."""
    import psutil

    return [process.pid for process in psutil.Process().children()]


def _send(ranks: list[int], number: int) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, number)


def _silence(logger: str) -> None:
    """Drop what this logger and those below it would print."""
    logging.getLogger(logger).propagate = False
    logging.getLogger(logger).addHandler(logging.NullHandler())


def _root_cause(error: ChildFailedError) -> tuple[int, int]:
    """The rank whose failure made the others fail, and its exit code.

    A rank with a message knows its cause, and one that a signal killed could not write any. The
    others have lost their connection to it, perhaps before torch saw its end. torch itself ends
    them by SIGTERM, and after 30 seconds by SIGKILL.
    """
    failures = error.failures
    first = min(failure.timestamp for failure in failures.values())

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        ended = failure.exitcode == -signal.SIGTERM or failure.timestamp > first + 20
        return ended, PRINTED not in failure.error_file_data, failure.exitcode > 0, failure.timestamp

    rank = min(failures, key=order)
    return rank, failures[rank].exitcode


def _print_untold(error: ChildFailedError) -> None:
    """The message of a rank that left it to another rank to print it, if that one did not."""
    told = [failure.error_file_data.get(PRINTED) for failure in error.failures.values()]
    if False in told and True not in told:
        untold = list(error.failures.values())[told.index(False)]
        _say(untold.error_file_data["message"]["message"])


def _exit_code(rank: int, code: int, signals: Signals) -> int:
    """The exit code of the launcher. A rank that was killed could not print anything itself."""
    if code >= 0:
        return code
    if signals.received or -code in SIGNALS:
        if -code in {*signals.received, *SIGNALS}:  # it did not handle the signal yet
            signals.say_why()
        return signals.exit_code
    how = signal.Signals(-code)
    _say(f"rank {rank} was killed by {how.name}{_KILLED.get(how, '')}")
    return 128 - code


def _refuse(message: str) -> NoReturn:
    """For a mistake in accelerate's arguments or YAML."""
    _print(message)
    raise SystemExit(2)


def _print(message: str) -> None:
    _say(f"accelerate launch: {' '.join(message.split())}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print_without_reader()
    sys.exit(main())
