"""A log, read while it is being written."""

from __future__ import annotations

import codecs
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote

from recipes.errors import mistake


def follow(log: Path, ended: Callable[[], bool], start: int = 0, ask_every: float = 0.2) -> None:
    """Copy the log to stdout from byte `start`, and what is added, until `ended()`.

    The log may not exist yet. It is read more often than `ended`, every `ask_every` seconds.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character can arrive in two parts
    asked, done = float("-inf"), False
    while True:
        now = time.monotonic()
        if now - asked >= ask_every:
            asked, done = now, ended()  # before reading, so that the last lines are read too
        added = _after(log, start)
        start += len(added)
        sys.stdout.write(decoder.decode(added, final=done))
        sys.stdout.flush()
        if done:
            return
        time.sleep(min(0.2, ask_every))


def print_log(
    log: Path, folder: Path, following: bool, state: Callable[[], str], is_over: Callable[[str], bool], ask_every: float
) -> None:
    """Print a run's log; with `following` go on until its target says that the run is over.

    Raises `UserError` if there is no log, unless the run may still write one.
    """
    if not log.exists():
        now = state()
        if is_over(now):
            raise mistake("logs", f"there is no {log}: {now or 'the run has ended'}", "submit it again")
        if not following:
            fix = f"recipes logs -f {quote(str(folder))}, which waits"
            raise mistake("logs", f"there is no {log}: {now}", fix)
    follow(log, lambda: not following or is_over(state()), ask_every=ask_every)


def _after(log: Path, start: int) -> bytes:
    try:
        with log.open("rb") as stream:
            stream.seek(start)
            return stream.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise mistake("logs", f"{log} cannot be read: {error.strerror}", "choose a readable log") from None


def last_line(log: Path, longest: int = 80) -> str:
    """The last line about a step, else the last line with text, shortened; or an empty string."""
    try:
        with log.open("rb") as stream:
            stream.seek(-min(1 << 16, stream.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines()]
    except OSError:
        return ""
    about_steps = (line for line in reversed(lines) if re.search(r"\bstep \d+", line))
    last = next(about_steps, None) or next((line for line in reversed(lines) if line), "")
    return last if len(last) <= longest else last[: longest - 3] + "..."
