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
from collections import Counter
from pathlib import Path
from random import Random


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
    from tests.campaigns.bad_input import preloaded  # noqa: F401
    from tests.campaigns.bad_input.attempt import BUSY, SECONDS, attempt
    from tests.campaigns.bad_input.case import write
    from tests.campaigns.bad_input.draw import draw
    from tests.campaigns.bad_input.judge import finding
    from tests.campaigns.bad_input.world import write_world

    started, world = time.monotonic(), write_world(folder)
    found: Counter[str] = Counter()
    drawn = taken = slowest = 0
    for number in [options.only] if options.only is not None else range(options.count):
        case = draw(Random(f"{options.seed}-{number}"), world)
        if options.kind not in (None, case.kind):
            continue
        write(case, world, folder / "case")
        answer = attempt(case, folder / "case")
        if answer.code is None:  # perhaps the machine is busy: the processor's time counts the second time
            write(case, world, folder / "case")
            answer = attempt(case, folder / "case", SECONDS, BUSY * SECONDS)
        drawn, taken, slowest = drawn + 1, taken + answer.taken, max(slowest, answer.seconds)
        what = finding(case, answer)
        if options.only is not None:
            print(f"{case}\nexit code {answer.code} after {answer.seconds:.1f} s\n{answer.output}\n{what or 'usable'}")
        elif what and not found[what]:
            tail = "\n".join(answer.output.splitlines()[-6:])
            print(f"\n=== case {number}: {what}\n{case}\n{tail[-1500:]}", flush=True)
        found[what] += bool(what)
    findings = +found
    print(
        f"{drawn} cases: {drawn - taken - findings.total()} refused usably, {taken} taken, "
        f"{findings.total()} findings ({len(findings)} different), slowest {slowest:.1f} s "
        f"({time.monotonic() - started:.0f} s, seed {options.seed})"
    )
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
