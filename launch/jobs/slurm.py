"""The target `slurm`: the sbatch script of a job, handing it to sbatch, asking Slurm about it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launch.host.launcher import LAUNCHER
from launch.host.secrets import without_secrets
from launch.jobs import container, tail
from launch.jobs.job import (
    ASSUMED_GPU,
    Job,
    Node,
    arguments,
    launch_command,
    preflight_command,
    quoted,
    refuse_fresh,
)
from launch.jobs.slurm_flags import Slurm, ignored, require_valid
from launch.output.submission import Submission, announce
from launch.terminal import console, print_problems
from recipes.errors import UserError, mistake
from recipes.run.files import expanded
from recipes.run.hardware import Hardware
from recipes.run.hardware import read as read_hardware

HELP = "a Slurm cluster, through sbatch"
WRITES_HERE = True  # the nodes and this machine share a disk
STAGE: Callable[[Job, Path], Path] | None = None
FLAGS: type = Slurm

_DIRECTIVES = "partition account qos time gpus_per_node cpus_per_task mem constraint reservation".split()

# sbatch lets its own arguments win over the script's. srun on too few nodes only warns, and the run
# would wait for the others; the jobs of an array would write into one folder.
_AS_WRITTEN = """\
if [ -n "${{SLURM_ARRAY_JOB_ID-}}" ] || [ "${{SLURM_JOB_NUM_NODES-{nodes}}}" != {nodes} ]; then
    echo "this script is one run with --nodes {nodes}: submit it without --array and without another --nodes" >&2
    exit 2
fi"""

_HEAD_NODE = """\
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=$(scontrol show node -o "$head_node" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
"""

_WAIT = """\
step=$!
told=no
tell() { scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null; }  # the steps, not this script
trap 'told=yes; tell' USR1  # from Slurm before the time limit, to this script alone
trap tell TERM

code=0
while kill -0 "$step" 2>/dev/null; do  # a signal ends `wait` before its process
    wait "$step" && code=0 || code=$?
done
((code == 0)) && exit 0

job=$(scontrol show job "$SLURM_JOB_ID")
case $job in *PreemptTime=[0-9]*) told=yes ;; esac
case $job in *JobState=CANCELLED*) told=no ;; esac
restarts=${SLURM_RESTART_COUNT:-0}
if [ "$told" = yes ] && ((restarts < max_restarts)); then
    echo "told to stop: requeued, restart $((restarts + 1)) of $max_restarts" >&2
    trap - USR1 TERM
    scontrol requeue "$SLURM_JOB_ID" && sleep 600  # until Slurm ends this script
fi
exit "$code"
"""


def node(slurm: Slurm, processes: int | None) -> Node:
    """A node of the cluster, which cannot be looked at from here: its GPUs are assumed.

    Raises `UserError` for flags that Slurm would refuse.
    """
    require_valid(slurm)
    processes = processes or max(1, slurm.gpus)
    hardware = Hardware((ASSUMED_GPU,) * slurm.gpus, slurm.cpus_per_task or processes, liger=read_hardware().liger)
    return Node(hardware, processes, frozenset() if slurm.prepares else None)


def render(job: Job, slurm: Slurm) -> str:
    """An sbatch script: one task per node, which calls `accelerate launch` with the node's rank."""
    refuse_fresh(job, "another --output_dir")
    name = slurm.job_name or job.run.recipe.name
    if not re.fullmatch(r"[\w.,:@+=-]+", name):  # the name of the log too: / is a folder there and % a pattern
        raise mistake("job_name", f"{name!r} cannot name a log", "letters, digits and .,:@+=-")
    directives = {"job-name": name, "output": "%x-%j.log", "nodes": job.nodes, "ntasks-per-node": 1}
    directives |= {key.replace("_", "-"): getattr(slurm, key) for key in _DIRECTIVES if getattr(slurm, key)}
    directives |= {"signal": f"B:USR1@{slurm.signal_seconds}", "open-mode": "append"}
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={_plain(key, value)}" for key, value in directives.items())]
    lines += [f"#SBATCH --{'requeue' if slurm.max_restarts else 'no-requeue'}", "", f"# {job.title}"]
    lines += [*_prepared(slurm), "set -uo pipefail", f"max_restarts={slurm.max_restarts}"]
    lines += [f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(30, slurm.signal_seconds - 10)}"]
    lines += [_AS_WRITTEN.format(nodes=job.nodes), "", _HEAD_NODE.rstrip(), "", *arguments(job), ""]
    lines += [*(container.lines(job, slurm) if slurm.container_image else []), *_step(job, slurm), _WAIT.rstrip()]
    return "\n".join(lines) + "\n"


def _prepared(slurm: Slurm) -> list[str]:
    """Before `set -u`: what modules and environments run reads variables that may not be set."""
    lines = [f"module load {' '.join(quoted(slurm.module))} || exit 1"] if slurm.module else []
    if slurm.venv and not slurm.container_image:
        activate = expanded(slurm.venv) / "bin" / "activate"
        lines.append(f"source {quoted([str(activate)])[0]} || exit 1")
    return lines


