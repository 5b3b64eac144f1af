"""Ranks whose launcher has ended: they save and end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.host.test_preemption import ENDLESS, assert_resumable
from tests.launch.host.test_processes import alive
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
(folder / "rank").write_text(f"{os.getpid()}\\n")
if what == "late":
    while not (folder / "go").exists():
        time.sleep(0.05)
stop = StopRequest()
stop.listen()
try:
    end_with_launcher()
    stop.defer()
    (folder / "ready").touch()
    while not stop.signal:
        time.sleep(0.05)
    print("saved by", stop.signal, flush=True)
except Preempted as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("what", "name", "printed"),
    [
        ("running", "torchrun", "saved by SIGTERM\n"),
        ("late", "torchrun", "told to stop by SIGTERM\n"),  # before the rank looks for it
        ("running", "shell", None),  # which may exit and leave the run in the background
    ],
)
def test_a_rank_stops_when_torchrun_ends_but_not_when_a_shell_ends(what, name, printed, tmp_path):
    (tmp_path / name).write_text(LAUNCHER)
    (tmp_path / "rank.py").write_text(RANK)
    words = [sys.executable, str(tmp_path / name), str(tmp_path / "rank.py"), str(tmp_path), what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "1"}
    log, started = tmp_path / "log", tmp_path / "rank"
    with log.open("wb") as stream:
        launcher = subprocess.Popen(words, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        wait_for("the rank", lambda: started.exists() and started.read_text().endswith("\n"))
        rank = int(started.read_text())
        wait_for("its loop", lambda: what == "late" or (tmp_path / "ready").exists())
        launcher.kill()
        launcher.wait()
        (tmp_path / "go").touch()
        if printed is None:
            time.sleep(3)
            assert alive(rank) and not log.read_text()
        else:
            wait_for("its end", lambda: not alive(rank))
            assert log.read_text() == printed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "number"), [(ONE_PROCESS, signal.SIGKILL), (TWO_RANKS, signal.SIGKILL), (TWO_RANKS, signal.SIGUSR1)]
)
def test_ranks_save_a_checkpoint_when_accelerate_launch_is_killed(start, number, tiny_model, texts, tmp_path):
    """It dies of SIGUSR1 at once."""
    with start([*model_flags(tiny_model, texts), *ENDLESS], tmp_path) as run:
        run.wait_for_output("step 5/")
        os.kill(run.process.pid, number)
        output = run.end()
    # Rank 0 speaks for both. Rank 1 may have seen it first.
    assert re.search("told to stop by (SIGTERM|another rank) at step", output), output
    assert run.process.returncode == -number
    assert assert_resumable(tmp_path) >= 5
