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
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from launch.doctor.machine import driver
from launch.host.files import write_whole
from launch.host.memory import ran_out
from launch.host.processes import start
from launch.host.signals import end_with_parent
from launch.output.record import code, cpu, versions
from recipes.run import hardware
from tests.gpu import memory, trainings

OK, OUT_OF_MEMORY, NOT_RUN = "ok", "out of memory", "not run: budget"
TO_END = 5  # seconds of the budget that are kept for killing a case and writing the tables
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
FIGURES = "figures.json"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

# --- The cases ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One measurement, which is expected to take `seconds`. `measure` gets a folder for models and
    outputs, and whether it is a rehearsal; it returns figures by their names.
    """

    group: str
    name: str
    seconds: int
    measure: Callable[[Path, bool], dict[str, Any]]


# Flags of `recipes train` by the name of a case. All sequences have one length: none needs packing.
RECIPES = {
    "baseline": "--recipe baseline",
    "standard": "--recipe standard",
    "fast": "--recipe fast",
    "memory": "--recipe memory",
    "fast, 8-bit Adam": "--recipe fast --optim adamw_bnb_8bit",
}
VARIANTS = {
    "fast, no compile": "--recipe fast --torch_compile false",
    "fast, micro 16": "--recipe fast --per_device_train_batch_size 16",
    "fast, checkpointing": "--recipe fast --gradient_checkpointing",
}
LORA = "--recipe fast --use_peft --dtype bfloat16 --gradient_checkpointing"
SHARED = ("standard", "fast", "sharded")  # measured on all GPUs too


def all_cases(rehearse: bool, gpus: int = 1) -> list[Case]:
    """The cases for a machine with this number of GPUs, or those of the rehearsal.

    Seconds are guesses for an H100, with imports and compilation.
    """

    def recipe(size: str, name: str, flags: str, seconds: int = 120) -> Case:
        return Case("speed", f"{size} {name}", seconds, partial(trainings.recipe, size, flags.split()))

    sizes, small, large = (["tiny"], "tiny", "tiny") if rehearse else (["0.5B", "1.2B"], "0.5B", "7B")
    cases = [Case("doctor", "doctor", 60, trainings.doctor)]
    for size in sizes:
        cases += [
            Case("speed", f"{size} loop", 40, partial(trainings.loop, size, False)),
            Case("speed", f"{size} loop, compiled", 100, partial(trainings.loop, size, True)),
            Case("speed", f"{size} Trainer's defaults", 120, partial(trainings.plain_trainer, size)),
            *(recipe(size, name, flags) for name, flags in RECIPES.items()),
        ]
    return [
        *cases,
        recipe(large, "LoRA", LORA, 240),
        *(Case("memory", str(case), 50, partial(memory.measure, case)) for case in memory.cases(rehearse)),
        Case("fit", "largest micro-batch by --fit", 150, trainings.fit),
        Case("fit", "out of memory, --on_oom next", 150, trainings.out_of_memory),
        *(recipe(small, name, flags) for name, flags in VARIANTS.items()),
        *(
            recipe("0.5B", f"{name}, {gpus} GPUs", f"--recipe {name} --num_processes {gpus}")
            for name in SHARED
            if gpus > 1
        ),
    ]


# --- The tables -----------------------------------------------------------------------------------

# One table for each group of cases: heading, name of the figure and format of each column.
COLUMNS: dict[str, list[tuple[str, str, str]]] = {
    "doctor": [("checks", "checks", ""), ("not ok", "wrong", ""), ("matrix product", "matrices", "")],
    "speed": [("tokens/s", "tokens_per_second", ",.0f"), ("MFU", "mfu", ".1%"), ("step ms", "step_ms", ",.1f"),
              ("peak GiB", "peak_gib", ".2f"), ("start s", "start_s", ".1f"), ("parts of a step, ms", "parts", "")],
    "memory": [("planned GiB", "planned_gib", ".4g"), ("allocated GiB", "allocated_gib", ".4g"),
               ("reserved GiB", "reserved_gib", ".4g"), ("difference", "difference", "+.1%"),
               ("holds with the margin", "holds", ""), ("note", "not_planned", "")],
    "fit": [("micro-batch", "micro_batch", ""), ("accumulation", "accumulation", ""),
            ("peak GiB", "peak_gib", ".2f"), ("planned GiB", "planned_gib", ".2f"), ("tried", "tried", "")],
}  # fmt: skip


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
        for group, columns in COLUMNS.items():
            heads = [group, *(heading for heading, _, _ in columns), "status", "seconds"]
            rows = [self._cells(case, columns) for case in self.cases if case.group == group]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *rows]))
        return "\n\n".join(parts) + "\n"

    def _cells(self, case: Case, columns: Sequence[tuple[str, str, str]]) -> list[str]:
        row = self.rows.get(case.name, {"status": NOT_RUN})
        figures = [row.get("figures", {}).get(name) for _, name, _ in columns]
        shown = ["" if value is None else format(value, kind[2]) for value, kind in zip(figures, columns, strict=True)]
        return [case.name, *shown, row["status"].replace("|", "/"), format(row.get("seconds", 0), ".0f")]


# --- Running --------------------------------------------------------------------------------------


def main() -> int:
    """Returns 0, 1 if a case failed, 2 without a GPU, 130 if interrupted."""
    end = time.monotonic() - TO_END
    options = _parser().parse_args()
    cases = all_cases(options.rehearse, max(1, len(hardware.read().gpus)))
    if options.case:
        (case,) = (case for case in cases if case.name == options.case)
        return measure_here(case, options.work, options.rehearse)
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not hardware.read().cuda:
        print("there is no GPU here; --rehearse runs every case with a tiny model on a CPU", file=sys.stderr)
        return 2
    folder = options.output or Path("outputs/gpu" if options.rehearse else "tests/gpu/results")
    results = Results(folder.resolve(), cases, options.rehearse)
    become_subreaper()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory() as work:
            run_cases(results, Path(work), options.rehearse, end + options.budget)
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


def run_cases(results: Results, work: Path, rehearse: bool, end: float) -> None:
    """Run the cases without figures until `end` on the monotonic clock."""
    for number, case in enumerate(results.cases, 1):
        left = end - time.monotonic()
        if results.rows.get(case.name, {}).get("status") in (OK, OUT_OF_MEMORY) or case.seconds > left:
            continue
        words = [sys.executable, "-m", "tests.gpu", "--case", case.name, "--work", str(work)]
        deadline = 900 if rehearse else 60 + 3 * case.seconds  # other processes may use the same cores
        began, log, figures = time.monotonic(), work / "log", work / FIGURES
        figures.unlink(missing_ok=True)
        code = run_alone([*words, *["--rehearse"] * rehearse], log, min(left, deadline))
        row: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
        if figures.exists():
            row |= json.loads(figures.read_text())
        elif code is None:
            row["status"] = NOT_RUN if left < deadline else "failed: over its deadline"
        else:
            row["status"] = f"failed: exit code {code}"
        if row["status"].startswith("failed"):
            row["log"] = log.read_text(errors="replace")[-4000:]
        results.add(case.name, row)
        print(f"{number}/{len(results.cases)}  {case.name}: {row['status']}, {row['seconds']:.0f} s", flush=True)


def measure_here(case: Case, work: Path, rehearse: bool) -> int:
    """Measure one case in this process, which prints a log and leaves a file."""
    end_with_parent()
    try:
        found = {"status": OK, "figures": case.measure(work, rehearse)}
    except Exception as error:
        traceback.print_exc()
        lines = str(error).strip().splitlines()
        why = f"failed: {lines[-1][:160] if lines else type(error).__name__}"
        found = {"status": OUT_OF_MEMORY if ran_out(error) else why}
    (work / FIGURES).write_text(json.dumps(found))
    return int(found["status"] != OK)


def become_subreaper() -> None:
    """Become the parent of any descendant whose own parent dies, so that it can be found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def run_alone(command: Sequence[str], log: Path, deadline: float) -> int | None:
    """The exit code of a command, None if it was killed after `deadline` seconds.

    At the end all descendants of this process are killed: launchers start their own groups, and
    what is left on a GPU changes the figures of the next case.
    """
    with log.open("wb") as stream:
        try:
            return start([*command], stream, {**os.environ, **QUIET}).wait(deadline)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for _ in range(5):  # not forever: a process that waits for a broken driver cannot be killed
                below = psutil.Process().children(recursive=True)
                for process in below:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(below, timeout=2)


if __name__ == "__main__":
    sys.exit(main())
