"""Kill trainings and damage their files, and give the same command again.

    python -m tests.campaigns.resuming kills --seed S --count N [--engine E ...] [--workers K]
    python -m tests.campaigns.resuming damage --seed S --count N [--engine E ...] [--workers K]

kills: until N SIGKILLs have hit, in chains of one to four, at the whole run or at one rank of it.
damage: N faults, each kind of them and each place at least once: in files of the newest checkpoint,
in the whole of it, in two files, in the model that the run started from, its tokenizer and
configuration, in the data and in run.json.

The finished run must be the one that nobody touched: final weights, losses, and the last
checkpoint's optimizer, schedule and random states, bit by bit, with DeepSpeed to 1e-4. Damage is
named; to what is no checkpoint the answer may also be a refusal, or that something changed. Each
run that is lost is printed, and `--only` tries it alone. The same seed draws the same. Returns 1 if
a run was lost.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from tests.campaigns.pool import results, scratch_folder
from tests.campaigns.resuming import damage, kills
from tests.campaigns.resuming.trainings import ENGINES, PLAIN, prepare, prepare_stopped

_WITHOUT_A_HIT = 20  # chains: then the moments do not come any more


def main() -> int:
    options = _parser().parse_args()
    started, hits, lost, trials = time.monotonic(), Counter[str](), 0, 0
    with scratch_folder() as scratch:
        for result in (_kills if options.what == "kills" else _damage)(options, scratch):
            trials += 1
            hits.update("a step" if hit.startswith("step ") else hit for hit in result.hits)
            lost += bool(result.lost)
            if result.lost:
                print(f"{result.lost}\n    --only '{result.trial}'", flush=True)
            if options.only:
                print(result.output)
    print(", ".join(f"{number} {hit}" for hit, number in hits.most_common()))
    seconds = time.monotonic() - started
    print(f"{options.what}: {hits.total()} in {trials} runs: {lost} lost ({seconds:.0f} s, seed {options.seed})")
    return int(bool(lost))


def _kills(options: argparse.Namespace, scratch: Path) -> Iterator[Any]:
    alone = kills.from_json(options.only) if options.only else None
    engines = [alone.engine] if alone else options.engine
    events = dict(results(partial(prepare, scratch), engines, options.workers))
    drawn = (kills.draw(Random(f"{options.seed}-{number}"), events) for number in count())
    left, missed = options.count, 0
    while left > 0 and missed < _WITHOUT_A_HIT:
        chains = [alone] if alone else [next(drawn) for _ in range(max(1, left // 3))]
        for result in results(partial(kills.tried, scratch), chains, options.workers):
            left -= len(result.hits)
            missed = 0 if result.hits else missed + 1
            yield result
        left *= alone is None


def _damage(options: argparse.Namespace, scratch: Path) -> Iterator[Any]:
    faults = damage.draw(Random(options.seed), options.engine, options.count)
    faults = [damage.from_text(options.only)] if options.only else faults
    engines = sorted({fault.engine for fault in faults})
    list(results(partial(prepare_stopped, scratch), engines, options.workers))
    yield from results(partial(damage.tried, scratch), faults, options.workers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.resuming")
    parser.add_argument("what", choices=("kills", "damage"))
    parser.add_argument("--seed", default="0", help="any word; the same word draws the same [0]")
    parser.add_argument("--count", type=int, default=30, help="how many kills that hit, or how many faults [30]")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, metavar="E", default=PLAIN, help=", ".join(ENGINES))
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at a time")
    parser.add_argument("--only", metavar="TRIAL", help="try what is printed of a lost run, and print its output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
