"""Start-up: `recipes list` and `check` against `accelerate launch --help` and `trl -h`.

    python -m tests.benchmarks.check_time [--rounds 10] [--trl PATH]

Whole processes in turns, so that other load on the machine falls on all of them. A ratio is that
of two processes of one round. Install trl in an environment of its own, with this interpreter:

    python -m venv trl-env && trl-env/bin/pip install trl torch
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from recipes.run import hardware

LIST, CHECK, ACCELERATE, TRL = "recipes list", "recipes check", "accelerate launch --help", "trl -h"


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def spread(values: list[float]) -> str:
    """The median and the quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return f"{median:.2f} (quartiles {low:.2f} and {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="at least 2 [10]")
    parser.add_argument("--trl", metavar="PATH", help="the program trl [it is left out]")
    options = parser.parse_args()
    python = [sys.executable, "-m"]
    commands = {
        LIST: [*python, "launch", "list"],
        CHECK: [*python, "launch", "check", "--recipe", "fast"],
        ACCELERATE: [*python, "accelerate.commands.launch", "--help"],
        **({TRL: [options.trl, "-h"]} if options.trl else {}),
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(options.rounds + 1):
        for name, command in commands.items():
            taken = seconds(command)
            times[name] += [taken] if number else []  # the first round only reads the disk
    print(f"{hardware.read()}, {options.rounds} rounds")
    for name, values in times.items():
        print(f"{name:<26}{spread(values)} s")
    for one, other in ((ACCELERATE, CHECK), (LIST, TRL), (CHECK, TRL)):
        if other in times:
            ratios = [mine / theirs for mine, theirs in zip(times[one], times[other], strict=True)]
            print(f"{one} / {other}: {spread(ratios)}")


if __name__ == "__main__":
    main()
