"""`python -m tests.gpu`: which cases run, and which are skipped, retried or killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from zlib import crc32

import psutil
import pytest

from tests.gpu.__main__ import next_attempt
from tests.gpu.case import status_of
from tests.gpu.cases import Case, Setup, all_cases
from tests.gpu.commands import material
from tests.gpu.results import LATE, NOT_RUN, OUT_OF_MEMORY, Results, tables
from tests.support.running import ROOT, model_flags, run

# Runs the cases given as NAME=COMMAND: a name ends with the expected seconds.
SCRIPT = """
import sys, time
from pathlib import Path
from tests.gpu.__main__ import run_cases
from tests.gpu.case import log_of
from tests.gpu.cases import Case
from tests.gpu.processes import adopt_orphans, run_alone
from tests.gpu.results import Results

folder, budget, deadline = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
(folder / "logs").mkdir(exist_ok=True)
words = dict(word.split("=", 1) for word in sys.argv[4:])
cases = []
for name in words:
    cases.append(Case("doctor", name, int(name.split()[1]), deadline if "long" in name else 300, None))
started = time.monotonic()

def start(case, seconds):
    log = log_of(folder, case.name)
    return run_alone(["bash", "-c", words[case.name].replace("RESULT", str(log.with_suffix(".json")))], log, seconds)

