"""Reading a log while it is being written."""

from __future__ import annotations

import codecs
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from recipes.errors import mistake


def follow(log: Path, ended: Callable[[], bool], start: int = 0, ask_every: float = 0.2) -> None:
    """Copy the log to stdout from byte `start`, and what is added, until the run has ended. It may not exist yet.

    Whether it has ended is asked every `ask_every` seconds; the log is looked at more often.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may come in two parts
    asked, done = float("-inf"), False
    while True:
        now = time.monotonic()
        if now - asked >= ask_every:
            asked, done = now, ended()  # asked before reading, so that its last words are read
        added = _after(log, start)
        start += len(added)
        sys.stdout.write(decoder.decode(added, final=done))
        sys.stdout.flush()
        if done:
            return
        time.sleep(min(0.2, ask_every))


def _after(log: Path, start: int) -> bytes:
    try:
        with log.open("rb") as stream:
            stream.seek(start)
            return stream.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise mistake("logs", f"{log} cannot be read: {error.strerror}", "a log that can") from None


def last_words(log: Path, longest: int = 80) -> str:
    """The last line about a step, else the last one with something in it, in short; empty where there is none."""
    try:
        with log.open("rb") as stream:
            stream.seek(-min(1 << 16, stream.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines()]
    except OSError:
        return ""
    about_steps = (line for line in reversed(lines) if re.search(r"\bstep \d+", line))
    last = next(about_steps, None) or next((line for line in reversed(lines) if line), "")
    return last if len(last) <= longest else last[: longest - 3] + "..."
