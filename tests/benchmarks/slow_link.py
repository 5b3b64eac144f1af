"""Two processes on an emulated slow link: measured, explained, improved, measured again.

As root, on Linux:

    python -m tests.benchmarks.slow_link --output outputs/slow_link

The demonstration is measured on one process and on two whose loopback passes 60 Mbit/s; then two
of the changes that the report advises are tried beside it. At the end each prediction stands beside
what was measured: it should be within 5 %, or the runs called too noisy to tell. Started twice at
once, on the same cores, it is two trainings beside each other. Emulated link, CPU, gloo: the
figures say how good the predictions are, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from recipes.scaling.advice import applied
from recipes.scaling.timings import read
from tests.support.emulated import link
from tests.support.running import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/slow_link"))
    parser.add_argument("--rate", default="60mbit", help="as tc writes it [60mbit]")
    parser.add_argument("--rounds", type=int, default=1, help="each in a folder of its own [1]")
    parser.add_argument("--repeats", default="3")
    parser.add_argument("--steps", default="6")
    parser.add_argument("--changes", nargs="+", default=["compression", "accumulation"])
    parser.add_argument("--scaling", nargs="+", default=["strong", "weak"])
    options = parser.parse_args()
    folders = [options.output / f"round-{number + 1}" for number in range(options.rounds)]
    if options.rounds == 1:
        folders = [options.output]
    for folder in folders:
        _measure(options, folder)
    for folder in folders:
        for one in applied(read([folder / "timings.jsonl"])):
            print(f"{folder.name}: {one.title}: {one.words}")


def _measure(options: argparse.Namespace, folder: Path) -> None:
    with link(options.rate) as namespace:
        inside = ["ip", "netns", "exec", namespace, "env", "GLOO_SOCKET_IFNAME=lo", sys.executable, "-m", "launch"]
        measure = [*inside, "scale", "run", "--output", str(folder), "--repeats", options.repeats]
        measure += ["--steps", options.steps, "--scaling", *options.scaling]
        subprocess.run(
            [*measure, "--num_processes", "1", "2", "--name", f"link of {options.rate}"], cwd=ROOT, check=True
        )
        for change in options.changes:
            subprocess.run([*measure, "--apply", change], cwd=ROOT, check=False)  # 2 where it is not advised
    report = ["scale", "report", str(folder / "timings.jsonl"), "--output", str(folder / "report")]
    subprocess.run([sys.executable, "-m", "launch", *report], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