adopt_orphans()
run_cases(cases, Results(folder), start, lambda: budget - (time.monotonic() - started))
"""
FINE = """echo '{"status": "ok", "figures": {"checks": 3}}' > RESULT"""


def run_script(folder: Path, *cases: str, budget: float = 1000, deadline: int = 300) -> dict:
    """The newest row of each case, after a call with these cases, given as NAME=COMMAND."""
    command = [sys.executable, "-c", SCRIPT, str(folder), str(budget), str(deadline), *cases]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return Results(folder).last


def forever(folder: Path) -> str:
    """Start three processes that do not end. Two have their own sessions, as under a launcher."""
    sleep = f"sleep {_unique(folder)}"
    return f"setsid {sleep} & setsid bash -c '{sleep}' & {sleep}"


def sleepers(folder: Path) -> int:
    """How many processes of `forever` are there."""
    wanted = ["sleep", _unique(folder)]
    return sum(process.info["cmdline"] == wanted for process in psutil.process_iter(["cmdline"]))


def _unique(folder: Path) -> str:
    """Seconds that no other test sleeps: another worker may run one at the same time."""
    return f"600.{crc32(str(folder).encode())}"


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


# --- One call ------------------------------------------------------------------------------------


def test_each_case_leaves_a_row_and_a_table(tmp_path):
    rows = run_script(tmp_path, f"good 1={FINE}", "bad 1=echo first; echo last >&2; exit 3")
    assert (rows["good 1"]["status"], rows["good 1"]["figures"]) == ("ok", {"checks": 3})
    assert rows["bad 1"]["status"] == "failed: exit code 3: last"
    table = (tmp_path / "results.md").read_text()
    assert "| good 1 | 3 |" in table and "failed: exit code 3: last" in table


@pytest.mark.slow
def test_a_case_over_its_deadline_is_killed_with_all_that_it_started(tmp_path):
    rows = run_script(tmp_path, f"long 1={forever(tmp_path)}", f"next 1={FINE}", deadline=5)
    assert rows["long 1"]["status"].startswith(LATE) and rows["next 1"]["status"] == "ok"
    assert sleepers(tmp_path) == 0


def test_what_does_not_fit_into_the_budget_is_not_started(tmp_path):
    rows = run_script(tmp_path, f"short 1={FINE}", f"long 500={FINE}", f"other 1={FINE}", budget=300)
    assert [row["status"] for row in rows.values()] == ["ok", NOT_RUN, "ok"]
    assert "| long 500 |" in (tmp_path / "results.md").read_text()


@pytest.mark.slow
def test_the_budget_ends_a_case_that_takes_longer_than_expected(tmp_path):
    rows = run_script(tmp_path, f"long 1={forever(tmp_path)}", budget=5)
    assert rows["long 1"]["status"] == NOT_RUN
    assert sleepers(tmp_path) == 0


def test_an_interrupt_keeps_what_was_written_and_leaves_no_process(tmp_path):
    words = [f"good 1={FINE}", f"long 1={forever(tmp_path)}"]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "1000", "300", *words]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while sleepers(tmp_path) < 3:
        assert time.monotonic() < limit, "waited for the second case to start its processes"
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    assert sleepers(tmp_path) == 0 and [row["case"] for row in lines_of(tmp_path)] == ["good 1"]


# --- The next call -------------------------------------------------------------------------------


def test_the_next_call_keeps_what_is_done_and_tries_once_more_what_failed(tmp_path):
    cases = (f"good 1={FINE}", "bad 1=exit 1")
    run_script(tmp_path, *cases)
    rows = run_script(tmp_path, *cases)
    assert (len(lines_of(tmp_path)), rows["bad 1"]["attempt"]) == (3, 2)
    assert "failed: exit code 1: no output (attempt 2)" in (tmp_path / "results.md").read_text()
    run_script(tmp_path, *cases)
    assert len(lines_of(tmp_path)) == 3


def test_a_line_that_was_cut_off_is_run_again(tmp_path):
    run_script(tmp_path, f"good 1={FINE}")
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text()[:20])
    assert run_script(tmp_path, f"good 1={FINE}")["good 1"]["status"] == "ok"


@pytest.mark.parametrize(
    ("status", "attempt"),
    [
        ("ok", 0),
        (OUT_OF_MEMORY, 0),
        ("failed: it is broken", 2),
        (f"{LATE} of 90 s", 2),
        (NOT_RUN, 1),
        ("missing: no_such_package_here", 0),
        ("missing: json", 1),
    ],
)
def test_what_is_tried_again(status, attempt):
    row = {"case": "one", "status": status, "attempt": 1}
    assert next_attempt(Case("doctor", "one", 1, 90, None), row) == attempt


# --- Statuses, tables and cases ------------------------------------------------------------------


def test_a_status_says_why():
    assert status_of(ModuleNotFoundError("no", name="datasets.table")) == "missing: datasets"
    assert status_of(ModuleNotFoundError("no", name="launch.nowhere")) == "failed: no"
    assert status_of(MemoryError()) == OUT_OF_MEMORY
    assert status_of(RuntimeError("first\nlast")) == "failed: last"
    assert status_of(RuntimeError()) == "failed: RuntimeError"


def test_a_table_shows_each_figure_and_states_the_machine():
    cases = [Case("speed", name, 1, 90, None) for name in ("loop", "fast", "standard")]
    figures = {"tokens_per_second": 12345.6, "mfu": 0.4567, "allocated_gib": 1.234}
    rows = {"loop": {"case": "loop", "status": "ok", "seconds": 12.3, "figures": figures}}
    rows["fast"] = {"case": "fast", "status": "failed: a|b", "seconds": 1, "figures": {}, "attempt": 2}
    call = {"machine": {"hardware": "1 x H100", "torch": "2.11"}, "command": "python -m tests.gpu", "time": "today"}
    text = tables(cases, rows, call)
    assert text.startswith("1 x H100, torch 2.11\n\n`python -m tests.gpu`, today\n")
    assert "| loop | 12,346 | 45.7% |  |  | 1.23 |  | ok | 12 |" in text
    assert "| fast |  |  |  |  |  |  | failed: a/b (attempt 2) | 1 |" in text
    assert "| standard |  |  |  |  |  |  | not run |  |" in text


@pytest.mark.parametrize(("rehearse", "gpus"), [(False, 1), (False, 8), (True, 1)])
def test_the_cases_have_names_of_their_own_in_the_order_of_their_worth(rehearse, gpus):
    cases = all_cases(rehearse, gpus)
    assert len({case.name for case in cases}) == len(cases)
    groups = list(dict.fromkeys(case.group for case in cases))
    assert groups == ["doctor", "speed", "memory", "parts of a step", "fit"]
    assert sum(case.group == "memory" for case in cases) == 20


def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path):
    command = [sys.executable, "-m", "tests.gpu", "--output", str(tmp_path / "out")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "--rehearse" in done.stderr
    assert not (tmp_path / "out").exists()


def test_train_py_trains_with_the_stand_in_of_a_machine_without_datasets(tmp_path):
    setup = Setup(tmp_path / "gpu", rehearse=True)
    (setup.folder / "work").mkdir(parents=True)
    model, data = material(setup, "tiny", [64] * 16)
    output, path = tmp_path / "out", os.pathsep.join([str(ROOT / "tests" / "gpu" / "stand_in"), str(ROOT)])
    flags = [*model_flags(model, data), "--max_steps", "1", "--output_dir", str(output)]
    outcome = run([sys.executable, str(ROOT / "launch" / "train.py"), *flags], output, {"PYTHONPATH": path})
    assert (outcome.code, outcome.record.get("status")) == (0, "finished"), outcome.output
