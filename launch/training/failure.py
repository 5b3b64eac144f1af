"""How a run ended that did not finish: in words, with how to go on, and as an exit code."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from rich.markup import escape

from launch.host.signals import EXIT_CODE, Preempted
from launch.host.world import World
from launch.terminal import console
from launch.training.out_of_memory import OutOfMemory
from recipes.run import RunSpec


def explain_failure(error: BaseException, run: RunSpec | None) -> str | None:
    """A failure of the machine in words, with how to go on; None for anything else, which is a bug of ours."""
    if isinstance(error, OutOfMemory):
        return error.explained()
    if type(error).__name__ == "ProbeFailed":
        return str(error)
    if run is None:  # it had hardly begun
        return _told_to_end(error)
    words = _told_to_end(error) or _failure(error, run)
    if words is None:
        return None
    saved = sorted(Path(run["output_dir"]).glob("checkpoint-*"), key=lambda path: path.stat().st_mtime)
    if not saved:
        return f"{words}. Saved: no checkpoint yet."
    return f"{words}. Saved: {saved[-1]}. To go on, run the same command again: it resumes from the newest valid one."


def _told_to_end(error: BaseException) -> str | None:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, Preempted) else None


def _failure(error: BaseException, run: RunSpec) -> str | None:
    name = type(error).__name__
    if name == "NotANumber":
        return f"{error}; a lower learning rate or fp32 usually helps"
    if _disk_is_full(error, run):
        return "the disk is full"
    if name in ("DistBackendError", "DistNetworkError") or "Connection closed by peer" in str(error):
        return "another rank was lost, its own message says why"
    return None


def _disk_is_full(error: BaseException, run: RunSpec) -> bool:
    """The libraries that save wrap the error of the system in their own, if they keep it at all."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    folder = Path(run["output_dir"])
    saving = isinstance(error, (OSError, RuntimeError)) or type(error).__name__ == "SafetensorError"
    return saving and folder.exists() and shutil.disk_usage(folder).free < 2**20


def print_failure(words: str, error: BaseException, world: World) -> None:
    """On the rank that failed, whichever it is; what all know together is said once."""
    together = isinstance(error, (KeyboardInterrupt, Preempted)) or type(error).__name__ == "ProbeFailed"
    speaks = world.is_main or not together
    rank = f"rank {world.rank}: " if world.size > 1 and not world.is_main else ""
    console(speaks, stderr=True).print(escape(f"{rank}{words}"), style="red", highlight=False)


def exit_code(error: BaseException) -> int:
    if isinstance(error, Preempted):
        return EXIT_CODE
    return 130 if isinstance(error, KeyboardInterrupt) else 1
