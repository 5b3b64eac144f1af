"""A job on this machine: the bash text that runs it, and running it."""

from __future__ import annotations

import signal
import subprocess
import sys

from launch.job import THIS_ACCELERATE, Job, arguments, launch_words

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
    start = " ".join([*words, "--quiet", '"${command[@]}"', "&"])
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


def submit(text: str) -> int:
    """Run the script in a session of its own, and hand it the signals that come here. Returns its exit code."""
    process = subprocess.Popen(["bash", "-c", text, "recipes"], start_new_session=sys.platform == "linux")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, frame: process.send_signal(received))
    return process.wait()
