"""Kill trainings at drawn moments, and start the same command again until the run is finished.

    python -m tests.campaigns.kills --seed S --count N [--engine E ...] [--workers K]

N SIGKILLs are aimed, in chains of one to four: at start-up, in steps, evaluations, saves, rotation,
the best model's loading, background threads and the end, at the whole run or at one rank of it. The
finished run must have the weights and losses of one that was never killed: bit by bit, with
DeepSpeed to 1e-4. Each chain that has not is printed with the shortest that shows it, which
`--chain` tries again. The same seed draws the same moments. Returns 1 if a run was lost.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

from tests.campaigns.kills import campaign
from tests.campaigns.kills.draw import Chain, draw_chains, from_json
from tests.campaigns.legality.workers import prepare_environment
from tests.campaigns.pool import results
from tests.campaigns.runs import ENGINES


def main() -> int:
    options = _parser().parse_args()
    started = time.monotonic()
    kills, left, kinds = Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        scratch = Path(folder)
        prepare_environment(scratch)
        chains = _chains(options, scratch)
        for result in results(partial(campaign.run, scratch), chains, options.workers):
            kills += result.kills
            left.update(name.partition("-")[0] for name in result.left)
            if result.lost:
                kinds[result.lost.kind] += 1
                print(f"{result.lost.kind}: {result.lost.why}\n    {result.chain}")
                print(f"    --chain '{result.chain.as_json()}'", flush=True)
            if options.chain:
                print(result.output)
    print("killed in: " + ", ".join(f"{phase} {count}" for phase, count in _by_kind(kills).most_common()))
    print("left over: " + (", ".join(f"{count} {name}" for name, count in left.most_common()) or "nothing"))
    print(
        f"{kills.total()} SIGKILLs in {len(chains)} chains: {sum(kinds.values())} lost"
        + "".join(f", {count} {kind}" for kind, count in kinds.most_common())
        + f" ({time.monotonic() - started:.0f} s, seed {options.seed})"
    )
    return int(bool(kinds))


def _chains(options: argparse.Namespace, scratch: Path) -> list[Chain]:
    alone = from_json(options.chain) if options.chain else None
    engines = [alone.engine] if alone else options.engine
    counts = dict(results(partial(campaign.prepare, scratch), engines, options.workers))
    return [alone] if alone else draw_chains(Random(options.seed), counts, options.count)


def _by_kind(kills: Counter[str]) -> Counter[str]:
    found = Counter[str]()
    for phase, count in kills.items():
        found["a step" if phase.startswith("step ") else phase] += count
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.kills", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", default="0", help="any word; the same word draws the same moments [0]")
    parser.add_argument("--count", type=int, default=100, help="how many SIGKILLs to aim [100]")
    parser.add_argument(
        "--engine", nargs="+", choices=ENGINES, metavar="E", default=list(ENGINES), help=", ".join(ENGINES)
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="chains at a time")
    parser.add_argument(
        "--chain", metavar="JSON", help="try one chain, as it is printed, and print what its runs print"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
