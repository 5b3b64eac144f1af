"""Make valid input wrong at random, and look at the answers.

    python -m tests.campaigns.bad_input --seed S --count N [--only NUMBER]

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
    numbers = [options.only] if options.only is not None else list(range(options.count))
    for result in results(options.seed, numbers, options.kind, folder, world):
        totals.add(result, whole=options.only is not None)
    print(f"{totals} ({time.monotonic() - started:.0f} s, seed {options.seed})")
    return int(bool(totals.findings))


if __name__ == "__main__":
    sys.exit(main())
