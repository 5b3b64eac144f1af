"""`recipes doctor` with real ranks. Faults between them are in test_faults.py."""

import json
import os
import signal
import subprocess

import psutil
import pytest

from launch.cli import main
from tests.support.doctor import DOCTOR
from tests.support.running import ROOT, python
from tests.support.waiting import PATIENCE, wait_for


def test_the_doctor_passes_every_check_on_a_healthy_machine(capsys):
    code, printed = main(["doctor", "--json", "--num_processes", "2"]), capsys.readouterr().out
    assert code == 0, printed
    healthy = {check["title"]: check for check in json.loads(printed)["checks"]}
    machines = ["versions", "GPUs", "limits", "RAM", "disk", "/dev/shm", "CPU cores", "compiler"]
    ranks = ["gloo", "rendezvous", "connection", "bandwidth", "matrices"]
    assert list(healthy) == [*machines, "loopback", *ranks]
    assert healthy["bandwidth"]["numbers"]["all-reduce"]["value"] > 0


@pytest.mark.slow
def test_an_interrupted_doctor_leaves_no_rank_behind(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with psutil.Popen([*DOCTOR, "--num_processes", "2"], stdout=subprocess.DEVNULL, env=environment) as process:
        wait_for("a rank that has started", lambda: list(tmp_path.glob("recipes-*/1/answer.json")))
        ranks = process.children()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert len(ranks) == 2 and not any(rank.is_running() for rank in ranks)


def test_the_doctor_reports_a_torch_import_error_as_a_failed_check(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart is missing')")
    search = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python(*DOCTOR[1:], "--num_processes", "1", PYTHONPATH=search, PYTHONIOENCODING="utf-8")
    assert (done.returncode, done.stderr) == (1, "")
    assert "✗ torch: rank 0: ImportError: libcudart is missing" in done.stdout
