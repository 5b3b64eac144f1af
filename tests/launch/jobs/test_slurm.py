"""Runs on a real Slurm: a private cluster of two nodes, started here, used as a user would.

Apptainer is not installed here: a stand-in runs the command on the PATH of an image.
"""

import contextlib
import getpass
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch.host.processes import free_port
from tests.support.running import Outcome, losses, read_record, run, train_here
from tests.support.slow_model import write_model_with
from tests.support.waiting import PATIENCE, T, wait_for

_INSTALLED = all(map(shutil.which, ("slurmctld", "slurmd")))
# In CI it must be there: a missing daemon then fails the tests.
pytestmark = pytest.mark.skipif(
    not _INSTALLED and not os.environ.get("CI"), reason="needs Debian's slurmctld, slurmd and slurm-client"
)

STEPS = "--learning_rate 1e-3 --logging_steps 1 --save_steps 1000 --max_length 64".split()
APPTAINER = """\
#!/bin/bash
echo "$*" >> {site}/note
while [[ $1 != *.sif ]]; do shift; done
shift
PATH={site}/image:/usr/bin:/bin exec "$@"
"""
_CONF = """\
ClusterName=recipes
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
FirstJobId={first_job}
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PlugStackConfig=/dev/null
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MessageTimeout=60  # above KillWait: the signal that ends a step, sent again, would end the next start of its job
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={first} CPUs={cpus} Gres=gpu:a100:2 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={second} CPUs={cpus} Gres=gpu:a100:2 State=UNKNOWN
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE OverSubscribe=NO
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE OverSubscribe=NO
"""


# --- The cluster ----------------------------------------------------------------------------------


class Cluster:
    """Two nodes; jobs in the partition `high` preempt those in `low`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir(parents=True)
        control, first, second = (free_port() for _ in range(3))
        # A job's number becomes its port: two clusters on one machine must not count alike.
        numbers = {"first_job": random.randrange(1, 20000), "cpus": os.cpu_count()}
        ports = {"control": control, "first": first, "second": second}
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, user=getpass.getuser(), **numbers, **ports))
        # GPUs that nobody can use: Slurm only counts the devices.
        devices = (f"NodeName=n1,n2 Name=gpu Type=a100 File={file}\n" for file in ("/dev/null", "/dev/zero"))
        (folder / "gres.conf").write_text("".join(devices))
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        self.run("slurmctld", "-c")
        # One core per node, which its jobs inherit: threads of two nodes on the same cores would
        # mostly wait for each other, the more the busier the machine is.
        for node, core in zip(("n1", "n2"), itertools.cycle(range(os.cpu_count() or 1)), strict=False):
            self.run("taskset", "--cpu-list", str(core), "slurmd", "-N", node)
        states = ("sinfo", "-h", "-N", "-p", "low", "-o", "%T")
        self.wait_until("two idle nodes", lambda: self.run(*states).split() == ["idle"] * 2)

    def stop(self) -> None:
        for file in self.folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGTERM)

    def run(self, *words: str) -> str:
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, (words, done.stderr, self.logs())
        return done.stdout

    def wait_for(self, job_id: str, *states: str) -> str:
        """The first of these states that the job reaches."""

        def reached() -> str:
            words = self.run("scontrol", "show", "job", job_id, "-o").split()
            state = next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))
            return state if state in states else ""

        return self.wait_until(f"job {job_id} to be {' or '.join(states)}", reached)

    def wait_for_step(self, folder: Path, step: int) -> None:
        self.wait_until(f"step {step} in the log", lambda: f"step {step}/" in log(folder))

    def wait_until(self, what: str, happened: Callable[[], T]) -> T:
        try:
            return wait_for(what, happened)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from None

    def logs(self) -> str:
        return "\n".join(file.read_text()[-2000:] for file in self.folder.glob("*.log"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    cluster.start()
    yield cluster
    cluster.stop()


# --- What a user does on it -----------------------------------------------------------------------


def recipes(cluster: Cluster, folder: Path, *words: str, **variables: str) -> Outcome:
    """The outcome of the `recipes` command in `folder`, with more variables of the environment."""
    return run([sys.executable, "-m", "launch", *words], folder, {**cluster.environment, **variables}, folder)


def submit(cluster: Cluster, folder: Path, *words: str, **variables: str) -> tuple[str, Outcome]:
    """The id of a job that `recipes submit slurm` submitted from `folder`, and the outcome."""
    outcome = recipes(cluster, folder, "submit", "slurm", "--recipe", "standard", *words, **variables)
    found = re.search(r"submitted job (\d+)", outcome.output)
    return found.group(1) if found else "", outcome


def log(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.glob("*.log"))


def write_slow_model(folder: Path, tiny_model: Path, seconds: float, restarts: int = 100) -> list[str]:
    """The tiny model with a pause in it, until Slurm has requeued it `restarts` times.

    Returns the flags to load it.
    """
    when = f'int(os.environ.get("SLURM_RESTART_COUNT", 0)) < {restarts}'
    return write_model_with(f"time.sleep({seconds} if {when} else 0)", folder, tiny_model)


@pytest.fixture(scope="module")
def slow_flags(tiny_model, texts, tmp_path_factory):
    """40 steps of a second each, when two nodes share the global batch."""
    model = write_slow_model(tmp_path_factory.mktemp("slow") / "model", tiny_model, 0.5)
    return [*model, "--dataset_name", str(texts), *STEPS, "--max_steps", "40", "--output_dir", "run"]


def ranks_in(folder) -> list[int]:
    """The processes of train.py whose current folder this is, by the time they started."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "create_time", "environ"]):
        info = process.info
        if info["cwd"] == str(folder) and "LOCAL_RANK" in (info["environ"] or {}):
            found.append((info["create_time"], process.pid))
    return [pid for _, pid in sorted(found)]


