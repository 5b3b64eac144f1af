"""What really becomes of a case: it is started in a process of its own, with a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns.legality import rank
from tests.campaigns.legality.case import LIFTED, Case, flags, variables
from tests.campaigns.legality.start import forked, start

SECONDS = 90  # a run takes one or two; only a hang takes as long


@dataclass
class Outcome:
    """`code` is the exit code of the launcher, None if it was killed because it took too long.

    `seen` is what each rank observed, `record` the run.json. `refused_by_parser` is what Hugging
    Face's own parser says of the flags, if it refuses them.
    """

    code: int | None
    output: str
    seen: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    refused_by_parser: str = ""

    @property
    def finished(self) -> bool:
        return self.code == 0 and self.record.get("status") == "finished"

    @property
    def traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output

    @property
    def mistake(self) -> bool:
        """Whether train.py refused it as a mistake of the user's, without a traceback."""
        before, printed, _ = f"\n{self.output}".partition("\nerror  ")
        return bool(self.code and printed) and "Traceback" not in before

    @property
    def processes(self) -> int:
        """How many processes trained one model together, as each of them saw it."""
        seen = {rank.get("processes") for rank in self.seen}
        return len(self.seen) if seen == {len(self.seen)} else -1

    @property
    def batch(self) -> int:
        """Examples of the first step over all ranks. Ranks that share their examples count once."""
        rows = [rank["rows"].get("1", []) for rank in self.seen]
        shared = len(rows) > 1 and all(own == rows[0] for own in rows) and len(set(rows[0])) > 1
        return len(rows[0]) if shared else sum(len(own) for own in rows)

    @property
    def trained(self) -> list[Any]:
        """Everything by which two trainings can be told apart, of each rank."""
        names = ("engine", "rows", "losses", "weights", "evaluations", "checkpoints")
        return [[rank.get(name) for name in names] for rank in self.seen]

    def last_words(self) -> str:
        """The line that says why it failed, as short as it can be copied."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip() and line.isprintable()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failure)\b.*:", line)]
        refused = [line for line in lines if line.startswith("error ")]
        return (errors or refused or lines or ["(no output)"])[-1][:240]


def tried(case: Case, folder: Path, *, checked: bool, seconds: float = SECONDS) -> Outcome:
    """Run a case that is written in the current `folder`."""
    log = folder / "log.txt"
    with log.open("wb") as stream:
        code = _ended(_started(case, checked, stream.fileno()), seconds)
    seen = [json.loads(file.read_text()) for file in sorted(Path(rank.FOLDER).glob("*.json"))]
    refused = "" if checked else _refused_by_parser(case)
    return Outcome(code, log.read_text(errors="replace"), seen, _record(folder), refused)


def _refused_by_parser(case: Case) -> str:
    """What Hugging Face's own parser of these dataclasses says of the flags."""
    from transformers import HfArgumentParser, TrainingArguments

    from recipes.flags import RunFlags

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _, unknown = HfArgumentParser((TrainingArguments, RunFlags), allow_abbrev=False).parse_known_args(
                flags(case)
            )  # type: ignore[arg-type]
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    known = {field.name for cls in (TrainingArguments, RunFlags) for field in dataclasses.fields(cls)}
    unknown += [change.name for change in case.of("config") if change.name not in known]
    return f"unknown: {' '.join(unknown)}" if unknown else ""


def _started(case: Case, checked: bool, log: int) -> int:
    environment = {**os.environ, **variables(case), **({} if checked else {"LEGALITY_UNCHECKED": "1"})}
    if case.lifted:
        environment[LIFTED] = "1"

    def work() -> int:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        return start(case)

    return forked(work, environment)


def _ended(pid: int, seconds: float) -> int | None:
    """The exit code of a process, None if it took longer. Its whole session is dead afterwards."""
    deadline, code = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if code is None:
        os.waitpid(pid, 0)
    return code


def _record(folder: Path) -> dict[str, Any]:
    found = [file for file in sorted(folder.rglob("run.json")) if file.is_file()]
    return json.loads(found[0].read_text()) if found else {}
