"""Writing files so that a crash leaves the old or the new, having them on the disk, and printing
though nobody reads it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
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
        with contextlib.suppress(OSError):  # on a read-only disk it raises even for a file that is not there
            unfinished.unlink()


def read_regular(file: Path) -> bytes:
    """What a file holds. Raises `OSError` for what is not a file: a pipe waits for its writer."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a file", str(file))
    return file.read_bytes()


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


def require_writable(folder: Path) -> None:
    """Raises `OSError` if a file cannot be written into a folder that is there or could be made.
    Nothing is left there.
    """
    for place in (folder, *folder.parents):
        with contextlib.suppress(FileNotFoundError):
            place.lstat()
            break
    probe = place / f".writable-{os.uname().nodename}-{os.getpid()}"
    try:
        probe.write_bytes(b"x")
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


class _Unheard(io.FileIO):
    """A stream whose reader may go, and whose disk may be full: then what is printed is lost."""

    def write(self, data) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return len(data)


def print_without_reader() -> None:
    """From now on no print ends this process: a training goes on when `| head -1` has closed its
    pipe, as it does under nohup.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Unheard(stream.fileno(), "w", closefd=False))
            unheard = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, unheard)
