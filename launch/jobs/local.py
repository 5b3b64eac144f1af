"""A job on this machine: the bash text that runs it, and running it."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import IO

from launch.host.signals import EXIT_CODE
from launch.jobs.job import THIS_ACCELERATE, Job, arguments, launch_words, preflight_words
from launch.jobs.tail import follow
from launch.output import record
from launch.output.submission import LOCAL_LOG, Submission, note
from recipes.errors import mistake

_FORWARD = """\
tell() {  # the training processes themselves: accelerate forwards nothing to a single one
    local pid training
    for pid in "${launchers[@]}"; do
        read -r -d '' -a training < "/proc/$pid/task/$pid/children"
        kill -s "$1" "${training[@]:-$pid}"
    done 2>/dev/null
}
trap 'tell TERM' TERM USR1
trap 'trap "tell KILL" INT; echo "stopping after this step; Ctrl-C again kills" >&2; tell TERM' INT

code=0
for pid in "${launchers[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do  # a signal ends `wait` before its process
        wait "$pid" && ended=0 || ended=$?
    done
    ((ended == 0)) || code=$ended
done
exit "$code"
"""


def render(job: Job) -> str:
    """A bash script. Several nodes are all started here, as a rehearsal."""
    words = launch_words(job, THIS_ACCELERATE, '"$rank"', "127.0.0.1", '"$port"')
    start = " ".join([*words, "--quiet", '"${command[@]}"'])
    preflight = preflight_words(job, sys.executable, '"$rank"', "127.0.0.1", '"$((port - 10000))"')
    start = f"({' '.join(preflight)} exec {start}) &" if preflight else f"{start} &"
    lines = ["#!/usr/bin/env bash", f"# {job.title}, on {job.run.hardware}", "set -uo pipefail"]
    lines += [f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.shutdown_seconds}", ""]
    lines += [*arguments(job), "launchers=()"]
    if job.nodes == 1:
        lines += [start, "launchers+=($!)"]
    else:
        lines += [
            "port=$((20000 + $$ % 20000))",
            f"for rank in {{0..{job.nodes - 1}}}; do",
            f"    {start}",
            "    launchers+=($!)",
            "done",
        ]
    return "\n".join(lines) + "\n\n" + _FORWARD


def submit(text: str, job: Job) -> int:
    """Run the script; what it prints is kept in the output folder and shown here; signals that come here reach it.

    Through a file and not a pipe: a run outlives this process if it must, and `recipes logs` goes on reading.
    Returns the script's exit code, 75 where the run was told to stop. Raises `UserError` while another run is there.
    """
    path, before = job.folder / LOCAL_LOG, record.read(job.folder)
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
    after = record.read(job.folder)
    told = process.returncode != 0 and after != before and after.get("status") == "preempted"
    return EXIT_CODE if told else process.returncode


def running(log: Path) -> bool:
    """Whether a run writes to this log: its processes hold the lock, and nothing else can."""
    try:
        with log.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no log, or a file system without locks
        return False
    return False


def _locked_log(path: Path) -> IO[bytes]:
    """The log, open to be added to and locked for whoever has it open: this process and those it starts."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab")
    except OSError as error:
        what = f"{path.parent} cannot be written: {error.strerror}"
        raise mistake("output_dir", what, "--output_dir with a folder that can") from None
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        fix = f"another --output_dir, or wait: recipes logs -f {quote(str(path.parent))}"
        raise mistake("output_dir", f"another run is writing to {path.parent}", fix) from None
    except OSError:  # a file system without locks locks nothing
        pass
    return log
