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

from recipes.run import hardware

SECONDS, BYTES = {"every recipe": 5.0, "sharded": 3.0, "a refusal": 1.0}, 1e9
MODEL, GPU, PROCESSES = "8B", "H100", 4


def measured_here(what: str) -> dict[str, float]:
    """Import, then plan every recipe or the named one, in this process: seconds, and peak bytes."""
    started = time.perf_counter()
    import transformers

    import recipes
    import recipes.planner.trace

    transformers.LlamaForCausalLM, transformers.LlamaConfig  # noqa: B018 - transformers imports them now
    imported, cpu = time.perf_counter(), time.process_time()
    recipe = None if what == "every recipe" else what
    recipes.plan_memory(MODEL, gpu=GPU, num_processes=PROCESSES, recipe=recipe)
    seconds = {"plan": time.perf_counter() - imported, "cpu": time.process_time() - cpu, "imports": imported - started}
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage: bytes on macOS, KiB on Linux
    return {**seconds, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}


def measured_apart(what: str) -> dict[str, float]:
    """One round in its own process."""
    argv = [sys.executable, "-m", "tests.benchmarks.plan_time", "--here", what]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def refusal() -> dict[str, float]:
    """A whole `recipes plan` without a card, in its own process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "launch", "plan", "--model", MODEL], capture_output=True)
    return {"plan": time.perf_counter() - started}


def is_met(rounds: dict[str, list[dict[str, float]]]) -> bool:
    in_time = all(statistics.median(one["plan"] for one in of) < SECONDS[what] for what, of in rounds.items())
    return in_time and max(one.get("bytes", 0) for of in rounds.values() for one in of) < BYTES


def report(what: str, rounds: list[dict[str, float]]) -> str:
    plan = [one["plan"] for one in rounds]
    middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    more = f"; {middle['cpu']:.2f} s of CPU, imports {middle['imports']:.2f} s" if "cpu" in middle else ""
    peak = f"; {max(one['bytes'] for one in rounds) / 1e9:.2f} GB of RAM" if "bytes" in middle else ""
    spread = f"median of {len(plan)}, from {min(plan):.2f} to {max(plan):.2f}"
    return f"{what}: {middle['plan']:.2f} s ({spread}; the target is {SECONDS[what]:g} s){more}{peak}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--here", metavar="RECIPE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured_here(options.here)))
        return 0
    measured_apart("sharded")  # warm-up: reads the files from disk
    rounds = {what: [measured_apart(what) for _ in range(options.rounds)] for what in ("every recipe", "sharded")}
    rounds["a refusal"] = [refusal() for _ in range(options.rounds)]
    print(f"{hardware.read()}\n{MODEL} on {PROCESSES} x {GPU}")
    for what, of in rounds.items():
        print(report(what, of))
    return 0 if is_met(rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
