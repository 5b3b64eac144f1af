"""How much sooner `recipes check` answers than `accelerate launch --help`: whole processes, paired, in turns.

python -m tests.benchmarks.check_time [--rounds 10]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from recipes.run import hardware

CHECK = ["launch", "check", "--recipe", "fast"]
HELP = ["accelerate.commands.launch", "--help"]


def seconds(words: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    seconds(CHECK), seconds(HELP)  # the first of each reads the disk
    pairs = [(seconds(CHECK), seconds(HELP)) for _ in range(options.rounds)]
    ratios = [theirs / ours for ours, theirs in pairs]
    check, launcher = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"{hardware.read()}: recipes check {check:.2f} s, accelerate launch --help {launcher:.2f} s")
    print(f"ratio: median {statistics.median(ratios):.1f}, from {min(ratios):.1f} to {max(ratios):.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
