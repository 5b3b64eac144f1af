"""Measure everything that needs a GPU, the most valuable cases first.

    python -m tests.gpu [--budget SECONDS] [--output FOLDER] [--rehearse]

Each case runs in its own process, with a deadline. As soon as it ends, its row is added to
FOLDER/results.jsonl and the tables in FOLDER/results.md are written again. The same command
continues where it stopped: finished cases are skipped, failed cases are retried once. `--budget 0`
starts nothing and prints the tables. `--rehearse` runs every case with a tiny model on a CPU: it
shows that the scripts work, and its figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from recipes.run import hardware
from tests.gpu import machine
from tests.gpu.case import log_of
from tests.gpu.cases import Case, all_cases
from tests.gpu.processes import adopt_orphans, run_alone
from tests.gpu.results import LATE, NOT_RUN, Results, Row

TO_END = 5  # seconds of the budget that are kept for killing a case and writing the tables
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


def main() -> int:
    """Returns 0, 1 if a case failed, 2 for a mistake of the user's, 130 if interrupted."""
    started = time.monotonic()
    options = _parser().parse_args()
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not hardware.read().cuda:
        return _mistaken("there is no GPU here; --rehearse runs every case with a tiny model on a CPU")
    folder = options.output.resolve()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    results, now = Results(folder), machine.describe(options.rehearse)
    if results.call and results.call["machine"]["hardware"] != now["hardware"]:
        there = f"{results.file} holds results of {results.call['machine']['hardware']}, not {now['hardware']}"
        return _mistaken(f"{there}: choose another --output")
    print(machine.in_words(now), flush=True)
    command = shlex.join(["python", "-m", "tests.gpu", *sys.argv[1:]])
    results.add({"machine": now, "command": command, "time": datetime.now(UTC).isoformat(timespec="seconds")})
    return _measure(results, options.rehearse, started + options.budget - TO_END)


def _measure(results: Results, rehearse: bool, end: float) -> int:
    """Run the cases until `end` on the monotonic clock, print the tables, return the exit code."""
    gpus = max(1, len(hardware.read().gpus))
    cases = all_cases(rehearse, gpus)

    def start(case: Case, seconds: float) -> int | None:
        words = [sys.executable, "-m", "tests.gpu.case", case.name, "--output", str(results.folder)]
        words += ["--gpus", str(gpus), *["--rehearse"] * rehearse]
        return run_alone(words, log_of(results.folder, case.name), seconds, QUIET | stand_in())

    adopt_orphans()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_cases(cases, results, start, lambda: end - time.monotonic())
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {results.file}", file=sys.stderr)
        return 130
    finally:
        print(f"\n{results.write_tables(cases)}")
    return int(any(failed(results.last[case.name]) for case in cases))


def stand_in() -> dict[str, str]:
    """Variables with which cases find a stand-in for `datasets` where that is missing."""
    if find_spec("datasets"):
        return {}
    search = [str(Path(__file__).parent / "stand_in"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, search))}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    help_text = "end within this time; what does not fit is listed as not run [no limit]"
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help=help_text)
    parser.add_argument("--output", type=Path, default=Path("outputs/gpu"), metavar="FOLDER", help="[outputs/gpu]")
    parser.add_argument("--rehearse", action="store_true", help="every case with a tiny model, on a CPU")
    return parser


def _mistaken(words: str) -> int:
    print(words, file=sys.stderr)
    return 2


def run_cases(
    cases: Sequence[Case],
    results: Results,
    start: Callable[[Case, float], int | None],
    left: Callable[[], float],
) -> None:
    """Run the cases that have not finished yet, and add a row for each.

    `start` runs a case for at most the given seconds and returns its exit code, None if it was
    killed then. `left` returns the seconds that are left of the budget.
    """
    for number, case in enumerate(cases, 1):
        before = results.last.get(case.name)
        attempt = next_attempt(case, before)
        if not attempt:
            continue
        row = {"case": case.name, "attempt": attempt, **_run_case(case, results.folder, start, left())}
        if row["status"] == NOT_RUN and before:
            continue  # the earlier row says why the case failed, which is worth more
        results.add(row)
        results.write_tables(cases)
        print(f"{number}/{len(cases)}  {case.name}: {row['status']}, {row['seconds']:.0f} s", flush=True)


def next_attempt(case: Case, row: Row | None) -> int:
    """The number of the next attempt, given the newest row of a case; 0 if it is not run again."""
    if row is None or row["status"] == NOT_RUN:
        return 1
    if row["status"].startswith("missing: "):
        packages = row["status"].removeprefix("missing: ").split(", ")
        return int(all(find_spec(package) for package in packages))
    return 2 if failed(row) and row["attempt"] == 1 else 0


def failed(row: Row) -> bool:
    return row["status"].startswith(("failed", LATE))


def _run_case(case: Case, folder: Path, start: Callable[[Case, float], int | None], left: float) -> Row:
    """Status, seconds and figures of one case, run now if its packages and the time are there."""
    missing = [package for package in case.needs if find_spec(package) is None]
    if missing:
        return {"status": f"missing: {', '.join(missing)}", "seconds": 0.0}
    if case.seconds > left:
        return {"status": NOT_RUN, "seconds": 0.0}
    log = log_of(folder, case.name)
    log.with_suffix(".json").unlink(missing_ok=True)
    began = time.monotonic()
    code = start(case, min(left, case.deadline))
    seconds = round(time.monotonic() - began, 1)
    if code is None:
        late = f"{LATE} of {case.deadline} s" if case.deadline <= left else NOT_RUN
        return {"status": late, "seconds": seconds}
    return {"seconds": seconds, **_left_by(log, code)}


def _left_by(log: Path, code: int) -> Row:
    """Status and figures from the file that a case wrote; from its log if it died before that."""
    try:
        return json.loads(log.with_suffix(".json").read_text())
    except (OSError, ValueError):
        lines = log.read_text(errors="replace").strip().splitlines()
        return {"status": f"failed: exit code {code}: {lines[-1][:160] if lines else 'no output'}"}


if __name__ == "__main__":
    sys.exit(main())
