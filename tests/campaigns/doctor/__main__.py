"""Make faults for real and see whether `recipes doctor` names each, with the fix that mends it.

    python -m tests.campaigns.doctor [--fault WORDS] [--healthy N]

As root, in network, mount and process namespaces of their own: nothing of this machine is changed.
Each fault must be named in 20 seconds, and its fix must mend it when it is applied. `--healthy`
runs the doctor so often on a machine without a fault, beside two busy processes. Returns 1 if a
fault was not named or not mended, or a healthy machine was said to be ill.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from launch.host import processes
from tests.campaigns.doctor import stand_in
from tests.campaigns.doctor.faults import FAULTS
from tests.campaigns.doctor.trial import healthy, tried

_BUSY = [sys.executable, "-c", "while True: pass"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.doctor")
    parser.add_argument("--fault", default="", metavar="WORDS", help="only those whose name holds this expression")
    parser.add_argument("--healthy", type=int, default=0, help="so many runs without a fault instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stand-ins-") as name:
        stand_in.make(Path(name))
        return _healthy(Path(name), options.healthy) if options.healthy else _faults(Path(name), options.fault)


def _faults(stand_ins: Path, words: str) -> int:
    chosen = [fault for fault in FAULTS if re.search(words, fault.name)]
    verdicts = []
    for fault in chosen:
        verdicts.append(tried(stand_ins, fault))
        print(f"{fault.name}: {verdicts[-1]}", flush=True)
    good, slowest = sum(verdict.good for verdict in verdicts), max(verdict.seconds for verdict in verdicts)
    print(f"{len(chosen)} faults: {good} named in time, the slowest in {slowest:.1f} s")
    return int(good < len(chosen))


def _healthy(stand_ins: Path, count: int) -> int:
    with processes.group() as busy, (stand_ins / "busy").open("wb") as log:
        busy += [processes.start(_BUSY, log) for _ in range(2)]
        said = [healthy(stand_ins) for _ in range(count)]
    print("\n".join(filter(None, said)))
    print(f"{count} healthy runs: {sum(map(bool, said))} called ill")
    return int(any(said))


if __name__ == "__main__":
    sys.exit(main())
