"""Damage every file of the newest checkpoint in every way, and start the same command again.

    python -m tests.campaigns.damage --seed S [--count N] [--engine E ...] [--workers K]

The run must finish by itself, end with the weights and losses of the undamaged run, and name the
damaged file. Each fault after which it does not is printed, and `--fault` tries it alone. The same
seed damages the same bits; `--count` draws so many of all faults. Returns 1 if a run was lost.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random

from tests.campaigns.damage import campaign
from tests.campaigns.damage.judge import LOST
from tests.campaigns.legality.workers import prepare_environment
from tests.campaigns.pool import results
from tests.campaigns.runs import ENGINES, PLAIN


def main() -> int:
    options = _parser().parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="damage-") as folder:
        scratch = Path(folder)
        prepare_environment(scratch)
        counts = _all(options, scratch) if options.fault is None else _one(options, scratch)
    for engine, found in sorted(counts.items()):
        print(f"{engine}: " + ", ".join(f"{count} {kind}" for kind, count in found.most_common()))
    total = sum(counts.values(), Counter())
    lost = sum(total[kind] for kind in LOST)
    kinds = ", ".join(f"{total[kind]} {kind}" for kind in ("mended", *LOST))
    print(f"{total.total()} faults: {kinds}; {lost} lost ({time.monotonic() - started:.0f} s, seed {options.seed})")
    return int(bool(lost))


def _all(options: argparse.Namespace, scratch: Path) -> dict[str, Counter[str]]:
    prepared = results(partial(campaign.prepare, scratch), options.engine, options.workers)
    faults = sorted(chain.from_iterable(prepared), key=str)
    if options.count is not None:
        faults = Random(options.seed).sample(faults, min(options.count, len(faults)))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    work = partial(campaign.tried, scratch, options.seed)
    for fault, verdict, output in results(work, faults, options.workers):
        counts[fault.engine][verdict.kind] += 1
        if verdict.kind in LOST:
            print(f"{verdict.kind}: --fault '{fault}'\n    {verdict.why}", flush=True)
        if options.verbose:
            print(f"=== {fault}\n{output}", flush=True)
    return counts


def _one(options: argparse.Namespace, scratch: Path) -> dict[str, Counter[str]]:
    fault = campaign.Fault(*options.fault.split(":"))
    list(results(partial(campaign.prepare, scratch), [fault.engine], 1))
    [(_, verdict, output)] = results(partial(campaign.tried, scratch, options.seed), [fault], 1)
    print(f"{output}\n{verdict.kind}: {verdict.why}")
    return {fault.engine: Counter([verdict.kind])}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.damage", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", default="0", help="any word; the same word damages the same bits [0]")
    parser.add_argument("--count", type=int, help="how many faults to draw [all]")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, metavar="E", default=PLAIN, help=", ".join(ENGINES))
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at a time")
    parser.add_argument("--fault", metavar="ENGINE:FILE:KIND", help="try one fault, and print what the run prints")
    parser.add_argument("--verbose", action="store_true", help="print what each run prints")
    return parser


if __name__ == "__main__":
    sys.exit(main())
