"""A private Slurm cluster of two nodes on this machine, without root and munge, for one test."""

import getpass
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from launch.host.processes import free_port
from tests.support.running import Outcome, run
from tests.support.waiting import PATIENCE, wait_for

T = TypeVar("T")

_CONF = """\
ClusterName=recipes
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={control}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
FirstJobId={first_job}
MpiDefault=none
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


_INSTALLED = all(map(shutil.which, ("slurmctld", "slurmd")))
# In CI it must be there: a missing daemon then fails the tests.
NEEDS_SLURM = pytest.mark.skipif(
    not _INSTALLED and not os.environ.get("CI"), reason="needs Debian's slurmctld, slurmd and slurm-client"
)


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
            try:
                os.kill(int(file.read_text()), signal.SIGTERM)
            except (ProcessLookupError, ValueError):
                continue

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
