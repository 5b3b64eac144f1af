"""Start-up: `recipes list` and `check` against `trl -h` and `accelerate launch --help`.

python -m tests.benchmarks.check_time [--rounds 10] [--trl PATH]

Whole processes in turns, so that other load on the machine falls on all of them. A ratio is that
of two processes of one round. Install trl in an environment of its own, with this interpreter:

python -m venv trl-env && trl-env/bin/pip install trl torch
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from recipes.run import hardware

LIST, CHECK, ACCELERATE, TRL = "recipes list", "recipes check", "accelerate launch --help", "trl -h"


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each command in each round. A first round only reads the disk."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds + 1):
        for name, command in commands.items():
            times[name].append(seconds(command))
    return {name: measured[1:] for name, measured in times.items()}


def spread(values: list[float]) -> str:
    """The median and the quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.2f} (quartiles {low:.2f} and {high:.2f})"


def find_trl(given: str | None) -> str | None:
    """The given program, else `trl` beside this interpreter or on the PATH; None without one."""
    beside = Path(sys.executable).with_name("trl")
    return given or (str(beside) if beside.exists() else shutil.which("trl"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="at least 2 [10]")
    parser.add_argument("--trl", metavar="PATH", help="the program trl [beside this interpreter, or on the PATH]")
    options = parser.parse_args()
    python, trl = [sys.executable, "-m"], find_trl(options.trl)
    commands = {
        LIST: [*python, "launch", "list"],
        CHECK: [*python, "launch", "check", "--recipe", "fast"],
        ACCELERATE: [*python, "accelerate.commands.launch", "--help"],
        **({TRL: [trl, "-h"]} if trl else {}),
    }
    times = measure(commands, options.rounds)
    print(f"{hardware.read()}, {options.rounds} rounds")
    for name, values in times.items():
        print(f"{name:<26}{spread(values)} s")
    pairs = [(ACCELERATE, CHECK), (LIST, TRL), (CHECK, TRL)] if trl else [(ACCELERATE, CHECK)]
    for one, other in pairs:
        ratios = [mine / theirs for mine, theirs in zip(times[one], times[other], strict=True)]
        print(f"{one} / {other}: {spread(ratios)}")
    if not trl:
        print("no trl: python -m venv trl-env && trl-env/bin/pip install trl torch, then --trl trl-env/bin/trl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
