"""Jobs on this machine: what it has, the job of a training here, and running a job's script."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import IO

from launch.jobs.job import Job, Node, checked_job
from launch.jobs.tail import follow
from launch.output import record
from launch.output.submission import LOCAL_LOG, Submission, note
from recipes.errors import UserError, mistake
from recipes.run.hardware import read as read_hardware


def this_node(processes: int | None = None) -> Node:
    """This machine as a node, with one process per GPU if nothing else is asked for."""
    hardware = read_hardware()
    return Node(hardware, processes or max(1, len(hardware.gpus)))


def job_here(recipe: str | None, argv: Sequence[str], processes: int | None = None, says_advice: bool = True) -> Job:
    """The checked job of a training on this machine.

    Raises `UserError` with every problem; advice is printed, with `says_advice`.
    """
    return checked_job(recipe, argv, this_node(processes), says_advice=says_advice)


def run_script(text: str, job: Job) -> int:
    """Run a job's script. Its output is kept in the output folder and shown here.

    The output goes through a file and not a pipe: a run can outlive this process, and
    `recipes logs` reads the file. Signals sent to this process reach the script.
    Returns the script's exit code.
    Raises `UserError` if another run writes to the folder.
    """
    record.forget_out_of_memory(job.folder)  # of an earlier run
    path = job.folder / LOCAL_LOG
    with _locked_log(path) as log:
        submission = Submission("local", job.title, str(path.resolve()))
        note(job.folder, submission)
        start = path.stat().st_size
        process = subprocess.Popen(
            ["bash", "-c", text, "recipes"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=sys.platform == "linux",
        )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, frame: process.send_signal(received))
    signal.signal(signal.SIGHUP, lambda received, frame: process.send_signal(signal.SIGTERM))
    follow(path, lambda: process.poll() is not None, start)
    note(job.folder, replace(submission, exit_code=process.returncode))
    return process.returncode


def is_written(path: Path) -> bool:
    """Whether a run writes to this log, or to this folder: its processes hold the lock."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # there is none
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False


def refuse_while_written(folder: Path) -> None:
    """Raises `UserError` if a run on this machine writes to the folder."""
    if is_written(folder / LOCAL_LOG):
        raise _in_use(folder)


def _locked_log(path: Path) -> IO[bytes]:
    """The log, opened to append. This process and those it starts hold its lock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab")
    except OSError as error:
        what = f"{path.parent} cannot be written: {error.strerror}"
        raise mistake("output_dir", what, "choose a writable folder with --output_dir") from None
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        raise _in_use(path.parent) from None
    except OSError:  # a file system without locks
        pass
    return log


def _in_use(folder: Path) -> UserError:
    fix = f"another --output_dir, or wait: recipes logs -f {quote(str(folder))}"
    return mistake("output_dir", f"another run is writing to {folder}", fix)
