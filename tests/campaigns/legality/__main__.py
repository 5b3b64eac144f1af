"""Draw random runs, and compare what `recipes check` says of them with what becomes of them.

    python -m tests.campaigns.legality --runs N --seed S [--workers K] [--kind KIND]

What check calls legal is trained for two steps; what it refuses is tried without the check. Each
disagreement is printed with the shortest command that shows it. The same seed
draws the same runs, whatever the number of workers. Returns 1 if there was a disagreement.

Of the kinds, `sharded` runs FSDP2 on CPU ranks, in `parallel` processes share model or examples,
and `own` brings a recipe of its own. `cards` is for machines with 1, 2 or 8 H100, A100 or T4, and
goes as far as the real constructors.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.campaigns.legality.campaign import DRAWS
from tests.campaigns.legality.case import from_json
from tests.campaigns.legality.workers import Totals, results, try_alone
from tests.campaigns.pool import scratch_folder


def main() -> int:
    options = _parser().parse_args()
    started = time.monotonic()
    with scratch_folder() as folder:
        if options.case:
            return int(try_alone(from_json(options.case), folder))
        numbers = [options.only] if options.only is not None else list(range(options.runs))
        totals = Totals()
        for result in results(options.seed, numbers, folder, options.workers, options.kind):
            totals.add(result)
    print(f"{totals} ({time.monotonic() - started:.0f} s, seed {options.seed})")
    return int(bool(totals.disagreements))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.legality", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=100, help="how many runs to draw [100]")
    parser.add_argument("--seed", default="0", help="any word; the same word draws the same runs [0]")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="runs at a time")
    parser.add_argument("--kind", default="plain", choices=DRAWS, help="what is drawn [plain]")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="only the run with this number")
    parser.add_argument("--case", metavar="JSON", help="try one case, as a disagreement prints it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
