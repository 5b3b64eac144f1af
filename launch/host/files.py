"""Writing files so that a crash leaves the old or the new, and why the machine takes no more."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from recipes.errors import UserError


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
    """The content of a file. Raises `OSError` for a pipe, which waits for its writer."""
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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
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

_NO_SHARED_MEMORY = ("out of shared memory", "unable to allocate shared memory", "shared memory segment")
# torch's words when `end_workers_that_cannot_send` has ended a worker.
_WORKER_ENDED = re.compile(r"exited unexpectedly with exit code (\d+)\.")
_FEW_FILES = (errno.EMFILE, errno.ENFILE)
_FULL = (errno.ENOSPC, errno.EDQUOT)  # of inodes too: `df -i`


class StorageFailure(NamedTuple):
    """`what` happened, and the `remedy` as the start of a sentence."""

    what: str
    remedy: str


def storage_failure(error: BaseException, folder: Path | None = None) -> StorageFailure | None:
    """The machine's part in an error with a file. None if it had none: then it is another error.

    If `folder`, which the run has written to, takes no file now, that is the machine's doing too,
    whatever a library makes of it: torch only says that its stream has failed.
    """
    for failed in _causes(error):
        code = _code_of_sending(failed)
        if code == errno.ENOSPC:
            return StorageFailure("/dev/shm is full", "Make it larger or take --dataloader_num_workers 0")
        if code:
            return StorageFailure(os.strerror(code), "Run `ulimit -n 4096`")
        refused = getattr(failed, "errno", None)
        if refused in (*_FULL, errno.EROFS) and not isinstance(error, UserError):
            file = os.fsdecode(getattr(failed, "filename", None) or folder or "a file")
            what = f"{file} cannot be written: {os.strerror(refused)}"
            return StorageFailure(what, "Make room there, or set HF_HOME if it is a cache")
    if folder and folder.exists() and not isinstance(error, UserError):
        try:
            require_writable(folder, size=2**20)  # a full disk may still take a byte
        except OSError as refusal:
            what = f"{folder} cannot be written any more: {refusal.strerror}"
            return StorageFailure(what, "Make room" if refusal.errno in _FULL else "Make it writable")
    return None


@functools.cache  # once in a process
def end_workers_that_cannot_send() -> None:
    """From now on a DataLoader worker ends if it has no shared memory or no files for its batch.

    Python only prints that the batch cannot be sent, and torch waits for it forever.
    """
    import multiprocessing  # which no mistake has to wait for
    from multiprocessing.queues import Queue

    only_print, only_print_too = Queue._on_queue_feeder_error, sys.excepthook  # type: ignore[attr-defined]

    def end_worker(error: BaseException) -> None:
        code = _code_of_sending(error)
        if code and multiprocessing.parent_process() is not None:
            os._exit(code)

    def while_sent(error: Exception, item: object) -> None:
        end_worker(error)
        only_print(error, item)

    def while_fetched(kind, error: BaseException, traceback) -> None:
        end_worker(error)  # the thread that hands over a batch's file tries again at once, and forever
        only_print_too(kind, error, traceback)

    Queue._on_queue_feeder_error, sys.excepthook = staticmethod(while_sent), while_fetched  # type: ignore[attr-defined]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised for. The system's own is often the cause of a library's."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _code_of_sending(error: BaseException) -> int:
    """The system's reason why a worker's batch could not be sent, in the worker as in the process
    that waits for it; 0 if it is another error.
    """
    if any(words in str(error) for words in _NO_SHARED_MEMORY):
        return errno.ENOSPC
    if ended := _WORKER_ENDED.search(str(error)):
        return int(ended[1]) if int(ended[1]) in (errno.ENOSPC, *_FEW_FILES) else 0
    return error.errno or 0 if isinstance(error, OSError) and error.errno in _FEW_FILES else 0
