"""Measure everything that needs a GPU, the most valuable cases first, and print the tables.

    python -m tests.gpu [--budget SECONDS] [--output FOLDER] [--rehearse]

Each case runs in its own process, with a deadline. As soon as it ends, its figures are in the
machine's .json in tests/gpu/results/, with hardware, versions and command, and the tables beside
it. The same command continues where it stopped: what has figures is not measured again.
`--budget 0` starts nothing and prints the tables. `--rehearse` runs every case with a tiny model on
a CPU: it shows that the scripts work, and its figures say nothing about a GPU.

A machine without network gets wheels beside the checkout: `pip download --only-binary=:all:
--platform ... --python-version ... -c constraints.txt` of accelerate, bitsandbytes, datasets,
deepspeed, liger-kernel, peft, rich and scikit-learn, with what these require and its image lacks.
`pytest -m gpu tests/gpu` asserts there what only a GPU can show.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil

from launch.host.memory import ran_out
from launch.host.processes import start
from launch.host.signals import end_with_parent
from recipes.run import hardware
from tests.gpu.cases import Case, Setup, all_cases
from tests.gpu.results import NOT_RUN, OK, OUT_OF_MEMORY, Results

TO_END = 5  # seconds of the budget that are kept for killing a case and writing the tables
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
FIGURES = "figures.json"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main() -> int:
    """Returns 0, 1 if a case failed, 2 without a GPU, 130 if interrupted."""
    end = time.monotonic() - TO_END
    options = _parser().parse_args()
    gpus = max(1, len(hardware.read().gpus))
    cases = all_cases(options.rehearse, gpus)
    if options.case:
        (case,) = (case for case in cases if case.name == options.case)
        return measure_here(case, Setup(options.work, options.rehearse))
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not hardware.read().cuda:
        print("there is no GPU here; --rehearse runs every case with a tiny model on a CPU", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "tests.gpu", *sys.argv[1:]])
    now = datetime.now(UTC).isoformat(timespec="seconds")
    folder = options.output or Path("outputs/gpu" if options.rehearse else "tests/gpu/results")
    results = Results(folder.resolve(), command, now, cases, options.rehearse)
    become_subreaper()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory() as work:
            run_cases(cases, results, Path(work), options.rehearse, end + options.budget)
    except KeyboardInterrupt:
        return 130
    finally:
        print(f"\n{results.tables()}\n{results.file}")
    return int(any(row["status"].startswith("failed") for row in results.rows.values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    help_text = "end within this time; what does not fit is listed as not run [no limit]"
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help=help_text)
    where = "[tests/gpu/results; of a rehearsal outputs/gpu]"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=where)
    parser.add_argument("--rehearse", action="store_true", help="every case with a tiny model, on a CPU")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one of them, in this process
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    return parser


def run_cases(cases: Sequence[Case], results: Results, work: Path, rehearse: bool, end: float) -> None:
    """Run the cases without figures until `end` on the monotonic clock."""
    for number, case in enumerate(cases, 1):
        left = end - time.monotonic()
        if results.rows.get(case.name, {}).get("status") in (OK, OUT_OF_MEMORY) or case.seconds > left:
            continue
        words = [sys.executable, "-m", "tests.gpu", "--case", case.name, "--work", str(work)]
        deadline = 900 if rehearse else 60 + 3 * case.seconds  # other processes may use the same cores
        began, log = time.monotonic(), work / "log"
        (work / FIGURES).unlink(missing_ok=True)
        code = run_alone([*words, *["--rehearse"] * rehearse], log, min(left, deadline), QUIET)
        row = {"seconds": round(time.monotonic() - began, 1), **_left_by(case, work, code, left < deadline)}
        if row["status"].startswith("failed"):
            row["log"] = log.read_text(errors="replace")[-4000:]
        results.add(case.name, row)
        print(f"{number}/{len(cases)}  {case.name}: {row['status']}, {row['seconds']:.0f} s", flush=True)


def _left_by(case: Case, work: Path, code: int | None, budget_ended: bool) -> dict:
    """Status and figures of a case: from its file, or why it wrote none."""
    if (work / FIGURES).exists():
        return json.loads((work / FIGURES).read_text())
    if code is None:
        return {"status": NOT_RUN if budget_ended else "failed: over its deadline"}
    return {"status": f"failed: exit code {code}"}


def measure_here(case: Case, setup: Setup) -> int:
    """Measure one case in this process, which prints a log and leaves a file."""
    end_with_parent()
    try:
        found = {"status": OK, "figures": case.measure(setup)}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        why = f"failed: {lines[-1][:160] if lines else type(error).__name__}"
        found = {"status": OUT_OF_MEMORY if ran_out(error) else why}
    (setup.folder / FIGURES).write_text(json.dumps(found))
    return int(found["status"] != OK)


# --- Processes ------------------------------------------------------------------------------------


def become_subreaper() -> None:
    """Become the parent of any descendant whose own parent dies, so that it can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def run_alone(command: Sequence[str], log: Path, deadline: float, env: Mapping[str, str]) -> int | None:
    """The exit code of a command, None if it was killed after `deadline` seconds.

    At the end all descendants of this process are killed: launchers start their own groups, and
    what is left on a GPU changes the figures of the next case.
    """
    with log.open("wb") as stream:
        try:
            return start([*command], stream, {**os.environ, **env}).wait(deadline)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_all_below()


def _kill_all_below() -> None:
    for _ in range(5):  # not forever: a process that waits for a broken driver cannot be killed
        below = psutil.Process().children(recursive=True)
        for process in below:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, timeout=2)


if __name__ == "__main__":
    sys.exit(main())
