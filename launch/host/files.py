"""Writing files atomically."""

from __future__ import annotations

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
        unfinished.unlink(missing_ok=True)
