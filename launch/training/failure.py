"""Runs that failed or were interrupted: the message, how to resume, and the exit code."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.markup import escape

from launch.host.files import StorageFailure, storage_failure
from launch.host.heartbeat import RankHangs
from launch.host.launcher import is_spoken_for, write_error_file
from launch.host.signals import EXIT_CODE, Preempted, ignore_stop_requests
from launch.host.world import World
from launch.output.checkpoints import newest_complete
from launch.terminal import console, print_note, print_problems
from launch.training.out_of_memory import OutOfMemory
from recipes.errors import Failure, Problem, StreamBroke, UserError, one_line
from recipes.run import RunSpec


class NotANumber(Failure):
    """The loss or a weight is NaN or infinite."""


@contextlib.contextmanager
def explained_by(run: RunSpec) -> Iterator[None]:
    """An error that leaves this block is reported as one of this run: with the sources of its
    values, and what its folder holds. Of blocks in each other the innermost counts.
    """
    try:
        yield
    except BaseException as error:
        vars(error).setdefault("run", run)
        raise


def report(error: BaseException, world: World) -> int:
    """Print what went wrong. Returns the exit code. Raises `error` again if it is a bug of ours."""
    run, since = vars(error).get("run"), time.time()  # None if it was not resolved
    ignore_stop_requests()
    problems = _problems(error, run)
    if problems:
        text = "\n".join(f"{problem.severity}  {problem}" for problem in problems)
        if _is_reporter(world):
            print_problems(problems, console(stderr=True))
            write_error_file(text)
        return 2
    message = _explained(error, run)
    if message is None:
        if not world.is_local_main and is_spoken_for():  # or all ranks print the same traceback
            return 1
        write_error_file(f"{type(error).__name__}: {error}")
        raise error
    _print(message, error, run, world, since)
    if isinstance(error, Preempted):
        return EXIT_CODE
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _is_reporter(world: World) -> bool:
    """True on the rank that prints an error that all ranks of its node should meet: the first one,
    or one whose launcher does not end it, because the first has not met the error.
    """
    return world.is_local_main or not is_spoken_for(met_by_all=True)


def _problems(error: BaseException, run: RunSpec | None) -> list[Problem]:
    """What the user can correct; empty if that is not why it failed."""
    problems = error.problems if isinstance(error, UserError) and not _storage_failure(error, run) else ()
    return [run.with_source(problem) if run else problem for problem in problems]


def _storage_failure(error: BaseException, run: RunSpec | None) -> StorageFailure | None:
    """What the machine did to a file. A mistake may be what a reader makes of it."""
    if isinstance(error, (OutOfMemory, NotANumber)) or not isinstance(error, Exception):
        return None
    if isinstance(error, UserError) and error.problems[0].subject == "output_dir":
        return None  # nothing was written there yet: another folder helps
    folder = Path(run["output_dir"]) if run and run["output_dir"] else None
    if folder and isinstance(error, UserError) and not folder.exists():
        folder = None  # data is read before it is made
    return storage_failure(error, folder)


@contextlib.contextmanager
def only_noted(doing: str, world: World) -> Iterator[None]:
    """For what follows a finished training. A failure is one line, and the run stays finished."""
    try:
        yield
    except Exception as error:
        same_everywhere = isinstance(error, UserError)
        reason = str(error) if same_everywhere else f"{type(error).__name__}: {one_line(error)}"
        text = f"{_rank(world)}the run is finished, but {doing} failed: {reason}"
        print_note(text, console(world.is_main or not same_everywhere, stderr=True))


def _explained(error: BaseException, run: RunSpec | None) -> str | None:
    """A failure of the machine and how to resume. None for any other error: a bug of ours."""
    if isinstance(error, OutOfMemory):
        return error.explained()
    if isinstance(error, Failure) and not isinstance(error, (NotANumber, RankHangs, StreamBroke)):
        return str(error)
    if run is None:  # nothing was resolved yet
        return _stopped(error)
    if failed := _storage_failure(error, run):
        return " ".join([f"{failed.what}.", *_saved(run, failed.remedy)])
    message = _stopped(error) or _failed(error, run)
    return message and " ".join([f"{message}.", *_saved(run)])


def _saved(run: RunSpec, remedy: str = "") -> list[str]:
    """What a resume starts from, and what to do before it."""
    newest = newest_complete(run["output_dir"])
    saved = f"Saved: {newest or 'no checkpoint yet'}."
    again = f"{remedy or 'To resume'}, {'then ' if remedy else ''}run the same command again"
    if newest is None:
        return [saved, f"{again}."] if remedy else [saved]
    return [saved, f"{again}: it takes the newest valid checkpoint."]


def _stopped(error: BaseException) -> str | None:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, Preempted) else None


def _failed(error: BaseException, run: RunSpec) -> str | None:
    if isinstance(error, NotANumber):
        return f"{error}; a lower learning rate or fp32 usually helps"
    if isinstance(error, (RankHangs, StreamBroke)):
        return str(error)
    if isinstance(error, NotImplementedError) and "underflow_overflow" in (run["debug"] or ""):
        return f"--debug underflow_overflow cannot look into this model ({error}): leave it out"
    if _lost_a_rank(error):
        return "another rank failed: see the error that it printed"
    return None


def _lost_a_rank(error: BaseException) -> bool:
    if any(words in str(error) for words in ("closed by peer", "reset by peer", "Broken pipe")):
        return True  # of gloo
    # Importing it takes seconds, and without it the error is not torch's.
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return False
    return isinstance(error, (torch.distributed.DistBackendError, torch.distributed.DistNetworkError))


def _print(message: str, error: BaseException, run: RunSpec | None, world: World, since: float) -> None:
    """On the rank that failed. What happens to all ranks together is printed by one alone."""
    of_one_rank = isinstance(error, (OutOfMemory, NotANumber, StreamBroke))
    own = of_one_rank or not isinstance(error, (KeyboardInterrupt, Preempted, Failure))
    if isinstance(error, RankHangs):
        own = error.is_reporter
    if not (world.is_main or own):
        return
    text = f"{_rank(world)}{message}"
    lost = _lost_a_rank(error)
    if lost and is_spoken_for():
        return
    if _storage_failure(error, run) and not _is_reporter(world):
        return
    console(stderr=True).print(escape(text), style="red", highlight=False)
    is_consequence = lost or (isinstance(error, OutOfMemory) and not error.first)
    if not is_consequence:
        write_error_file(text, since=since)


def _rank(world: World) -> str:
    return "" if world.is_main else f"rank {world.rank}: "
