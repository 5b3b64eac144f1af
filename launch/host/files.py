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


def require_writable(folder: Path, size: int = 1) -> None:
    """Raises `OSError` if no file of `size` bytes can be written into a folder, or into the
    innermost one around it if it is missing. Nothing is left there.

    A file is really written: permissions say nothing of a read-only disk, or of root.
    """
    for place in (folder, *folder.parents):
        with contextlib.suppress(FileNotFoundError):
            place.lstat()
            break
    with tempfile.NamedTemporaryFile(dir=place, prefix=".writable-") as probe:
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

# No mistake in a program ends like this. With the start of a sentence that says what to do; empty
# if a user can do nothing.
_OF_MACHINE = {
    errno.ENOSPC: "Make room",  # of inodes too (`df -i`)
    errno.EDQUOT: "Make room",
    errno.EFBIG: "Run `ulimit -f unlimited`",
    errno.EMFILE: "Run `ulimit -n 4096`",
    **dict.fromkeys((errno.ENFILE, errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.ENOLCK), ""),
}
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_ANOTHER_CACHE = "Set HF_HOME (or TORCH_EXTENSIONS_DIR, TRITON_CACHE_DIR) to a writable folder with room"
_NO_SHARED_MEMORY = ("out of shared memory", "unable to allocate shared memory", "shared memory segment")
# torch's words when `end_workers_that_cannot_send` has ended a worker.
_WORKER_ENDED = re.compile(r"exited unexpectedly with exit code (\d+)\.")


class StorageFailure(NamedTuple):
    """`what` happened, and the `remedy` as the start of a sentence; empty if a user has none."""

    what: str
    remedy: str


def storage_failure(error: BaseException, folder: Path | None = None) -> StorageFailure | None:
    """The machine's part in an error with a file. None if it had none: then it is another error.

    `folder` is one that was written to before. If it takes no file now, that is the machine's doing
    too, whatever a library makes of it: torch only says that its stream has failed.
    """
    for failed in _causes(error):
        code = _code_of_sending(failed)
        if code == errno.ENOSPC:
            return StorageFailure("/dev/shm is full", "Make it larger or take --dataloader_num_workers 0")
        code, file = code or _code(failed), os.fsdecode(getattr(failed, "filename", None) or folder or "a file")
        remedy = _ANOTHER_CACHE if code in _REFUSED and _is_of_a_cache(Path(file)) else _OF_MACHINE.get(code)
        if remedy is not None:
            return StorageFailure(f"{file} cannot be read or written: {os.strerror(code)}", remedy)
    if folder and not isinstance(error, UserError):
        try:
            # Until a run has made it, only an error that names it is of that folder.
            if folder.exists() or any(str(folder) in str(failed) for failed in _causes(error)):
                folder.lstat()
                require_writable(folder, size=2**20)  # a full disk may still take a byte
        except OSError as refusal:
            what = f"{folder} cannot be written any more: {refusal.strerror}"
            return StorageFailure(what, _OF_MACHINE.get(refusal.errno or 0, "Make it writable"))
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
    """Why a worker's batch could not be sent, in the worker as in the process that waits for it; 0
    if it is another error.
    """
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_SHARED_MEMORY):
        return errno.ENOSPC
    ended = _WORKER_ENDED.search(str(error))
    code, full = (int(ended[1]), errno.ENOSPC) if ended else (_code(error), 0)
    return code if code in (errno.EMFILE, errno.ENFILE, full) else 0


def _code(error: BaseException) -> int:
    """The system's error number: Python's own, or by its words in a message; 0 if there is none."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    return next((code for code, remedy in _OF_MACHINE.items() if remedy and os.strerror(code) in str(error)), 0)


def _is_of_a_cache(file: Path) -> bool:
    """Libraries write below the home folder, or where these say: read-only in many containers."""
    named = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR")
    folders = [folder for name in named if (folder := os.environ.get(name))]
    return bool({".cache", ".triton"} & {*file.parts}) or any(map(file.is_relative_to, folders))
