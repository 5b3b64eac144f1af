"""Writing files atomically."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(file: Path, content: bytes) -> None:
    """Write or replace a file in one step: after a crash it is the old one or the new one.

    Makes its folder.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.name}-{os.getpid()}")
    try:
        with unfinished.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    finally:
        with contextlib.suppress(OSError):  # on a read-only disk it raises even for a file that is not there
            unfinished.unlink()
