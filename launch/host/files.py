"""Writing files so that a crash leaves the old or the new, and why the machine takes no more."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path

from recipes.errors import one_line


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


def flush(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if path.is_file():
            raise  # some file systems of a network or a cloud cannot flush a folder
    finally:
        os.close(handle)


def require_writable(folder: Path, size: int = 1) -> None:
    """Raises `OSError` if no file of `size` bytes can be written into a folder, or into the
    innermost one around it if it is missing.

    A file is really written: permissions say nothing of a read-only disk, or of root.
    """
    while not folder.exists():
        folder = folder.parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-") as probe:
        probe.write(bytes(size))


class _Unheard(io.FileIO):
    """A stream whose reader may go, and whose disk may be full: then what is printed is lost."""

    def write(self, data) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return len(data)


def print_without_reader() -> None:
    """From now on no print ends this process: a training goes on when `| head -1` has closed its
    pipe, as it does under nohup, and saves its last step when its terminal is closed.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Unheard(stream.fileno(), "w", closefd=False))
            unheard = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, unheard)


# --- The machine takes no more --------------------------------------------------------------------

# The system's words, also inside a library's own, and the start of the remedy.
_REMEDIES = {
    "No space left on device|Disk quota exceeded": "Make room",  # of inodes too: `df -i`
    "Read-only file system": "Make it writable",
    "Too many open files": "Run `ulimit -n 4096`",
    "Bus error|exited unexpectedly|allocate shared memory|shared memory segment": (
        "Make /dev/shm larger, or take --dataloader_num_workers 0"
    ),
}


def storage_failure(error: BaseException, folder: Path | None = None) -> tuple[str, str] | None:
    """What the machine refused, and the start of the remedy; None if an error has another reason.

    If `folder`, which the run has written to, takes no file now, that is the machine's doing too,
    whatever a library makes of it: torch only says that its stream has failed.
    """
    cause: BaseException | None = error
    while cause is not None:  # the system's own error is often the cause of a library's
        if remedy := _remedy(cause):
            return one_line(cause).rstrip("."), remedy
        cause = cause.__cause__ or cause.__context__
    if folder and folder.exists():
        try:
            require_writable(folder, size=2**20)  # a full disk may still take a byte
        except OSError as refusal:
            what = f"{folder} cannot be written any more: {refusal.strerror}"
            return what, _remedy(refusal) or "Make it writable"
    return None


def _remedy(error: BaseException) -> str | None:
    return next((remedy for words, remedy in _REMEDIES.items() if re.search(words, str(error))), None)


def end_workers_that_cannot_send() -> None:
    """From now on a DataLoader worker ends if it has no shared memory or no files for its batch.

    Python only prints that the batch cannot be sent, and torch waits for it forever.
    """
    import multiprocessing  # which no mistake has to wait for
    from multiprocessing.queues import Queue

    def end_worker(error: Exception, item: object) -> None:
        print(f"a worker cannot send its batch: {one_line(error)}", file=sys.stderr, flush=True)
        if multiprocessing.parent_process() is not None:
            os._exit(1)

    Queue._on_queue_feeder_error = staticmethod(end_worker)  # type: ignore[attr-defined]
