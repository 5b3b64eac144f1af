"""A job for Slurm: the sbatch script, and handing it to sbatch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.jobs.job import THIS_ACCELERATE, Job, arguments, launch_words, preflight_words, quoted
from recipes.errors import UserError, mistake


@dataclass(frozen=True)
class Slurm:
    """What a cluster asks for, under Slurm's own names. `module` and `venv` prepare the environment of the job."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    gpus_per_node: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    job_name: str | None = None
    module: tuple[str, ...] = ()
    venv: str | None = None
    container_image: str | None = None
    signal_seconds: int = 120
    max_restarts: int = 10

    @property
    def prepares(self) -> bool:
        """Whether the nodes have an installation of their own. Else this interpreter runs there, from a shared disk."""
        return bool(self.venv or self.module or self.container_image)


_DIRECTIVES = "partition account qos time gpus_per_node cpus_per_task mem constraint reservation".split()

_HEAD_NODE = """\
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=$(scontrol show node -o "$head_node" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
"""

_WAIT = """\
step=$!
told=no
tell() { scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null; }  # the steps, not this script
trap 'told=yes; tell' USR1  # Slurm's word, before the time limit, to this script alone
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


def render(job: Job, slurm: Slurm) -> str:
    """An sbatch script: one task a node, `accelerate launch` in each, the node's rank expanded on the node."""
    name = slurm.job_name or job.run.recipe.name
    if not re.fullmatch(r"[\w.,:@+=-]+", name):  # it names the log, where / is a folder and % a pattern
        raise mistake("job_name", f"{name!r} cannot name a log", "letters, digits and .,:@+=-")
    directives = {"job-name": name, "output": "%x-%j.log", "nodes": job.nodes, "ntasks-per-node": 1}
    directives |= {key.replace("_", "-"): getattr(slurm, key) for key in _DIRECTIVES if getattr(slurm, key)}
    directives |= {"signal": f"B:USR1@{slurm.signal_seconds}", "open-mode": "append"}
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={_plain(key, value)}" for key, value in directives.items())]
    lines += ["#SBATCH --requeue", "", f"# {job.title}", "set -uo pipefail", f"max_restarts={slurm.max_restarts}"]
    lines += [f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(30, slurm.signal_seconds - 10)}"]
    lines += _prepared(slurm)
    lines += ["", _HEAD_NODE.rstrip(), "", *arguments(job), ""]
    lines += [*_step(job, slurm), _WAIT.rstrip()]
    return "\n".join(lines) + "\n"


def _prepared(slurm: Slurm) -> list[str]:
    lines = [f"module load {' '.join(quoted(slurm.module))} || exit 1"] if slurm.module else []
    if slurm.venv:
        activate = Path(slurm.venv).expanduser() / "bin" / "activate"
        lines.append(f"source {quoted([str(activate)])[0]} || exit 1")
    return lines


def _step(job: Job, slurm: Slurm) -> list[str]:
    """The srun command. It runs in the background, so that this script hears signals while it waits."""
    accelerate = ["accelerate", "launch"] if slurm.prepares else THIS_ACCELERATE
    launcher = launch_words(job, accelerate, '"$SLURM_NODEID"', '"$MASTER_ADDR"', '"$MASTER_PORT"')
    python = "python3" if slurm.prepares else sys.executable
    preflight = preflight_words(job, python, '"$SLURM_NODEID"', '"$MASTER_ADDR"', '"$((MASTER_PORT - 10000))"')
    inner = quoted([" ".join([*preflight, "exec", *launcher])])[0]
    options = [f"--nodes={job.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--wait=60", "--label"]
    if slurm.cpus_per_task:
        options.insert(2, f"--cpus-per-task={slurm.cpus_per_task}")  # srun has not inherited it since 22.05
    if slurm.container_image:
        options.append(f"--container-image={quoted([slurm.container_image])[0]}")
    return [
        f"launcher={inner}",
        "# One word: srun reads a lone : among its own as the start of another job.",
        f"srun {' '.join(options)} \\",
        '    bash -c "$launcher$(printf \' %q\' "${command[@]}")" &',
    ]


def _plain(key: str, value: object) -> str:
    """A directive's value. sbatch expands nothing there, and reads up to a blank."""
    text = str(value)
    if re.fullmatch(r"[\w.,:/@%+=&|*()\[\]-]+", text):
        return text
    raise mistake(key.replace("-", "_"), f"{text!r} cannot stand in an #SBATCH line", "letters, digits and .,:/@%+=-")


def submit(text: str) -> str:
    """Hand the script to sbatch. Returns the job id. Raises `UserError` with Slurm's own words where it refuses."""
    if shutil.which("sbatch") is None:
        raise mistake("slurm", "there is no sbatch on this machine", "a login node, or --dry_run and sbatch by hand")
    # sbatch reads SBATCH_* variables too, and they would win over the script that was shown.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}
    done = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return done.stdout.strip().partition(";")[0]
    raise _refused(done.stderr)


def _refused(words: str) -> UserError:
    said = " ".join(re.sub(r"(sbatch|scontrol): error:", "", words).split())
    fixes = {
        "partition": "--partition with one that `sinfo` lists",
        "account": "--account with one of yours",
        "qos": "--qos with one of yours",
        "contact slurm controller": "wait for the controller: `scontrol ping` says whether it answers",
        "configuration is not available": "fewer nodes, GPUs or CPUs: `sinfo` shows what there is",
    }
    fix = next((fix for word, fix in fixes.items() if word in said.lower()), "")
    return mistake("slurm", f"Slurm says: {said or 'nothing'}", fix)


def log_path(job: Job, slurm: Slurm, job_id: str) -> Path:
    """Where the job writes, as `--output=%x-%j.log` says."""
    return Path.cwd() / f"{slurm.job_name or job.run.recipe.name}-{job_id}.log"


def state(job_id: str) -> str:
    """What Slurm says of a job: `PENDING (Resources)`, `RUNNING`, ...; empty when it has forgotten it, after minutes.

    Raises `UserError` where Slurm cannot be asked.
    """
    if shutil.which("scontrol") is None:
        raise mistake("slurm", "there is no scontrol on this machine", "ask from a login node of the cluster")
    done = subprocess.run(["scontrol", "show", "job", "-o", job_id], capture_output=True, text=True)
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        raise _refused(done.stderr)
    said = dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)
    waits = said.get("JobState") == "PENDING" and said.get("Reason", "None") != "None"
    return f"PENDING ({said['Reason']})" if waits else said.get("JobState", "")


def going_on(state: str) -> bool:
    """Whether the job is still to run, or running."""
    return state.partition(" ")[0] in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED")