def _step(job: Job, slurm: Slurm) -> list[str]:
    """The srun command. It runs in the background, so that bash handles signals while it waits.

    The launcher is ours on every node. accelerate's own dies of SIGUSR1, and with a single process
    of SIGTERM too: Slurm then kills the rank, which has not saved yet.
    """
    python = "python3" if slurm.prepares else sys.executable
    launcher = launch_command(job, [python, str(LAUNCHER)], '"$SLURM_NODEID"', '"$MASTER_ADDR"', '"$MASTER_PORT"')
    preflight = preflight_command(job, python, '"$SLURM_NODEID"', '"$MASTER_ADDR"', '"$((MASTER_PORT - 10000))"')
    inner = quoted([" ".join([*preflight, "exec", *launcher])])[0]
    options = [f"--nodes={job.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=60", "--label"]
    if slurm.cpus_per_task:
        options.insert(2, f"--cpus-per-task={slurm.cpus_per_task}")  # srun has not inherited it since 22.05
    inside = '"${container[@]}" ' if slurm.container_image else ""
    home = "$home; " if slurm.container_image else ""
    return [
        f"launcher={inner}",
        "# One word: srun reads a lone : among its own as the start of another job.",
        f"srun {' '.join(options)} \\",
        f'    {inside}bash -c "{home}$launcher$(printf \' %q\' "${{command[@]}}")" &',
    ]


def _plain(key: str, value: object) -> str:
    """A directive's value. sbatch expands nothing in it, and reads up to the first blank."""
    text = str(value)
    if re.fullmatch(r"[\w.,:/@%+=&|*()\[\]-]+", text):
        return text
    what = f"{text!r} holds characters that an #SBATCH line cannot have"
    raise mistake(key.replace("-", "_"), what, "letters, digits and .,:/@%+=-")


def check(text: str, job: Job, slurm: Slurm) -> None:
    without_secrets(text)
    advice = list(ignored(slurm))
    if advice:
        print_problems(advice, console(stderr=True))


def submit(text: str, job: Job, slurm: Slurm) -> int:
    job_id = sbatch(text)
    log = Path.cwd() / f"{slurm.job_name or job.run.recipe.name}-{job_id}.log"  # as `--output=%x-%j.log` says
    submission = Submission("slurm", job.title, str(log), job_id)
    announce(job.folder, submission, {"log": str(log)}, cancel=f"scancel {job_id}")
    return 0


def sbatch(text: str) -> str:
    """Hand the script to sbatch. Returns the job id.

    Raises `UserError` with Slurm's own message if it refuses.
    """
    if shutil.which("sbatch") is None:
        raise mistake("slurm", "there is no sbatch on this machine", "a login node, or --dry_run and sbatch by hand")
    # sbatch reads SBATCH_* variables too, and they would win over the script that was shown.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}
    done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]
    raise _refused(done.stderr)


_OTHERWISE = "correct what it names, or ask from a login node of the cluster"


def _refused(output: str) -> UserError:
    message = " ".join(re.sub(r"(sbatch|scontrol): error:", "", output).split())
    fixes = {
        "partition": "--partition with one that `sinfo` lists",
        "account": "--account with one of yours",
        "qos": "--qos with one of yours",
        "contact slurm controller": "wait for the controller: `scontrol ping` says whether it answers",
        "feature": "--constraint with features that `sinfo -o %f` lists",
        "reservation": "--reservation with one that `scontrol show reservation` lists",
        "memory": "--mem with no more MB than `sinfo -o %m` lists",
        "time limit": "--time with no more than `sinfo -o '%P %l'` lists",
        "generic resource": "GPUs that `sinfo -o %G` lists, or no --gpus_per_node",
        "configuration is not available": "fewer nodes, GPUs or CPUs: `sinfo` shows what there is",
    }
    fix = next((fix for word, fix in fixes.items() if word in message.lower()), _OTHERWISE)
    return mistake("slurm", f"Slurm says: {message or 'nothing'}", fix)


# --- A job that was submitted ---------------------------------------------------------------------


def state(submission: Submission) -> str:
    """What Slurm says of a job: `PENDING (Resources)`, `RUNNING`, ...

    Empty once Slurm has forgotten the job, some minutes after its end.
    Raises `UserError` if Slurm cannot be asked.
    """
    if shutil.which("scontrol") is None:
        raise mistake("slurm", "there is no scontrol on this machine", "ask from a login node of the cluster")
    words = ["scontrol", "show", "job", "-o", submission.job]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        raise _refused(done.stderr)
    fields = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    waits = fields.get("JobState") == "PENDING" and fields.get("Reason", "None") != "None"
    return f"PENDING ({fields['Reason']})" if waits else fields.get("JobState", "")


def is_over(state: str) -> bool:
    waiting_or_running = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED")
    return state.partition(" ")[0] not in waiting_or_running


def print_log(submission: Submission, folder: Path, following: bool) -> None:
    """Slurm is asked every ten seconds only: its controller serves many users."""
    tail.print_log(Path(submission.log), folder, following, lambda: state(submission), is_over, ask_every=10)


def last_line(submission: Submission) -> str:
    return tail.last_line(Path(submission.log))
