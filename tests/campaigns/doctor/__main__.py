"""Make faults for real and see whether `recipes doctor` names each, with the fix that mends it.

    python -m tests.campaigns.doctor [--fault WORDS] [--healthy N --load K] [--code FOLDER]

As root, in network, mount and process namespaces of their own: nothing of this machine is changed.
Each fault must be named in 20 seconds, and its fix must mend it when it is applied. `--healthy`
runs the doctor so often on a machine without a fault, beside K busy processes. Returns 1 if a fault
was not named or not mended, or a healthy machine was said to be ill.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

from launch.host import processes
from tests.campaigns.doctor import stand_in
from tests.campaigns.doctor.faults import FAULTS
from tests.campaigns.doctor.trial import MOST_SECONDS, Trials, healthy, tried
from tests.support.running import ROOT

_BUSY = [sys.executable, "-c", "while True: pass"]


def main() -> int:
    options = _parser().parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stand-ins-") as folder:
        stand_in.make(Path(folder))
        trials = Trials(Path(options.code), Path(folder))
        if options.healthy:
            wrong = _healthy(trials, options.healthy, options.load, Path(folder))
        else:
            wrong = _faults(trials, options.fault)
    print(f"({time.monotonic() - started:.0f} s)")
    return int(wrong > 0)


def _faults(trials: Trials, words: str) -> int:
    faults = [fault for fault in FAULTS if re.search(words, fault.name)]
    verdicts = []
    for fault in faults:
        verdict = tried(trials, fault)
        verdicts.append(verdict)
        named = "named" if verdict.named else "NOT NAMED"
        mended = {True: "mended", False: "NOT MENDED", None: "mends elsewhere"}[verdict.mended]
        slow = "" if verdict.seconds <= MOST_SECONDS else " TOO SLOW"
        why = f"\n    {verdict.why}" if verdict.why else ""
        print(f"{fault.name}: {named}, {mended}, {verdict.seconds:.1f} s{slow}{why}", flush=True)
    good = sum(verdict.good for verdict in verdicts)
    slowest = max(verdict.seconds for verdict in verdicts)
    elsewhere = sum(verdict.mended is None for verdict in verdicts)
    print(
        f"{len(faults)} faults: {good} named in time, the slowest in {slowest:.1f} s; {elsewhere} cannot be mended here"
    )
    return len(faults) - good


def _healthy(trials: Trials, count: int, load: int, folder: Path) -> int:
    wrong = 0
    with processes.group() as busy, (folder / "busy").open("wb") as log:
        busy += [processes.start(_BUSY, log) for _ in range(load)]
        for number in range(count):
            said = healthy(trials)
            wrong += bool(said)
            if said:
                print(f"run {number}: {said}", flush=True)
    print(f"{count} healthy runs beside {load} busy processes: {wrong} called ill")
    return wrong


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.doctor", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--fault", default="", metavar="WORDS", help="only those whose name holds this regular expression"
    )
    parser.add_argument("--healthy", type=int, default=0, help="so many runs without a fault instead")
    parser.add_argument("--load", type=int, default=2, help="busy processes beside healthy runs [2]")
    parser.add_argument("--code", default=str(ROOT), metavar="FOLDER", help="the checkout whose doctor runs [this]")
    return parser


if __name__ == "__main__":
    sys.exit(main())
