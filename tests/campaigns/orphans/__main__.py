"""Strike launchers and ranks by signals at drawn moments, then start the same command again.

    python -m tests.campaigns.orphans --seed S --count N [--workers K]

N runs under `accelerate launch`, torchrun or `recipes train`, of one or two processes, get SIGKILL,
SIGSTOP, SIGTERM, SIGUSR1 or SIGHUP: the launcher or one of the ranks, while it starts or trains. No
process may be left after the time of grace. A run that is told to stop has saved its step, and what
it saved is whole; a rank that hangs is named. The same command then ends with the losses of a run
that nobody disturbed. The same seed draws the same blows. Returns 1 if there was a finding.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from random import Random

from tests.campaigns.legality.material import write_material
from tests.campaigns.legality.workers import prepare_environment
from tests.campaigns.orphans.draw import draw, from_json
from tests.campaigns.orphans.trial import Trials


def main() -> int:
    options = _parser().parse_args()
    started = time.monotonic()
    blows = [draw(Random(f"{options.seed}-{number}")) for number in range(options.count)]
    if options.blow:
        blows = [from_json(options.blow)]
    findings, ended = 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="orphans-") as folder:
        prepare_environment(Path(folder))
        trials = Trials(Path(folder), write_material(Path(folder) / "material"))
        trials.losses  # noqa: B018 # before the threads need it
        with ThreadPoolExecutor(options.workers) as pool:
            for done in as_completed([pool.submit(trials.attempt, *pair) for pair in enumerate(blows)]):
                result = done.result()
                ended[result.ended] += 1
                findings += bool(result.finding)
                if result.finding:
                    print(f"{result.blow}: {result.finding}\n    --blow '{result.blow.as_json()}'", flush=True)
    how = ", ".join(f"{count} {status}" for status, count in ended.most_common())
    print(f"{len(blows)} runs struck ({how}): {findings} findings ({time.monotonic() - started:.0f} s)")
    return int(findings > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.orphans", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", default="0", help="any word; the same word draws the same blows [0]")
    parser.add_argument("--count", type=int, default=10, help="how many runs are struck [10]")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time [1]")
    parser.add_argument("--blow", metavar="JSON", help="only this blow, as a finding prints it")
    return parser


if __name__ == "__main__":
    sys.exit(main())