def finished(folder) -> Outcome:
    record = read_record(folder / "run")
    assert (record["status"], record["world_size"]) == ("finished", 2), log(folder)
    return Outcome(0, log(folder), record)


# --- Preempted by a job of higher priority, and requeued, also in containers ----------------------


@pytest.fixture(scope="module", params=["", "/images/training.sif"])
def preempted(request, cluster, slow_flags, tmp_path_factory):
    """A run of two nodes: its folder and submission. With a container, the site file names it."""
    site = tmp_path_factory.mktemp("site")
    variables = {"XDG_CONFIG_HOME": str(site), "HF_HOME": f"{site}/hf"}
    if request.param:
        for name in ("bin", "image", "mine", "accelerate-recipes"):
            (site / name).mkdir()
        (site / "bin" / "apptainer").write_text(APPTAINER.format(site=site))
        (site / "image" / "python3").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
        for tool in ("bin/apptainer", "image/python3"):
            (site / tool).chmod(0o755)
        variables["PATH"] = f"{site}/bin:{os.environ['PATH']}"
        flags = {"partition": "low", "container_image": request.param, "container_mounts": str(site / "mine")}
        (site / "accelerate-recipes" / "site.yaml").write_text(json.dumps({"slurm": flags}))
    (site / "work").mkdir()
    words = ["--nodes", "2", "--time", "1:00:00", "--", *slow_flags]
    job, outcome = submit(cluster, site / "work", *words, **variables)
    cluster.wait_for_step(site / "work", 5)
    cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3")
    assert cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", log(site / "work")
    assert not request.param or f"{site}/mine:{site}/mine" in (site / "note").read_text()
    return site / "work", outcome


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, texts, tmp_path_factory):
    """40 steps in one process, never stopped."""
    return train_here(tiny_model, texts, tmp_path_factory.mktemp("whole"), *STEPS[:-2], "--max_steps", "40")


@pytest.mark.slow
def test_a_preempted_slurm_job_is_requeued_and_has_the_losses_of_an_uninterrupted_process(preempted, uninterrupted):
    folder, submitted = preempted
    assert losses(finished(folder)) == pytest.approx(losses(uninterrupted), rel=1e-4)
    text = log(folder)
    assert "told to stop by SIGTERM at step" in text and "resuming from" in text
    assert "scancel " in submitted.output and str(next(folder.glob("standard-*.log"))) in submitted.output


@pytest.mark.slow
def test_a_slurm_job_is_requeued_at_each_time_limit_until_training_is_finished(cluster, tiny_model, texts, tmp_path):
    # Slurm's shortest limit is a minute: at most 9 steps of 6 seconds; the third start is quick.
    model = write_slow_model(tmp_path / "slow", tiny_model, 3.0, restarts=2)
    flags = [*model, "--dataset_name", str(texts), *STEPS, "--max_steps", "20", "--output_dir", str(tmp_path / "run")]
    limits = "--nodes 2 --time 1 --signal_seconds 5 --max_restarts 20".split()
    job, _ = submit(cluster, tmp_path, *limits, "--", *flags)
    assert cluster.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT") == "COMPLETED", log(tmp_path)
    assert log(tmp_path).count("requeueing, restart") >= 2
    whole = train_here(tiny_model, texts, tmp_path / "whole", *STEPS[:-2], "--max_steps", "20")
    assert losses(finished(tmp_path)) == pytest.approx(losses(whole), rel=1e-4)


# --- Ended in other ways --------------------------------------------------------------------------


@pytest.mark.slow
def test_status_and_logs_follow_a_slurm_job_until_scancel_after_which_it_is_not_requeued(cluster, slow_flags, tmp_path):
    job, submitted = submit(cluster, tmp_path, "--nodes", "2", "--", *slow_flags)
    second, refused = submit(cluster, tmp_path, "--", *slow_flags)
    assert (second, refused.code) == ("", 2)
    assert f"job {job} is writing to run" in refused.output
    cluster.wait_for_step(tmp_path, 3)
    running = recipes(cluster, tmp_path, "status", "run").output
    assert "recipes logs -f run" in submitted.output
    assert f"slurm {job}" in running and "RUNNING" in running and "step" in running
    cluster.run("scancel", job)
    assert "told to stop by SIGTERM at step" in recipes(cluster, tmp_path, "logs", "-f", "run").output
    assert "CANCELLED, preempted" in recipes(cluster, tmp_path, "status", "run").output
    assert cluster.wait_for(job, "COMPLETED", "CANCELLED") == "CANCELLED"
    assert "requeued" not in log(tmp_path)


@pytest.mark.slow
def test_a_killed_rank_ends_the_slurm_job_on_every_node(cluster, slow_flags, tmp_path):
    """Otherwise the other node would wait for it in a collective, for half an hour and more."""
    job, _ = submit(cluster, tmp_path, "--nodes", "2", "--", *slow_flags)
    cluster.wait_for_step(tmp_path, 3)
    os.kill(ranks_in(tmp_path)[1], signal.SIGKILL)
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "FAILED", log(tmp_path)
    assert "requeued" not in log(tmp_path) and "step 40/" not in log(tmp_path)
    cluster.wait_until("the end of the other rank", lambda: not ranks_in(tmp_path))


def test_a_job_that_slurm_refuses_is_reported_with_slurms_own_message(cluster, tmp_path):
    job, outcome = submit(cluster, tmp_path, "--partition", "nowhere")
    assert (job, outcome.code) == ("", 2)
    assert "Slurm reports: " in outcome.output and "invalid partition specified: nowhere" in outcome.output
