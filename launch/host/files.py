"""Writing files so that a crash leaves the old or the new, and having them on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


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


def flush(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk when this returns.

    Some file systems of a network or a cloud cannot flush a folder: there is nothing to wait for.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH:
            raise
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that a crash does not take what is written into it."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        with contextlib.suppress(OSError):  # one may write into a folder that one may not read
            flush(path.parent)
