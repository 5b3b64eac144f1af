"""The judge of the doctor: what it takes for a fault that was named, and one that is made."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.campaigns.doctor.faults import Fault
from tests.campaigns.doctor.trial import NAMESPACES, Outcome
from tests.support.running import ROOT

FAULT = Fault("loopback down", "", "loopback", "is down", "ip link set")


def outcome(**changed: str) -> Outcome:
    check = {"status": "error", "title": "loopback", "found": "lo is down", "fix": "`ip link set lo up`"}
    return Outcome(1, 0.5, [{**check, **changed}], "")


def test_a_fault_is_named_by_its_title_what_is_wrong_and_the_fix_together():
    assert outcome().named(FAULT)
    others = ({"title": "rendezvous"}, {"found": "is up"}, {"fix": "run it again"}, {"status": "warning"})
    assert not any(outcome(**other).named(FAULT) for other in others)


def can_make() -> bool:
    if sys.platform != "linux" or shutil.which("gcc") is None:
        return False
    return subprocess.run([*NAMESPACES, "ip link set lo up"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_make(), reason="faults are made as root, in namespaces, with gcc")
@pytest.mark.skipif("+cpu" not in version("torch"), reason="one fault is a torch without CUDA")
@pytest.mark.parametrize(
    ("faults", "count"),
    [
        ("^CPU-only torch|^loopback", 4),
        pytest.param("wrong interface|once|absent|between nodes|/dev/shm", 10, marks=pytest.mark.slow),
    ],
)
def test_faults_that_are_made_are_named_and_mended(faults, count):
    command = [sys.executable, "-m", "tests.campaigns.doctor", "--fault", faults]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert f"{count} faults: {count} named in time" in done.stdout, done.stdout + done.stderr
