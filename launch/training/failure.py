"""Runs that failed or were interrupted: the message, how to resume, and the exit code."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from rich.markup import escape

from launch.host.caches import cache_problem, is_chosen
from launch.host.elastic import is_last_to_know, is_reporter, write_error_file
from launch.host.heartbeat import RankHangs
from launch.host.signals import EXIT_CODE, Preempted, ignore_stop_requests
from launch.host.storage import FULL, StorageFailure, refusal, storage_failure
from launch.host.world import World
from launch.output.checkpoints import newest_complete
from launch.terminal import console, print_note, print_problems
from launch.training.out_of_memory import OutOfMemory
from launch.training.words import one_line, untrainable
from recipes.errors import Failure, Problem, StreamBroke, UserError
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


def report(error: BaseException, world: World) -> int:
    """Print what went wrong. Returns the exit code. Raises `error` again if it is a bug of ours."""
    run, since = vars(error).get("run"), time.time()  # None if it was not resolved
    ignore_stop_requests()
    problems, storage = _problems(error, run), _storage_failure(error, run)
    if problems:
        text = "\n".join(f"{problem.severity}  {problem}" for problem in problems)
        if is_reporter(world, text):
            print_problems(problems, console(stderr=True))
            write_error_file(text)
        of_machine = cache_problem(error)
        return 1 if of_machine and not is_chosen(of_machine) else 2
    message = _explained(error, run, storage)
    if message is None:
        is_reporter(world, "".join(traceback.format_exception(error)).strip())  # or all ranks print the same traceback
        write_error_file(f"{type(error).__name__}: {error}")
        raise error
    text = f"{_rank(world)}{message}"
    if _prints(error, world, storage, text):
        console(stderr=True).print(escape(text), style="red", highlight=False)
        is_consequence = _lost_a_rank(error) or (isinstance(error, OutOfMemory) and not error.first)
        if not is_consequence:
            write_error_file(text, since=since)
    if isinstance(error, Preempted):
        return EXIT_CODE
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _problems(error: BaseException, run: RunSpec | None) -> list[Problem]:
    """What the user can correct; empty if that is not why it failed.

    A library's cache that cannot be written comes first: a mistake may be what a reader makes of
    it. A full disk of both is reported of the output folder.
    """
    folder = (run["output_dir"] or "") if run else ""
    is_full = os.path.exists(folder) and refusal(Path(folder)) in FULL  # noqa: PTH110, Path.exists raises for a long name
    cache = None if is_full else cache_problem(error)
    if cache:
        return [cache]
    found = error.problems if isinstance(error, UserError) and not _storage_failure(error, run) else ()
    if not isinstance(error, (UserError, Failure)):
        found = untrainable(error)
    return [run.with_source(problem) if run else problem for problem in found]


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


def _explained(error: BaseException, run: RunSpec | None, storage: StorageFailure | None) -> str | None:
    """A failure of the machine and how to resume. None for any other error: a bug of ours."""
    if isinstance(error, OutOfMemory):
        return error.explained()
    if isinstance(error, Failure) and not isinstance(error, (NotANumber, Preempted, RankHangs, StreamBroke)):
        return str(error)
    what, remedy = None, ""
    if storage and run:
        what, remedy = storage.what, storage.remedy
    elif isinstance(error, KeyboardInterrupt):
        what = "interrupted"
    elif isinstance(error, NotANumber):
        what = f"{error}; a lower learning rate or fp32 usually helps"
    elif isinstance(error, (Preempted, RankHangs, StreamBroke)):
        what = str(error)
    elif _lost_a_rank(error):
        what = "another rank failed: see the error that it printed"
    if what is None or run is None:
        return what
    newest = newest_complete(run["output_dir"])
    again = f"{remedy or 'To resume'}, {'then ' if remedy else ''}run the same command again"
    if newest is None:
        return f"{what}. Saved: no checkpoint yet." + (f" {again}." if remedy else "")
    return f"{what}. Saved: {newest}. {again}: it takes the newest valid checkpoint."


def _lost_a_rank(error: BaseException) -> bool:
    if any(words in str(error) for words in ("closed by peer", "reset by peer", "Broken pipe")):
        return True  # of gloo
    # Importing it takes seconds, and without it the error is not torch's.
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return False
    return isinstance(error, (torch.distributed.DistBackendError, torch.distributed.DistNetworkError))


def _prints(error: BaseException, world: World, storage: StorageFailure | None, text: str) -> bool:
    """True on the rank that failed. What happens to all ranks together is printed by one alone."""
    of_one_rank = isinstance(error, (OutOfMemory, NotANumber, StreamBroke))
    own = of_one_rank or not isinstance(error, (KeyboardInterrupt, Preempted, Failure))
    if isinstance(error, RankHangs):
        own = error.is_reporter
    if not (world.is_main or own) or (_lost_a_rank(error) and not is_last_to_know()):
        return False
    return storage is None or is_reporter(world, text)


def _rank(world: World) -> str:
    return "" if world.is_main else f"rank {world.rank}: "
