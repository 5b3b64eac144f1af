"""Write files atomically, and explain why the machine refuses a write."""

import atexit
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from recipes.errors import mistake, one_line


def write_whole(file: Path, content: bytes) -> None:
    """Write or replace a file atomically: after a crash it holds the old or the new content. The
    file's folder is created if it is missing.
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
        with contextlib.suppress(OSError):  # on a read-only disk unlink raises even for a missing file
            unfinished.unlink()


def flush(path: Path) -> None:
    """Flush a file's bytes, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if path.is_file():
            raise  # some network and cloud file systems cannot flush a folder
    finally:
        os.close(handle)


def share(like: Path) -> None:
    """Give the weights beside the file `like` its permissions. safetensors 0.8 lets only the owner
    read the files that it writes (safetensors#782), so another user's server would find no model.
    """
    for file in like.parent.glob("*.safetensors"):
        with contextlib.suppress(OSError):  # a mounted bucket may have no permissions
            file.chmod(like.stat().st_mode)


def require_writable(folder: Path, size: int = 1) -> None:
    """Raise `OSError` if no file of `size` bytes can be written into a folder. If the folder is
    missing, its nearest existing parent is tested.

    The test writes a real file, because a disk may be read-only, and root ignores permissions.
    """
    while not folder.exists():
        folder = folder.parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-") as probe:
        probe.write(bytes(size))


@contextlib.contextmanager
def writing(place: object, flag: str = "output_dir", fix: str = "choose a writable folder") -> Iterator[None]:
    """Turn an `OSError` in this block into a `UserError` that says: `place` cannot be written."""
    try:
        yield
    except OSError as error:
        raise mistake(flag, f"{place} cannot be written: {error.strerror}", fix) from None


class _Unheard(io.FileIO):
    """A stream that drops its output when its reader has gone or its disk is full."""

    def write(self, data) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return len(data)


def print_without_reader() -> None:
    """From now on, ignore failed prints to stdout and stderr. So a training continues after
    `| head -1` has closed its pipe, and saves its last step after its terminal is closed.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Unheard(stream.fileno(), "w", closefd=False))
            unheard = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, unheard)


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Make the process exit with the code that `main` returns. Functions registered with `atexit`
    are called, but the objects of torch are not freed one by one.
    """
    codes: list[int] = []
    atexit.register(lambda: codes and os._exit(codes[0]))  # the function registered first is called last
    codes.append(main())
    sys.stdout.flush()
    sys.exit(codes[0])


# --- Why the machine refuses a write --------------------------------------------------------------

# The system's error texts, which libraries quote in their errors, and the start of each remedy.
_REMEDIES = {
    "No space left on device|Disk quota exceeded": "Make room",  # perhaps out of inodes: `df -i`
    "Read-only file system": "Make the disk writable",
    "Too many open files": "Run `ulimit -n 4096`",
    "Bus error|exited unexpectedly|allocate shared memory|shared memory segment": (
        "Make /dev/shm larger, or use --dataloader_num_workers 0"
    ),
}


def storage_failure(error: BaseException, folder: Path | None = None) -> tuple[str, str] | None:
    """Return two texts: what the system refused, and how the fix begins, such as "Make room". None
    if the error has another cause. The text of an error may hide a full disk: torch only reports
    that its stream has failed. So any error is a storage failure if no file can now be written into
    `folder`, to which the run wrote.
    """
    cause: BaseException | None = error
    while cause is not None:  # the system's own error is often the cause of a library's error
        if remedy := _remedy(cause):
            return one_line(cause).rstrip("."), remedy
        cause = cause.__cause__ or cause.__context__
    if folder and folder.exists():
        try:
            require_writable(folder, size=2**20)  # a full disk may still accept a byte
        except OSError as refusal:
            what = f"{folder} can no longer be written: {refusal.strerror}"
            return what, _remedy(refusal) or "Make the disk writable"
    return None


def _remedy(error: BaseException) -> str | None:
    return next((remedy for words, remedy in _REMEDIES.items() if re.search(words, str(error))), None)


def end_workers_that_cannot_send() -> None:
    """From now on, end a DataLoader worker that cannot send its batch, perhaps for lack of shared
    memory. This replaces the error hook of all multiprocessing queues: Python's own hook only
    prints the error, and torch would wait for the batch forever.
    """
    import multiprocessing  # imported here, so that commands without a DataLoader start fast
    from multiprocessing.queues import Queue

    def end_worker(error: Exception, item: object) -> None:
        print(f"a DataLoader worker cannot send its batch: {one_line(error)}", file=sys.stderr, flush=True)
        if multiprocessing.parent_process() is not None:
            os._exit(1)

    Queue._on_queue_feeder_error = staticmethod(end_worker)  # type: ignore[attr-defined]
