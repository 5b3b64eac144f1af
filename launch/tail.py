"""Reading a log while it is being written."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path


def follow(log: Path, ended: Callable[[], bool], start: int = 0, seconds: float = 0.2) -> None:
    """Copy the log to stdout from byte `start`, and what is added, until the run has ended. It may not exist yet."""
    while True:
        done = ended()  # asked before reading, so that its last words are read
        start += _copy(log, start)
        if done:
            return
        time.sleep(seconds)


def _copy(log: Path, start: int) -> int:
    """Copy what stands after `start`. Returns how many bytes that were."""
    try:
        with log.open("rb") as stream:
            stream.seek(start)
            text = stream.read()
    except FileNotFoundError:
        return 0
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return len(text)


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
