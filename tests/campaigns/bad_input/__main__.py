"""Make valid input wrong at random, and look at the answers.

    python -m tests.campaigns.bad_input --seed S --count N [--only NUMBER]
    python -m tests.campaigns.bad_input --sweep

Prints each finding once with the case that shows it, and a line with the figures. The same seed
draws the same cases. Returns 1 if there was a traceback, a crash, a hang, or a refusal that does
not say what to write instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests.campaigns.bad_input.case import Case
from tests.campaigns.bad_input.draw import draw
from tests.campaigns.bad_input.sweep import sweep
from tests.campaigns.bad_input.workers import Totals, results
from tests.campaigns.bad_input.world import write_world


def main() -> int:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="bad-input-") as scratch:
        _prepare_environment(Path(scratch))
        return campaign(options, Path(scratch))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.bad_input", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", default="0", help="any word; the same word draws the same cases [0]")
    parser.add_argument("--count", type=int, default=500, help="how many cases to draw [500]")
    parser.add_argument("--kind", help="only cases of this kind: data, flags, config, record, ...")
    parser.add_argument(
        "--sweep", action="store_true", help="instead, every field of every JSON file with each of a few odd values"
    )
    parser.add_argument("--only", type=int, metavar="NUMBER", help="only the case with this number; its whole output")
    return parser


def _prepare_environment(folder: Path) -> None:
    """What every case finds in its environment. Before torch is imported."""
    own = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    os.environ.update(own, HF_HOME=str(folder / "hf"), DS_ACCELERATOR="cpu")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


def campaign(options: argparse.Namespace, folder: Path) -> int:
    started, world = time.monotonic(), write_world(folder)
    totals = Totals()
    for result in results(_cases(options, world), folder, world):
        totals.add(result, whole=options.only is not None)
    drawn = "sweep" if options.sweep else f"seed {options.seed}"
    print(f"{totals} ({time.monotonic() - started:.0f} s, {drawn})")
    return int(bool(totals.findings))


def _cases(options: argparse.Namespace, world: Path) -> list[tuple[int, Case]]:
    cases = sweep(world, options.kind) if options.sweep else None
    count = len(cases) if cases else options.count
    numbers = [options.only] if options.only is not None else range(count)
    numbered = [(n, cases[n] if cases else draw(Random(f"{options.seed}-{n}"), world)) for n in numbers]
    return [(number, case) for number, case in numbered if options.kind in (None, case.kind)]


if __name__ == "__main__":
    sys.exit(main())
