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

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import repeat
from pathlib import Path
from typing import Any

from launch.doctor.machine import driver
from launch.host.files import write_whole
from launch.output.record import code, cpu, versions
from recipes.errors import UserError
from recipes.run import hardware, known_gpus
from tests.gpu.cases import OK, OUT_OF_MEMORY, Case, Figures, all_cases, measured
from tests.gpu.memory import compared

NOT_RUN = "not run: budget"
AT_ONCE = 3  # more compete for the cores while they compile


class Results:
    """FOLDER/HARDWARE.json and .md: the machine, the newest call and a row for each case.

    Each is written again with every row, so that nothing is lost when a lease ends.
    """

    def __init__(self, folder: Path, cases: Sequence[Case], rehearse: bool, card: str = "") -> None:
        found = "CPU rehearsal" if rehearse else card or str(hardware.read())
        self.cases, self.file = cases, folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', found)}.json"
        self.lock = threading.Lock()
        before = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.rows: dict[str, dict[str, Any]] = before.get("rows", {})
        self.machine = {"hardware": found, "cpu": cpu(), "driver": driver()[0], "versions": versions(), "code": code()}
        self.machine["command"] = shlex.join(["python", "-m", "tests.gpu", *sys.argv[1:]])
        self.machine["time"] = datetime.now(UTC).isoformat(timespec="seconds")
        if card and before:  # a plan says nothing about the machine that measured
            self.machine = {name: value for name, value in before.items() if name != "rows"}

    def add(self, name: str, row: dict[str, Any]) -> None:
        with self.lock:
            self.rows[name] = {**self.rows.get(name, {}), **row}
            write_whole(self.file, json.dumps({**self.machine, "rows": self.rows}, indent=1).encode())
            self.file.with_suffix(".md").write_text(self.tables())

    def tables(self) -> str:
        """Markdown: the machine and the command, then a table for each group of cases."""
        machine = self.machine
        known = [f"{name} {version}" for name, version in machine["versions"].items() if version]
        parts = [f"{', '.join([machine['hardware'], *known])}\n\n`{machine['command']}`, {machine['time']}"]
        for group in dict.fromkeys(case.group for case in self.cases):
            rows = {case.name: self.rows.get(case.name, {}) for case in self.cases if case.group == group}
            figures = {name: _figures(row) for name, row in rows.items()}
            columns = list(dict.fromkeys(column for row in figures.values() for column in row))
            lines = [[group, *columns, "status", "seconds"], ["---"] * (3 + len(columns))]
            for name, row in rows.items():
                status = row.get("status", NOT_RUN).replace("|", "/")
                lines.append([name, *_cells(figures[name], columns), status, f"{row.get('seconds', 0):.0f}"])
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return "\n\n".join(parts) + "\n"


def _figures(row: Figures) -> Figures:
    """What was measured, for memory beside what was planned."""
    found = {name: value for name, value in row.get("figures", {}).items() if not isinstance(value, list)}
    return compared(row["planned"], found) if found and "planned" in row else found


def _cells(figures: Figures, columns: Sequence[str]) -> list[str]:
    values = [figures.get(column) for column in columns]
    return ["" if one is None else f"{one:,.4g}" if isinstance(one, float) else str(one) for one in values]


def run_cases(results: Results, chosen: Sequence[Case], rehearse: bool, end: float) -> None:
    """Run the cases without figures until `end` on the monotonic clock, as many at once as the
    GPU's memory holds.
    """
    gpus, room = hardware.read().gpus, threading.Condition()
    whole = free = 0.9 * gpus[0].memory_bytes / 2**30 if gpus else 0.0

    def run(case: Case, work: Path) -> None:
        nonlocal free
        before = results.rows.get(case.name, {})
        size = min(whole, before.get("planned", {}).get("planned process GiB", case.gib))
        with room:
            room.wait_for(lambda: free >= size)
            free -= size
        left = end - time.monotonic()
        if before.get("status") not in (OK, OUT_OF_MEMORY) and case.seconds < left:
            deadline = 900 if rehearse else 60 + 3 * case.seconds  # other processes may use the same cores
            row = measured(case.name, work, rehearse, min(left, deadline))
            if rehearse and case.plan and "figures" in row:
                row["planned"] = case.plan("")
            results.add(case.name, row)
            print(f"{case.name}: {row['status']}, {row['seconds']:.0f} s", flush=True)
        with room:
            free += size
            room.notify_all()

    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(1 if rehearse else AT_ONCE) as pool:
        list(pool.map(run, chosen, repeat(Path(work))))


def plan(results: Results, chosen: Sequence[Case], card: str) -> None:
    """Add the plans to the results of this machine, such as "1 x NVIDIA H200"."""
    for case in chosen:
        if case.plan and "planned" not in results.rows.get(case.name, {}):
            results.add(case.name, {"planned": case.plan(card.split(" x ")[-1])})


def main() -> int:
    """Returns 0, 1 if a case failed, 2 without a GPU, 130 if interrupted."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    help_text = "end within this time; what does not fit is listed as not run [no limit]"
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help=help_text)
    where = "[tests/gpu/results; of a rehearsal outputs/gpu]"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=where)
    help_text = "the cases whose names this finds [all]"
    parser.add_argument("--only", default="", metavar="REGEX", help=help_text)
    help_text = "add the plans of memory to the results of such a machine, for example '1 x NVIDIA H200'; needs no GPU"
    parser.add_argument("--plan", default="", metavar="MACHINE", help=help_text)
    parser.add_argument("--rehearse", action="store_true", help="every case with a tiny model, on a CPU")
    options, began = parser.parse_args(), time.monotonic()
    try:
        only, _ = re.compile(options.only), options.plan and known_gpus.find(options.plan.split(" x ")[-1])
    except (re.error, UserError) as error:
        parser.error(str(error))
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # which leaves CUDA to the forked processes
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not hardware.read().cuda and not options.plan:
        print("there is no GPU here; --rehearse runs every case with a tiny model on a CPU", file=sys.stderr)
        return 2
    folder = options.output or Path("outputs/gpu" if options.rehearse else "tests/gpu/results")
    results = Results(folder.resolve(), all_cases(options.rehearse), options.rehearse, options.plan)
    chosen = [case for case in results.cases if only.search(case.name)]
    try:
        if options.plan:
            plan(results, chosen, options.plan)
        else:
            run_cases(results, chosen, options.rehearse, began + options.budget)
    except KeyboardInterrupt:
        return 130
    finally:
        print(f"\n{results.tables()}\n{results.file}")
    return int(any(row.get("status", "").startswith("failed") for row in results.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
