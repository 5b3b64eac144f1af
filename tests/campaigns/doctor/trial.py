"""One fault, made for real: the doctor beside it, and again with its fix applied."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
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


class Trials:
    """Runs the doctor of the checkout `code`, with the stand-ins in `stand_ins`."""

    def __init__(self, code: Path, stand_ins: Path) -> None:
        self.code, self.stand_ins = code, stand_ins

    def run(self, lines: str, words: str, timeout: int, strike: str = "", once: bool = False) -> Outcome:
        folder = Path(tempfile.mkdtemp(prefix="fault-"))
        for name in ("tmp", "hf"):
            (folder / name).mkdir()
        doctor = f"{sys.executable} -m launch doctor --json --timeout {timeout}"
        environment = {
            **os.environ,
            "S": str(folder), "STAND": str(self.stand_ins), "DOCTOR": doctor,
            "TMPDIR": str(folder / "tmp"), "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(self.code),
        }  # fmt: skip
        # Without `set -e`, what follows a mount that failed would change the machine's own folders.
        script = f"set -e\n{lines}\nset +e\n$DOCTOR {words or '--num_processes 2'}\nexit $?"
        began = time.monotonic()
        with subprocess.Popen(
            [*NAMESPACES, script], env=environment, cwd=folder, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            if strike:
                watcher = threading.Thread(target=_strike, args=(process, folder / "tmp", strike, once))
                watcher.start()
            try:
                text, errors = process.communicate(timeout=_GIVEN_UP)
            except subprocess.TimeoutExpired:
                process.kill()
                text, errors = process.communicate()
        seconds = time.monotonic() - began
        shutil.rmtree(folder, ignore_errors=True)
        return Outcome(process.returncode, seconds, _checks(text), text + errors)


def _checks(text: str) -> list[Json]:
    try:
        return json.loads(text[text.index("{") :])["checks"]
    except (ValueError, KeyError):
        return []


def _strike(process: subprocess.Popen[str], folder: Path, name: str, once: bool) -> None:
    """Send rank 1 of each probe run a signal as soon as it connects."""
    struck: set[Path] = set()
    while process.poll() is None:
        for notes in folder.glob("recipes-*/1/answer.json"):
            with contextlib.suppress(OSError):
                if notes not in struck and not (once and struck) and '"connection"' in notes.read_text():
                    struck.add(notes)
                    _signal(str(notes.parent), getattr(signal, name))
        time.sleep(0.005)


def _signal(argument: str, number: int) -> None:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument in file.read_text().split("\0"):
                os.kill(int(file.parent.name), number)


@dataclass(frozen=True)
class Verdict:
    fault: Fault
    named: bool
    mended: bool | None  # None where what mends it needs another machine
    seconds: float
    why: str

    @property
    def good(self) -> bool:
        return self.named and self.mended is not False and self.seconds <= MOST_SECONDS


def tried(trials: Trials, fault: Fault) -> Verdict:
    """The doctor beside a fault, and again with the fix."""
    outcome = trials.run(fault.made, fault.words, _TIMEOUT, fault.strike, fault.once)
    check = outcome.named(fault)
    if check is None or outcome.code != (1 if fault.status == "error" else 0):
        return Verdict(fault, False, False, outcome.seconds, _summary(outcome))
    if fault.mend == NOT_HERE:
        return Verdict(fault, True, None, outcome.seconds, "")
    mend = commands_in(check["fix"]) if fault.mend == FROM_FIX else fault.mend
    again = trials.run(f"{fault.made}\n{mend}", fault.words, _PATIENT)
    still = [one for one in again.checks if one["title"] == check["title"] and one["status"] != "ok"]
    mended = bool(again.checks) and again.code == 0 and not still
    return Verdict(fault, True, mended, outcome.seconds, "" if mended else f"after {mend!r}: {_summary(again)}")


def commands_in(fix: str) -> str:
    """The commands of a fix: what stands in backticks, and lines that export a variable."""
    return "\n".join([*re.findall(r"`([^`]+)`", fix), *re.findall(r"^export [^#\n]*", fix, re.M)])


def _summary(outcome: Outcome) -> str:
    wrong = [one for one in outcome.checks if one["status"] != "ok"]
    lines = [f"{one['status']} {one['title']}: {one['found']} [{one['fix']}]" for one in wrong]
    return f"exit {outcome.code}; " + (" | ".join(lines) or outcome.text[-600:])


def healthy(trials: Trials) -> str:
    """What a doctor says wrongly of a healthy machine, "" if nothing."""
    outcome = trials.run(UP, "", _PATIENT)
    wrong = [one for one in outcome.checks if one["status"] == "error"]
    return "" if outcome.code == 0 and not wrong else _summary(outcome)
