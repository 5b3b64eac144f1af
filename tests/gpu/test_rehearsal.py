"""`python -m tests.gpu`: its cases, with tiny models on this CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.gpu.__main__ import FIGURES
from tests.gpu.cases import all_cases
from tests.gpu.results import NOT_RUN, OK, Results
from tests.support.running import ROOT


def rehearse(output: Path, *flags: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tests.gpu", "--rehearse", "--output", str(output), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["doctor", "speed", "memory"])
def test_a_case_of_the_group_works_on_this_cpu(group, tmp_path):
    case = next(case for case in all_cases(rehearse=True) if case.group == group)
    command = [sys.executable, "-m", "tests.gpu", "--rehearse", "--case", case.name, "--work", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = json.loads((tmp_path / FIGURES).read_text())
    assert (done.returncode, found["status"]) == (0, OK) and found["figures"], done.stdout + done.stderr


def test_a_case_that_has_figures_is_not_run_again(tmp_path):
    cases = all_cases(rehearse=True)
    for case in cases:
        Results(tmp_path, "", "", cases, rehearse=True).add(case.name, {"status": OK})
    done = rehearse(tmp_path)
    assert done.returncode == 0 and NOT_RUN not in done.stdout


def test_what_the_budget_does_not_hold_is_listed_as_not_run(tmp_path):
    done = rehearse(tmp_path, "--budget", "10")
    assert done.returncode == 0 and done.stdout.count(NOT_RUN) == len(all_cases(rehearse=True))


SLEEP = "setsid sleep 600.417 & setsid bash -c 'sleep 600.417' & sleep 600.417"
ALONE = f"""
import sys
from pathlib import Path

become_subreaper()
sys.exit(run_alone(["bash", "-c", {SLEEP!r}], Path(sys.argv[1]), 2, {{}}) is None)
"""


def test_a_case_over_its_deadline_is_killed_with_all_that_it_started(tmp_path):
    """Also what has a session of its own, as under a launcher."""
    done = subprocess.run([sys.executable, "-c", ALONE, str(tmp_path / "log")], cwd=ROOT)
    left = [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "600.417"]]
    assert (done.returncode, left) == (1, [])


@pytest.mark.parametrize(("rehearse", "gpus"), [(False, 1), (False, 8), (True, 1)])
def test_the_cases_have_names_of_their_own(rehearse, gpus):
    names = [case.name for case in all_cases(rehearse, gpus)]
    assert len({*names}) == len(names)


def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", "--output", str(tmp_path / "out")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "--rehearse" in done.stderr and not (tmp_path / "out").exists()
