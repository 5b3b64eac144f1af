"""Two processes on an emulated slow link: measured, explained, improved, measured again.

As root, on Linux:

    python -m tests.benchmarks.slow_link --output outputs/slow_link

The demonstration is measured on one process and on two whose loopback passes 60 Mbit/s; then two
of the changes that the report advises are tried beside it. With `--beside` another training of two
processes runs on the same cores all the while. At the end each prediction stands beside what was
measured: it should be within 5 %, or the runs called too noisy to tell. Emulated link, CPU, gloo:
the figures say how good the predictions are, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
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
    parser.add_argument("--beside", action="store_true", help="another training runs on the same cores")
    options = parser.parse_args()
    folders = [options.output / f"round-{number + 1}" for number in range(options.rounds)]
    if options.rounds == 1:
        folders = [options.output]
    for folder in folders:
        with _training(folder) if options.beside else contextlib.nullcontext():
            _measure(options, folder)
    for folder in folders:
        for one in applied(read([folder / "timings.jsonl"])):
            print(f"{folder.name}: {one.title}: {one.words}")


def _measure(options: argparse.Namespace, folder: Path) -> None:
    with link(options.rate) as namespace:
        inside = ["ip", "netns", "exec", namespace, "env", "GLOO_SOCKET_IFNAME=lo", sys.executable, "-m", "launch"]
        measure = [*inside, "scale", "run", "--output", str(folder), "--repeats", options.repeats]
        measure += ["--steps", options.steps]
        subprocess.run(
            [*measure, "--num_processes", "1", "2", "--name", f"link of {options.rate}"], cwd=ROOT, check=True
        )
        for change in options.changes:
            subprocess.run([*measure, "--apply", change], cwd=ROOT, check=False)  # 2 where it is not advised
    report = ["scale", "report", str(folder / "timings.jsonl"), "--output", str(folder / "report")]
    subprocess.run([sys.executable, "-m", "launch", *report], cwd=ROOT, check=True)


@contextlib.contextmanager
def _training(folder: Path) -> Iterator[None]:
    """Another training of two processes, which is stopped at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["--output_dir", str(folder / "beside"), "--fresh", "--max_steps", "100000", "--save_strategy", "no"]
    command = [sys.executable, "-m", "launch", "train", "--num_processes", "2", *flags]
    own = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "beside.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=own)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
