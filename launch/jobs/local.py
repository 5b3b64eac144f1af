"""The target `local`: a bash script on this machine. It can go on after running out of memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join

from launch.host.secrets import without_secrets
from launch.host.signals import EXIT_CODE
from launch.jobs import here, tail
from launch.jobs.job import THIS_ACCELERATE, Job, Node, arguments, checked_job, launch_command, preflight_command
from launch.output.submission import Submission
from launch.terminal import plural
from launch.training.failure import next_flags
from recipes.run import Json, with_flags

HELP = "this machine"
WRITES_HERE = True
STAGE: Callable[[Job, Path], Path] | None = None


@dataclass(frozen=True)
class Local:
    """The flags of this target."""

    on_oom: str = field(
        default="stop",
        metadata={
            "choices": ("next", "stop"),
            "help": "out of memory: go on with the next smaller micro-batch, or only say which that is [stop]",
        },
    )


FLAGS: type = Local


_TELL = """\
launchers=()
told=
tell() {  # each process group: a launcher passes it on to its training processes
    local pid
    told=$1
    for pid in "${launchers[@]}"; do kill -s "$1" -- "-$pid"; done 2>/dev/null
}
trap 'tell TERM' TERM USR1 HUP
trap 'trap "tell QUIT" INT; echo "stopping, after the step in progress if any; Ctrl-C again kills" >&2; tell TERM' INT
"""

# Whoever fails first says why: the others then lose it, which is a 1, or wait for it in vain.
_WAIT = """\
set +m  # or bash reports their ends
[ -z "$told" ] || tell "$told"  # while they were started

code=0
running=("${launchers[@]}")
while true; do
    failed=$code
    still=()
    for pid in "${running[@]}"; do
        if kill -0 "$pid" 2>/dev/null; then
            still+=("$pid")
        else  # now `wait` returns at once, and no signal ends it before its process
            wait "$pid" && ended=0 || ended=$?
            ((failed || ended <= code)) || code=$ended
        fi
    done
    ((${#still[@]})) || exit "$code"
    running=("${still[@]}")
    ((failed == code)) || tell TERM
    sleep 0.5
done
"""


def render(job: Job, flags: Local | None = None) -> str:
    """A bash script. Several nodes all start on this machine, as a rehearsal."""
    words = launch_command(job, THIS_ACCELERATE, '"$rank"', "127.0.0.1", '"$port"')
    start = " ".join([*words, '"${command[@]}"'])
    preflight = preflight_command(job, sys.executable, '"$rank"', "127.0.0.1", '"$((port - 10000))"')
    start = f"({' '.join(preflight)} exec {start}) &" if preflight else f"{start} &"
    lines = ["#!/usr/bin/env bash", f"# {job.title}, on {job.run.hardware}", "set -uo pipefail"]
    lines += ["set -m  # a process group for each launcher"]
    lines += ["", *arguments(job), "", *_TELL.splitlines(), ""]
    if job.nodes == 1:
        lines += [start, "launchers+=($!)"]
    else:
        if not job.run.hardware.cuda:
            share = max(1, job.run.hardware.cores // job.processes)
            lines.append(f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{share}}}  # the nodes share these cores")
        lines += [
            "port=$((20000 + $$ % 20000))",
            f"for rank in {{0..{job.nodes - 1}}}; do",
            f"    {start}",
            "    launchers+=($!)",
            "done",
        ]
    return "\n".join(lines) + "\n" + _WAIT


def node(flags: Local, processes: int | None) -> Node:
    return here.this_node(processes)


def check(text: str, job: Job, flags: Local) -> None:
    without_secrets(text)


def submit(text: str, job: Job, flags: Local) -> int:
    """Run the job to its end. Returns its exit code."""
    if not job.run.hardware.cuda:
        print(f"no GPU here: {plural(job.processes, 'process')} on {job.run.hardware}", flush=True)
    code = here.run_script(text, job)
    return _go_on_with_less(job, code) if flags.on_oom == "next" else code


def _go_on_with_less(job: Job, code: int) -> int:
    """Run again with less memory at the same global batch, until that is enough or impossible."""
    tried: list[Json] = []
    while code not in (0, EXIT_CODE):
        attempt = next_flags(job.folder)
        if attempt is None or attempt in tried:
            if tried:
                print("\nno smaller micro-batch of the same global batch is left to try", file=sys.stderr)
            break
        tried.append(attempt)
        job = _with_flags(job, attempt)
        print(f"\nout of memory: again, with batch {job.run.batch}: {join(with_flags([], attempt))}", flush=True)
        code = here.run_script(without_secrets(render(job)), job)
    return code


def _with_flags(job: Job, flags: Json) -> Job:
    _, recipe, *argv = job.argv
    again = Node(job.run.hardware, job.processes_per_node)
    return checked_job(recipe, with_flags(argv, flags), again, job.nodes, job.preflight, job.config)


# --- A job that was submitted ---------------------------------------------------------------------


def state(submission: Submission) -> str:
    """`running`, or empty if no process writes to the log any more."""
    return "running" if here.is_written(Path(submission.log)) else ""


def is_over(state: str) -> bool:
    return not state


def print_log(submission: Submission, folder: Path, following: bool) -> None:
    tail.print_log(Path(submission.log), folder, following, lambda: state(submission), is_over, ask_every=0.2)


def last_line(submission: Submission) -> str:
    return tail.last_line(Path(submission.log))
