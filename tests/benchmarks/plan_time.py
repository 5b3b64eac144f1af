"""How long a plan of an 8B model takes after the imports, and the RAM that it needs.

    python -m tests.benchmarks.plan_time [--rounds 5]

Each round is a fresh process. The imports are all that the plan needs: recipes, torch, transformers
and its Llama. A refusal is a whole process. Exits with 1 if the median plan of every recipe takes
5 s or more, of one recipe 3 s, a refusal 1 s, or any process 1 GB (10^9 bytes) or more. A plan runs
on one core: if it takes more seconds than CPU seconds, it waited for other processes.
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

SECONDS, BYTES = {"every recipe": 5.0, "sharded": 3.0, "a refusal": 1.0}, 1e9
MODEL, GPU, PROCESSES = "8B", "H100", 4


@dataclass(frozen=True)
class Round:
    """What one process measured of itself. Bytes are peaks of resident memory."""

    import_seconds: float
    plan_seconds: float
    plan_cpu_seconds: float
    imported_bytes: int
    peak_bytes: int


def measured_here(what: str) -> Round:
    """Import, then plan every recipe or the named one, in this process."""
    started = time.perf_counter()
    import transformers

    import recipes
    import recipes.planner.tracing.trace

    transformers.LlamaForCausalLM, transformers.LlamaConfig  # noqa: B018 - transformers imports them now
    imported, cpu, imported_bytes = time.perf_counter(), time.process_time(), peak_bytes()
    recipe = None if what == "every recipe" else what
    recipes.plan_memory(MODEL, gpu=GPU, num_processes=PROCESSES, recipe=recipe)
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


def measured_apart(what: str) -> Round:
    """One round in its own process."""
    argv = [sys.executable, "-m", "tests.benchmarks.plan_time", "--here", what]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    return Round(**json.loads(done.stdout.splitlines()[-1]))


def refusal_seconds() -> float:
    """A whole `recipes plan` without a card, in its own process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "launch", "plan", "--model", MODEL], capture_output=True)
    return time.perf_counter() - started


def is_met(rounds: dict[str, list[Round]], refusals: list[float]) -> bool:
    medians = {what: statistics.median(one.plan_seconds for one in of) for what, of in rounds.items()}
    medians["a refusal"] = statistics.median(refusals)
    in_time = all(seconds < SECONDS[what] for what, seconds in medians.items())
    return in_time and max(one.peak_bytes for of in rounds.values() for one in of) < BYTES


def report(what: str, rounds: list[Round]) -> str:
    plan = [one.plan_seconds for one in rounds]
    cpu, imports = (statistics.median(getattr(one, f"{of}_seconds") for one in rounds) for of in ("plan_cpu", "import"))
    peak, imported = (max(getattr(one, f"{of}_bytes") for one in rounds) / 1e9 for of in ("peak", "imported"))
    return (
        f"{MODEL} on {PROCESSES} x {GPU}, {what}, {len(rounds)} processes\n"
        f"plan {statistics.median(plan):.2f} s (median, from {min(plan):.2f} to {max(plan):.2f}; {cpu:.2f} s of CPU), "
        f"after imports of {imports:.2f} s; the target is {SECONDS[what]:g} s\n"
        f"peak RAM {peak:.2f} GB, {imported:.2f} GB after the imports; the target is {BYTES / 1e9:g} GB"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--here", metavar="RECIPE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(asdict(measured_here(options.here))))
        return 0
    measured_apart("sharded")  # warm-up: reads the files from disk
    rounds = {what: [measured_apart(what) for _ in range(options.rounds)] for what in ("every recipe", "sharded")}
    refusals = [refusal_seconds() for _ in range(options.rounds)]
    print(hardware.read())
    for what, of in rounds.items():
        print(report(what, of))
    print(f"a refusal {statistics.median(refusals):.2f} s (median); the target is {SECONDS['a refusal']:g} s")
    return 0 if is_met(rounds, refusals) else 1


if __name__ == "__main__":
    sys.exit(main())
