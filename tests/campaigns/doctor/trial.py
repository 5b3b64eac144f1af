"""One fault, made for real: the doctor beside it, and again with its fix applied."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.campaigns.doctor.faults import FROM_FIX, NOT_HERE, UP, Fault
from tests.support.running import ROOT

NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
MOST_SECONDS = 20
_TIMEOUT = 18  # of the doctor, which has to start and end too
_PATIENT = 240  # its own default, for what is healthy but maybe slow
_GIVEN_UP = 300
Json = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What a doctor printed, and how long it took. `checks` is empty if it was not a report."""

    code: int
    seconds: float
    checks: list[Json]
    text: str

    def named(self, fault: Fault) -> Json | None:
        """The check that names the fault, if there is one, with the status that belongs to it."""
        for check in self.checks:
            named = re.fullmatch(fault.title, check["title"]) and re.search(fault.says, check["found"], re.S | re.I)
            if named and check["status"] == fault.status and re.search(fault.fix, check["fix"], re.S):
                return check
        return None

    def summary(self) -> str:
        wrong = [one for one in self.checks if one["status"] != "ok"]
        lines = [f"{one['status']} {one['title']}: {one['found']} [{one['fix']}]" for one in wrong]
        return f"exit {self.code}; " + (" | ".join(lines) or self.text[-600:])


@dataclass(frozen=True)
class Verdict:
    """`wrong` is empty for a fault that was named, and mended if that can be done here."""

    seconds: float
    wrong: str = ""

    @property
    def good(self) -> bool:
        return not self.wrong and self.seconds <= MOST_SECONDS

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s {self.wrong or ('named' if self.good else 'TOO SLOW')}"


def tried(stand_ins: Path, fault: Fault) -> Verdict:
    """The doctor beside a fault, and again with the fix."""
    outcome = _doctor(stand_ins, fault.made, fault, _TIMEOUT)
    check = outcome.named(fault)
    if check is None or outcome.code != (1 if fault.status == "error" else 0):
        return Verdict(outcome.seconds, f"NOT NAMED: {outcome.summary()}")
    if fault.mend == NOT_HERE:
        return Verdict(outcome.seconds)
    mend = commands_in(check["fix"]) if fault.mend == FROM_FIX else fault.mend
    again = _doctor(stand_ins, f"{fault.made}\n{mend}", fault, _PATIENT, strikes=False)
    still = [one for one in again.checks if one["title"] == check["title"] and one["status"] != "ok"]
    if again.checks and again.code == 0 and not still:
        return Verdict(outcome.seconds)
    return Verdict(outcome.seconds, f"NOT MENDED by {mend!r}: {again.summary()}")


def healthy(stand_ins: Path) -> str:
    """What a doctor says wrongly of a healthy machine, "" if nothing."""
    outcome = _doctor(stand_ins, UP, Fault("none", UP, "", "", ""), _PATIENT)
    wrong = [one for one in outcome.checks if one["status"] == "error"]
    return "" if outcome.code == 0 and not wrong else outcome.summary()


def commands_in(fix: str) -> str:
    """The commands of a fix: what stands in backticks, and lines that export a variable."""
    return "\n".join([*re.findall(r"`([^`]+)`", fix), *re.findall(r"^export [^#\n]*", fix, re.M)])


def _doctor(stand_ins: Path, lines: str, fault: Fault, timeout: int, strikes: bool = True) -> Outcome:
    """The doctor after these lines of bash, in namespaces and a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "hf").mkdir()
        doctor = f"{sys.executable} -m launch doctor --json --timeout {timeout}"
        environment = {
            **os.environ,
            "S": name, "STAND": str(stand_ins), "DOCTOR": doctor,
            "TMPDIR": f"{name}/tmp", "HF_HOME": f"{name}/hf", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        # Without `set -e`, what follows a mount that failed would change the machine's own folders.
        script = f"set -e\n{lines}\nset +e\n$DOCTOR {fault.words or '--num_processes 2'}\nexit $?"
        began = time.monotonic()
        with subprocess.Popen(
            [*NAMESPACES, script], env=environment, cwd=folder, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            if fault.strike and strikes:
                threading.Thread(target=_strike, args=(process, folder / "tmp", fault)).start()
            text, errors = process.communicate(timeout=_GIVEN_UP)
        return Outcome(process.returncode, time.monotonic() - began, _checks(text), text + errors)


def _checks(text: str) -> list[Json]:
    try:
        return json.loads(text[text.index("{") :])["checks"]
    except (ValueError, KeyError):
        return []


def _strike(process: subprocess.Popen[str], folder: Path, fault: Fault) -> None:
    """Send rank 1 of each probe run the signal as soon as it connects."""
    struck: set[Path] = set()
    while process.poll() is None:
        for notes in folder.glob("recipes-*/1/answer.json"):
            with contextlib.suppress(OSError):
                if notes not in struck and not (fault.once and struck) and '"connection"' in notes.read_text():
                    struck.add(notes)
                    _signal(str(notes.parent), getattr(signal, fault.strike))
        time.sleep(0.005)


def _signal(argument: str, number: int) -> None:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument in file.read_text().split("\0"):
                os.kill(int(file.parent.name), number)
