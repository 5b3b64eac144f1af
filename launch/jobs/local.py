"""The target `local`: run a bash script on this machine, and retry a run that ran out of memory."""

import contextlib
import fcntl
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import join
from types import FrameType

from launch.host.files import writing
from launch.host.processes import start
from launch.host.secrets import without_secrets
from launch.host.signals import EXIT_CODE, PASSED_ON
from launch.jobs.job import Job, Target, arguments, checked_job, follow, launch_words, one_of, preflight_command
from launch.output import record
from launch.output.submission import LOCAL_LOG, Submission, note
from launch.training.failure import next_flags
from recipes.errors import mistake
from recipes.run import Json, here, with_flags
from recipes.run.hardware import read as read_hardware
from recipes.run.place import Place


@dataclass(frozen=True)
class Local(Target):
    """The flags of `recipes submit local`."""

    HELP = "this machine"

    on_oom: str = one_of(
        "next stop", "if memory runs out: `next` retries with flags that need less, `stop` prints them [stop]", "stop"
    )

    def place(self, processes: int | None, nodes: int = 1, accelerate_config: str | None = None) -> Place:
        hardware = read_hardware()
        processes = processes or max(1, len(hardware.gpus))
        return here(nodes * processes, accelerate_config, processes, hardware=hardware)

    def render(self, job: Job) -> str:
        """Return bash that execs the launcher. Raises `UserError` if the job has several nodes."""
        if job.nodes > 1:
            fix = "use --processes_per_node for several processes here, or `recipes submit slurm` or `azureml`"
            raise mistake("nodes", f"{job.nodes} nodes are asked for, but this machine is one", fix)
        retry = "\n# --on_oom next: if memory runs out, `recipes submit` retries with flags that need less"
        title = f"# {job.title}, on {job.run.hardware}{retry if self.on_oom == 'next' else ''}"
        lines = ["#!/usr/bin/env bash", title, "set -uo pipefail"]
        start = [*preflight_command(job, sys.executable), "exec", join(launch_words(job)), '"${command[@]}"']
        return "\n".join([*lines, "", *arguments(job), "", " ".join(start)]) + "\n"

    def send(self, text: str, job: Job) -> int:
        """Run the job to its end, and return the exit code. With `--on_oom next`, retry a run that
        ran out of memory, at the same global batch, while flags that need less memory are left.
        """
        code, tried = run_script(text, job), list[Json]()
        while self.on_oom == "next" and code not in (0, EXIT_CODE):
            attempt = next_flags(job.folder)
            if attempt is None or attempt in tried:
                break
            tried.append(attempt)
            argv = with_flags(job.argv, attempt)
            job = checked_job(None, argv, job.run.place, preflight=job.preflight)
            print(f"\nout of memory: retrying with batch {job.run.batch}: {join(with_flags([], attempt))}", flush=True)
            code = run_script(without_secrets(self.render(job)), job)
        return code

    @classmethod
    def state(cls, submission: Submission) -> str:
        """Return `running`; empty if no process writes to the log any more."""
        return "running" if is_written(Path(submission.log)) else ""


# --- Running a job's script -----------------------------------------------------------------------


def run_script(text: str, job: Job) -> int:
    """Run a job's script, and return its exit code. The script's output is kept in the output
    folder and shown here. Raises `UserError` if that folder cannot be written.

    The output goes to a file and not to a pipe, because a run can outlive this process, and because
    `recipes logs` reads the file. The script and its child processes hold the file's lock.
    The script's process group gets the stop signals (PASSED_ON) that this process receives.
    """
    record.forget_out_of_memory(job.folder)  # left by an earlier run
    path = job.folder / LOCAL_LOG
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("ab")
    with log:
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        note(job.folder, Submission("local", job.title, str(path.resolve())))
        end = path.stat().st_size  # where the output of earlier runs ends
        process = start(["bash", "-c", text, "recipes"], log)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process.poll() is None:
            os.killpg(process.pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    follow(path, lambda: process.poll() is not None, end)
    return process.returncode


def is_written(path: Path) -> bool:
    """True if a run is writing to this log or folder: a process of the run holds the lock on it."""
    with contextlib.suppress(OSError):  # there is no such path, or its file system has no locks
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False
