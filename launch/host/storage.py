"""Why a file could not be written, read or opened, in words: what the machine did, and its remedy.

Libraries in C++ and Rust keep the system's words of an error, or nothing at all: then the folder
is asked.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

FULL = (errno.ENOSPC, errno.EDQUOT)
# Whatever the file: no mistake in a program ends like this.
_ANYWHERE = (
    *FULL, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ENOLCK,
)  # fmt: skip
# In a folder that was written to before. A FUSE mount whose process has died is "not connected".
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTCONN)
_GONE = (errno.ENOENT, errno.ENOTDIR)
# torch's words when the stream behind a file has failed, without the system's.
_STREAM_FAILED = ("iostream error", "unexpected pos", "file write failed", "Parent directory")
_SHARED_MEMORY = Path("/dev/shm")
_NO_SHARED_MEMORY = ("out of shared memory", "unable to allocate shared memory", "shared memory segment")
_WORKER_ENDED = "exited unexpectedly with exit code {}."  # torch's words of `end_workers_that_cannot_send`
_PROBE_BYTES = 2**20


@dataclass(frozen=True)
class StorageFailure:
    """`what` happened, and the `remedy` as the start of a sentence; empty if a user has none."""

    what: str
    remedy: str = ""


_NO_ROOM_FOR_WORKERS = StorageFailure(f"{_SHARED_MEMORY} is full", "Make it larger or take --dataloader_num_workers 0")


def storage_failure(error: BaseException, folder: Path | None = None) -> StorageFailure | None:
    """What the machine did to a file. None if it did nothing: then the error is another one.

    `folder` is one that was written to before: that it cannot be any more is the machine's doing
    too.
    """
    for failed in causes(error):
        code = _code_of_sending(failed)
        if code == errno.ENOSPC:
            return _NO_ROOM_FOR_WORKERS
        code = code or _code(failed)
        if folder and code is None and _is_of_a_stream(failed):
            code = refusal(folder) or errno.EIO
        if code in _ANYWHERE or (folder and _is_changed(folder, code, failed)):
            return _described(code, failed, folder)
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

    def while_fetched(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        end_worker(error)  # the thread that hands over a batch's file tries again at once, and forever
        only_print_too(kind, error, traceback)

    Queue._on_queue_feeder_error, sys.excepthook = staticmethod(while_sent), while_fetched  # type: ignore[attr-defined]


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised for. The system's own is often the cause of a library's."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def refusal(folder: Path) -> int | None:
    """The system's error number for writing to a folder now. None if that works."""
    probe = folder / f".writable-{os.getpid()}"
    try:
        with probe.open("wb") as stream:
            stream.write(b"x" * _PROBE_BYTES)
    except OSError as error:
        return error.errno
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    return errno.EFBIG if limited else None


def _code_of_sending(error: BaseException) -> int | None:
    """Why a worker's batch could not be sent, in the worker as in the process that waits for it."""
    words = str(error)
    if isinstance(error, RuntimeError) and any(said in words for said in _NO_SHARED_MEMORY):
        return errno.ENOSPC
    for code in (errno.ENOSPC, errno.EMFILE, errno.ENFILE):
        if isinstance(error, RuntimeError) and _WORKER_ENDED.format(code) in words:
            return code
    return own if (own := _code(error)) in (errno.EMFILE, errno.ENFILE) else None


def _code(error: BaseException) -> int | None:
    """The system's error number: Python's own, or by its words in a library's message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    # SafetensorError is an Exception and nothing more.
    if not isinstance(error, (OSError, RuntimeError)) and type(error).__name__ != "SafetensorError":
        return None
    return next((code for code in (*_ANYWHERE, *_REFUSED, *_GONE) if os.strerror(code) in str(error)), None)


def _is_of_a_stream(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _STREAM_FAILED)


def _is_changed(folder: Path, code: int | None, error: BaseException) -> bool:
    """Whether the error is that the folder takes no files any more."""
    if code in _GONE:
        return not folder.exists()
    name = getattr(error, "filename", None)
    if name is None:
        return code in _REFUSED and refusal(folder) == code
    return code in _REFUSED and Path(os.fsdecode(name)).absolute().is_relative_to(folder.absolute())


def _described(code: int | None, error: BaseException, folder: Path | None) -> StorageFailure:
    if code == errno.ENOSPC:
        full = _what_is_full(error, folder)
        return _NO_ROOM_FOR_WORKERS if str(_SHARED_MEMORY) in full else StorageFailure(full, "Make room")
    if code == errno.EDQUOT:
        return StorageFailure("the disk quota is used up", "Make room")
    if code == errno.EFBIG:
        size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return StorageFailure(
            f"no file may be larger than {size:,} bytes here (`ulimit -f`)", "Run `ulimit -f unlimited`"
        )
    if code == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return StorageFailure(f"no more than {limit} files may be open here (`ulimit -n`)", "Run `ulimit -n 4096`")
    if code == errno.ENFILE:
        return StorageFailure("too many files are open on this machine")
    if folder and code in _GONE:
        return StorageFailure(f"{folder} was moved or removed")
    if folder and code in _REFUSED:
        return StorageFailure(f"{folder} cannot be written any more: {os.strerror(code)}", "Make it writable")
    file = getattr(error, "filename", None) or folder or "a file"
    return StorageFailure(f"{file} cannot be read or written: {os.strerror(code or errno.EIO)}")


def _what_is_full(error: BaseException, folder: Path | None) -> str:
    name = getattr(error, "filename", None)
    places = [Path(os.fsdecode(name)).parent] if name else [_SHARED_MEMORY, Path(tempfile.gettempdir())]
    for place in (folder, *places):
        if place is None or not place.exists():
            continue
        state = os.statvfs(place)
        of = "the disk" if place == folder else f"the disk of {place}"
        if state.f_files and not state.f_favail:  # some file systems do not count them
            return f"{of} has no inodes left for files"
        if state.f_bavail * state.f_frsize < _PROBE_BYTES:
            return f"{of} is full"
    return "the disk is full"
