"""How long a plan of an 8B model takes after the imports, and the RAM that it needs.

    python -m tests.benchmarks.plan_time [--rounds 5]

Each round is a fresh process. The imports are all that the plan needs: recipes, torch, transformers
and its Llama. Exits with 1 if the median plan takes 5 s or more, or any process 2 GB (10^9 bytes)
or more. A plan runs on one core: if it takes more seconds than CPU seconds, it waited for other
processes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from recipes.run import hardware

SECONDS, BYTES = 5.0, 2e9
MODEL, GPU, PROCESSES = "8B", "H100", 4


@dataclass(frozen=True)
class Round:
    """What one process measured of itself. Bytes are peaks of resident memory."""

    import_seconds: float
    plan_seconds: float
    plan_cpu_seconds: float
    imported_bytes: int
    peak_bytes: int


def measured_here() -> Round:
    """Import, then plan, in this process."""
    started = time.perf_counter()
    import transformers

    import recipes
    import recipes.planner.trace

    transformers.LlamaForCausalLM, transformers.LlamaConfig  # noqa: B018 - transformers imports them now
    imported, cpu, imported_bytes = time.perf_counter(), time.process_time(), peak_bytes()
    recipes.plan_memory(MODEL, gpu=GPU, num_processes=PROCESSES)
    return Round(
        import_seconds=imported - started,
        plan_seconds=time.perf_counter() - imported,
        plan_cpu_seconds=time.process_time() - cpu,
        imported_bytes=imported_bytes,
        peak_bytes=peak_bytes(),
    )


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def measured_apart() -> Round:
    """One round in its own process."""
    argv = [sys.executable, "-m", "tests.benchmarks.plan_time", "--here"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    return Round(**json.loads(done.stdout.splitlines()[-1]))


def is_met(rounds: list[Round]) -> bool:
    seconds = statistics.median(one.plan_seconds for one in rounds)
    return seconds < SECONDS and max(one.peak_bytes for one in rounds) < BYTES


def report(rounds: list[Round]) -> str:
    plan = [one.plan_seconds for one in rounds]
    cpu, imports = (statistics.median(getattr(one, f"{of}_seconds") for one in rounds) for of in ("plan_cpu", "import"))
    peak, imported = (max(getattr(one, f"{of}_bytes") for one in rounds) / 1e9 for of in ("peak", "imported"))
    return (
        f"{MODEL} on {PROCESSES} x {GPU}, every recipe, {len(rounds)} processes\n"
        f"plan {statistics.median(plan):.2f} s (median, from {min(plan):.2f} to {max(plan):.2f}; {cpu:.2f} s of CPU), "
        f"after imports of {imports:.2f} s; the target is {SECONDS:g} s\n"
        f"peak RAM {peak:.2f} GB, {imported:.2f} GB after the imports; the target is {BYTES / 1e9:g} GB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(asdict(measured_here())))
        return 0
    measured_apart()  # warm-up: reads the files from disk
    rounds = [measured_apart() for _ in range(options.rounds)]
    print(f"{hardware.read()}\n{report(rounds)}")
    return 0 if is_met(rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
