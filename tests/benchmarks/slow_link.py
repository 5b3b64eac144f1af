"""Two processes on an emulated slow link: measured, explained, improved, measured again.

As root, on Linux:

    python -m tests.benchmarks.slow_link --output outputs/slow_link

The demonstration is measured on one process and on two whose loopback passes 60 Mbit/s; then two
of the changes that the report advises are tried beside it. Emulated link, CPU, gloo: the figures
say how good the predictions are, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tests.support.emulated import link
from tests.support.running import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/slow_link"))
    parser.add_argument("--rate", default="60mbit", help="as tc writes it [60mbit]")
    parser.add_argument("--repeats", default="3")
    parser.add_argument("--steps", default="6")
    options = parser.parse_args()
    with link(options.rate) as namespace:
        inside = ["ip", "netns", "exec", namespace, "env", "GLOO_SOCKET_IFNAME=lo", sys.executable, "-m", "launch"]
        measure = [*inside, "scale", "run", "--output", str(options.output), "--repeats", options.repeats]
        measure += ["--steps", options.steps]
        subprocess.run(
            [*measure, "--num_processes", "1", "2", "--name", f"link of {options.rate}"], cwd=ROOT, check=True
        )
        for change in ("compression", "accumulation"):
            subprocess.run([*measure, "--apply", change], cwd=ROOT, check=True)
    report = ["scale", "report", str(options.output / "timings.jsonl"), "--output", str(options.output / "report")]
    subprocess.run([sys.executable, "-m", "launch", *report], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
