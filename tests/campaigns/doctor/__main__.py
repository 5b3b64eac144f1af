"""Make faults for real and see whether `recipes doctor` names each, with the fix that mends it.

    python -m tests.campaigns.doctor [--fault WORDS] [--healthy N --load K]

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
from tests.campaigns.doctor.trial import MOST_SECONDS, healthy, tried

_BUSY = [sys.executable, "-c", "while True: pass"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.doctor")
    parser.add_argument("--fault", default="", metavar="WORDS", help="only those whose name holds this expression")
    parser.add_argument("--healthy", type=int, default=0, help="so many runs without a fault instead")
    parser.add_argument("--load", type=int, default=2, help="busy processes beside healthy runs [2]")
    options, started = parser.parse_args(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stand-ins-") as name:
        stand_in.make(Path(name))
        if options.healthy:
            wrong = _healthy(Path(name), options.healthy, options.load)
        else:
            wrong = _faults(Path(name), options.fault)
    print(f"({time.monotonic() - started:.0f} s)")
    return int(wrong > 0)


def _faults(stand_ins: Path, words: str) -> int:
    verdicts = []
    for fault in (fault for fault in FAULTS if re.search(words, fault.name)):
        verdict = tried(stand_ins, fault)
        verdicts.append(verdict)
        named = "named" if verdict.named else "NOT NAMED"
        mended = {True: "mended", False: "NOT MENDED", None: "mends elsewhere"}[verdict.mended]
        slow = "" if verdict.seconds <= MOST_SECONDS else " TOO SLOW"
        why = f"\n    {verdict.why}" if verdict.why else ""
        print(f"{fault.name}: {named}, {mended}, {verdict.seconds:.1f} s{slow}{why}", flush=True)
    good, slowest = sum(verdict.good for verdict in verdicts), max(verdict.seconds for verdict in verdicts)
    elsewhere = sum(verdict.mended is None for verdict in verdicts)
    print(f"{len(verdicts)} faults: {good} named in time, the slowest in {slowest:.1f} s; ", end="")
    print(f"{elsewhere} cannot be mended here")
    return len(verdicts) - good


def _healthy(stand_ins: Path, count: int, load: int) -> int:
    with processes.group() as busy, (stand_ins / "busy").open("wb") as log:
        busy += [processes.start(_BUSY, log) for _ in range(load)]
        said = [healthy(stand_ins) for _ in range(count)]
    print("\n".join(f"run {number}: {text}" for number, text in enumerate(said) if text))
    print(f"{count} healthy runs beside {load} busy processes: {sum(map(bool, said))} called ill")
    return sum(map(bool, said))


if __name__ == "__main__":
    sys.exit(main())
