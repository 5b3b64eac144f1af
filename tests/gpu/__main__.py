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
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch.doctor.machine import driver
from launch.host.files import write_whole
from launch.output.record import code, cpu, versions
from recipes.run import hardware
from tests.gpu.cases import OK, OUT_OF_MEMORY, Case, all_cases, gpu_count, measured

NOT_RUN = "not run: budget"


class Results:
    """FOLDER/HARDWARE.json and .md: the machine, the newest call and a row for each case.

    Each is written again with every row, so that nothing is lost when a lease ends.
    """

    def __init__(self, folder: Path, cases: Sequence[Case], rehearse: bool) -> None:
        found = "CPU rehearsal" if rehearse else str(hardware.read())
        self.cases, self.file = cases, folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', found)}.json"
        before = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.rows: dict[str, dict[str, Any]] = before.get("rows", {})
        self.machine = {"hardware": found, "cpu": cpu(), "driver": driver()[0], "versions": versions(), "code": code()}
        self.machine["command"] = shlex.join(["python", "-m", "tests.gpu", *sys.argv[1:]])
        self.machine["time"] = datetime.now(UTC).isoformat(timespec="seconds")

    def add(self, name: str, row: dict[str, Any]) -> None:
        self.rows[name] = row
        write_whole(self.file, json.dumps({**self.machine, "rows": self.rows}, indent=1).encode())
        self.file.with_suffix(".md").write_text(self.tables())

    def tables(self) -> str:
        """Markdown: the machine and the command, then a table for each group of cases."""
        machine = self.machine
        known = [f"{name} {version}" for name, version in machine["versions"].items() if version]
        parts = [f"{', '.join([machine['hardware'], *known])}\n\n`{machine['command']}`, {machine['time']}"]
        for group in dict.fromkeys(case.group for case in self.cases):
            rows = {case.name: self.rows.get(case.name, {}) for case in self.cases if case.group == group}
            columns = list(dict.fromkeys(name for row in rows.values() for name in row.get("figures", {})))
            lines = [[group, *columns, "status", "seconds"], ["---"] * (3 + len(columns))]
            lines += [_cells(name, row, columns) for name, row in rows.items()]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        return "\n\n".join(parts) + "\n"


def _cells(name: str, row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    figures = [row.get("figures", {}).get(column) for column in columns]
    shown = ["" if one is None else f"{one:,.4g}" if isinstance(one, float) else str(one) for one in figures]
    return [name, *shown, row.get("status", NOT_RUN).replace("|", "/"), f"{row.get('seconds', 0):.0f}"]


def run_cases(results: Results, rehearse: bool, end: float) -> None:
    """Run the cases without figures until `end` on the monotonic clock."""
    with tempfile.TemporaryDirectory() as work:
        for number, case in enumerate(results.cases, 1):
            left = end - time.monotonic()
            if results.rows.get(case.name, {}).get("status") in (OK, OUT_OF_MEMORY) or case.seconds > left:
                continue
            deadline = 900 if rehearse else 60 + 3 * case.seconds  # other processes may use the same cores
            row = measured(case.name, Path(work), rehearse, min(left, deadline))
            results.add(case.name, row)
            print(f"{number}/{len(results.cases)}  {case.name}: {row['status']}, {row['seconds']:.0f} s", flush=True)


def main() -> int:
    """Returns 0, 1 if a case failed, 2 without a GPU, 130 if interrupted."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=(__doc__ or "").splitlines()[0])
    help_text = "end within this time; what does not fit is listed as not run [no limit]"
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help=help_text)
    where = "[tests/gpu/results; of a rehearsal outputs/gpu]"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=where)
    parser.add_argument("--rehearse", action="store_true", help="every case with a tiny model, on a CPU")
    options, began = parser.parse_args(), time.monotonic()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not hardware.read().cuda:
        print("there is no GPU here; --rehearse runs every case with a tiny model on a CPU", file=sys.stderr)
        return 2
    folder = options.output or Path("outputs/gpu" if options.rehearse else "tests/gpu/results")
    results = Results(folder.resolve(), all_cases(options.rehearse, gpu_count()), options.rehearse)
    try:
        run_cases(results, options.rehearse, began + options.budget)
    except KeyboardInterrupt:
        return 130
    finally:
        print(f"\n{results.tables()}\n{results.file}")
    return int(any(row["status"].startswith("failed") for row in results.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
