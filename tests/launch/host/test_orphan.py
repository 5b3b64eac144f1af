"""Ranks whose launcher has ended: they save and end, and a rank that cannot says so and ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.host.signals import EXIT_CODE
from tests.launch.host.test_preemption import ENDLESS, assert_resumable
from tests.support.running import ROOT, model_flags
from tests.support.stopping import ONE_PROCESS, TWO_RANKS
from tests.support.waiting import wait_for

# Starts the rank and waits. What it is called makes it a launcher, or not.
LAUNCHER = """\
import os, subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()
"""
RANK = """\
import os, signal, sys, time
from pathlib import Path
from launch.host.launcher import end_with_launcher
from launch.host.signals import Preempted, StopRequest

folder, what = Path(sys.argv[1]), sys.argv[2]
(folder / "rank").write_text(str(os.getpid()))
if what == "late":
    while not (folder / "go").exists():
        time.sleep(0.05)
stop = StopRequest()
stop.listen()
try:
    end_with_launcher(stop, rank=1)
    if what == "late":
        time.sleep(600)
    stop.step = 7
    stop.defer(patience=2)
    (folder / "ready").touch()
    while what == "stuck" or not stop.stop_requested:
        time.sleep(0.05)
    (folder / "saved").write_text(stop.signal)
except Preempted as error:
    (folder / "ended").write_text(str(error))
"""


class Family:
    """A launcher with one rank, which both end with the test."""

    def __init__(self, folder: Path, what: str, name: str = "torchrun") -> None:
        self.folder = folder
        (folder / name).write_text(LAUNCHER)
        (folder / "rank.py").write_text(RANK)
        words = [sys.executable, str(folder / name), str(folder / "rank.py"), str(folder), what]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "1"}
        self.log = (folder / "log").open("wb")
        self.launcher = subprocess.Popen(
            words, env=environment, stdout=self.log, stderr=self.log, start_new_session=True
        )
        wait_for("the rank", lambda: self.has("rank") and (folder / "rank").read_text())
        self.rank = int((folder / "rank").read_text())

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for pid in (self.rank, self.launcher.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.launcher.wait()

    def kill_launcher(self) -> None:
        self.launcher.kill()
        self.launcher.wait()


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped by SIGSTOP"])
def test_a_rank_stops_when_its_launcher_ends(stopped, tmp_path):
    with Family(tmp_path, "train") as family:
        wait_for("its loop", lambda: family.has("ready"))
        if stopped:
            os.kill(family.rank, signal.SIGSTOP)
        family.kill_launcher()
        wait_for("its end", lambda: not is_there(family.rank))
        assert (tmp_path / "saved").read_text() == "the end of its launcher"


def test_a_launcher_may_end_before_its_rank_looks_for_it(tmp_path):
    with Family(tmp_path, "late") as family:
        family.kill_launcher()
        (tmp_path / "go").touch()
        wait_for("its end", lambda: not is_there(family.rank))
        assert (tmp_path / "ended").read_text() == "told to stop by the end of its launcher"


def test_a_rank_that_is_stuck_says_so_and_ends(tmp_path):
    with Family(tmp_path, "stuck") as family:
        wait_for("its loop", lambda: family.has("ready"))
        family.kill_launcher()
        wait_for("its end", lambda: not is_there(family.rank))
        said = "rank 1: the launcher has ended, and nothing after step 7 within 2 s (ddp_timeout)"
        assert said in (tmp_path / "log").read_text() and not family.has("saved")


def test_a_shell_may_exit_and_leave_the_run_in_the_background(tmp_path):
    with Family(tmp_path, "train", name="shell") as family:
        wait_for("its loop", lambda: family.has("ready"))
        family.kill_launcher()
        time.sleep(3)
        assert is_there(family.rank) and not family.has("saved")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
@pytest.mark.parametrize("start", [ONE_PROCESS, TWO_RANKS], ids=["one process", "two ranks"])
def test_ranks_of_accelerates_launcher_save_when_it_dies(start, number, tiny_model, texts, tmp_path):
    """It dies of SIGUSR1 at once."""
    with start([*model_flags(tiny_model, texts), *ENDLESS], tmp_path) as run:
        run.wait_for_output("step 5/")
        os.kill(run.process.pid, number)
        output = run.end()
    # Rank 0 speaks for both. Rank 1 may have seen it first.
    assert re.search("told to stop by (the end of its launcher|another rank) at step", output), output
    assert run.process.returncode == -number != EXIT_CODE
    assert assert_resumable(tmp_path) >= 5
