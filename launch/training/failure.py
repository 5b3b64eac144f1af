"""Runs that failed or were interrupted: the message, how to resume, and the exit code."""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from rich.markup import escape
from safetensors import SafetensorError

from launch.host.caches import cache_problem
from launch.host.elastic import is_reporter, write_error_file
from launch.host.heartbeat import RankHangs
from launch.host.signals import EXIT_CODE, Preempted, ignore_stop_requests
from launch.host.world import World
from launch.terminal import console, name_too_long, print_note, print_problems
from launch.training.out_of_memory import OutOfMemory, TrainingProgress
from recipes.errors import Failure, Problem, UserError
from recipes.run import RunSpec


class NotANumber(Failure):
    """The loss or a weight is NaN or infinite."""


def report(error: BaseException, progress: TrainingProgress) -> int:
    """Print what went wrong. Returns the exit code. Raises `error` again if it is a bug of ours."""
    run, world, since = progress.run, progress.world, time.time()
    ignore_stop_requests()
    problems = _problems(error, run)
    if problems:
        text = "\n".join(f"{problem.severity}  {problem}" for problem in problems)
        if is_reporter(world, text):
            print_problems(problems, console(stderr=True))
            write_error_file(text)
        return 2
    message = _explained(error, run)
    if message is None:
        is_reporter(world, "".join(traceback.format_exception(error)).strip())  # or all ranks print the same traceback
        write_error_file(f"{type(error).__name__}: {error}")
        raise error
    _print(message, error, world, since)
    if isinstance(error, Preempted):
        return EXIT_CODE
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _problems(error: BaseException, run: RunSpec | None) -> list[Problem]:
    """What the user can correct; empty if that is not why it failed.

    A mistake may be what a reader makes of a cache that it could not write: its own message, that
    the file cannot be read, would be wrong.
    """
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return [name_too_long(error)]
    unwritable = None if run is not None and _is_full(Path(run["output_dir"])) else cache_problem(error)
    if unwritable:
        return [unwritable]
    problems = error.problems if isinstance(error, UserError) else ()
    return [run.with_source(problem) if run else problem for problem in problems]


@contextlib.contextmanager
def only_noted(doing: str, world: World) -> Iterator[None]:
    """For what follows a finished training. A failure is one line, and the run stays finished."""
    try:
        yield
    except Exception as error:
        same_everywhere = isinstance(error, UserError)
        reason = str(error) if same_everywhere else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        text = f"{_rank(world)}the run is finished, but {doing} failed: {reason}"
        print_note(text, console(world.is_main or not same_everywhere, stderr=True))


def _explained(error: BaseException, run: RunSpec | None) -> str | None:
    """A failure of the machine and how to resume. None for any other error: a bug of ours."""
    if isinstance(error, OutOfMemory):
        return error.explained()
    if isinstance(error, Failure) and not isinstance(error, (NotANumber, RankHangs)):
        return str(error)
    if run is None:  # nothing was resolved yet
        return _stopped(error)
    message = _stopped(error) or _failed(error, run)
    if message is None:
        return None
    saved = sorted(Path(run["output_dir"]).glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    if not saved:
        return f"{message}. Saved: no checkpoint yet."
    return (
        f"{message}. Saved: {saved[-1]}. To resume, run the same command again: it takes the newest valid checkpoint."
    )


def _stopped(error: BaseException) -> str | None:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, Preempted) else None


def _failed(error: BaseException, run: RunSpec) -> str | None:
    if isinstance(error, NotANumber):
        return f"{error}; a lower learning rate or fp32 usually helps"
    if isinstance(error, RankHangs):
        return str(error)
    if _disk_is_full(error, run):
        return "the disk is full"
    if isinstance(error, NotImplementedError) and "underflow_overflow" in (run["debug"] or ""):
        return f"--debug underflow_overflow cannot look into this model ({error}): leave it out"
    if _lost_a_rank(error):
        return "another rank failed: see the error that it printed"
    return None


def _disk_is_full(error: BaseException, run: RunSpec) -> bool:
    """Libraries that save wrap the system's error in their own, if they keep it at all."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return isinstance(error, (OSError, RuntimeError, SafetensorError)) and _is_full(Path(run["output_dir"]))


def _is_full(folder: Path) -> bool:
    return folder.exists() and shutil.disk_usage(folder).free < 2**20


def _lost_a_rank(error: BaseException) -> bool:
    if any(words in str(error) for words in ("closed by peer", "reset by peer", "Broken pipe")):
        return True  # of gloo
    # Importing it takes seconds, and without it the error is not torch's.
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return False
    return isinstance(error, (torch.distributed.DistBackendError, torch.distributed.DistNetworkError))


def _print(message: str, error: BaseException, world: World, since: float) -> None:
    """On the rank that failed. What happens to all ranks together is printed by rank 0 alone."""
    own = isinstance(error, (OutOfMemory, NotANumber)) or not isinstance(error, (KeyboardInterrupt, Preempted, Failure))
    if isinstance(error, RankHangs):
        own = error.is_reporter
    if not (world.is_main or own):
        return
    text = f"{_rank(world)}{message}"
    console(stderr=True).print(escape(text), style="red", highlight=False)
    is_consequence = _lost_a_rank(error) or (isinstance(error, OutOfMemory) and not error.first)
    if not is_consequence:
        write_error_file(text, since=since)


def _rank(world: World) -> str:
    return "" if world.is_main else f"rank {world.rank}: "
