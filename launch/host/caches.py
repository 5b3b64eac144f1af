"""The folders outside a run's own that libraries write to, and the variables that move them.

They are under the home folder unless somebody says otherwise: read-only in many containers, small
on many clusters, shared by many machines. A lock that a killed process left in one must not hold
up the next: the locks of datasets, huggingface_hub and inductor are flock's, which the kernel
takes back, and torch's compiler of C++ gets one of that kind here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import getpass
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from launch.host.signals import StopRequest, ending_children
from launch.host.storage import FULL, causes
from recipes.errors import Problem
from recipes.run.files import hf_home

if TYPE_CHECKING:
    from torch.utils.file_baton import FileBaton

_UNWRITABLE = (errno.ENOENT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, *FULL)


def cache_problem(error: BaseException) -> Problem | None:
    """What to set if a library could not write to its cache; None if that is not what failed.

    The system's error is often the cause of a library's own.
    """
    for failed in causes(error):
        if isinstance(failed, OSError) and failed.errno in _UNWRITABLE:
            for variable, folder in _caches():
                if _concerns(failed, folder):
                    what = f"{folder} cannot be written: {failed.strerror}"
                    return Problem(variable, what, f"{variable}=FOLDER in the environment, a writable one with room")
    return None


def is_chosen(problem: Problem) -> bool:
    """Whether a person has chosen the folder of a `cache_problem`: then it is a mistake."""
    return bool(os.environ.get(problem.subject))


def _concerns(error: OSError, folder: Path) -> bool:
    """Whether it happened there. Libraries that write a full disk rarely say where."""
    if error.filename is None:
        return error.errno in FULL and shutil.disk_usage(_nearest(folder)).free < 2**20
    path = Path(os.fsdecode(error.filename)).absolute()
    if not path.is_relative_to(folder) and (_is_there(path) or not folder.is_relative_to(path)):
        return False
    # Or a file was looked for in the cache, and is not there.
    return error.errno != errno.ENOENT or not _can_be_made(folder)


def _nearest(folder: Path) -> Path:
    """The folder, or the innermost one around it that is there and can be seen."""
    return next(place for place in (folder, *folder.parents) if _is_there(place))


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a folder that may not be searched
        return False


def _can_be_made(folder: Path) -> bool:
    """Whether it exists now. /proc answers with ENOENT, whatever one makes there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return True


def _user() -> str:
    """As torch names the folder of its compiled kernels (_inductor/runtime/cache_dir_utils.py)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid_{os.getuid()}"


def _caches() -> Iterator[tuple[str, Path]]:
    """The variable that somebody has set, or that moves the most, and the folder."""
    environment = os.environ
    home = Path(os.path.expanduser("~")).absolute()  # noqa: PTH111 # without one, libraries make a folder `~`
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    hugging_face = hf_home(environment).absolute()
    for own, folder in (("HF_DATASETS_CACHE", "datasets"), ("HF_HUB_CACHE", "hub"), ("HF_MODULES_CACHE", "modules")):
        yield (own, Path(environment[own])) if environment.get(own) else ("HF_HOME", hugging_face / folder)
    yield "HF_HOME", hugging_face
    for own, default in (
        ("TORCH_EXTENSIONS_DIR", cache / "torch_extensions"),
        ("TRITON_CACHE_DIR", home / ".triton" / "cache"),
        ("TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir(), f"torchinductor_{_user()}")),
    ):
        yield own, Path(environment.get(own) or default)


# --- torch's compiler of C++, which DeepSpeed's operators need once -------------------------------

_WAIT_SECONDS = 0.1
_TELL_SECONDS = 5
_LONGEST_COMPILATION_SECONDS = 3600
_BY_FLOCK = b"held by flock"


def compile_safely(stop: StopRequest | None = None) -> None:
    """From now on a compilation, which takes minutes, ends at once when `stop` is requested, and no
    lock that a killed process left there is waited for.
    """
    from torch.utils import cpp_extension

    load = cpp_extension.load

    @functools.wraps(load)
    def load_safely(*args, **kwargs):
        with stop.at_once() if stop else contextlib.nullcontext(), ending_children():
            return load(*args, **kwargs)

    cpp_extension.load = load_safely
    cpp_extension.FileBaton = _baton_class()


@functools.cache
def _baton_class() -> type[FileBaton]:
    from torch.utils.file_baton import FileBaton

    class Baton(FileBaton):
        """torch's lock file, which the kernel unlocks too when the process that made it ends.

        Who waited for it compiles too, which takes no time if that was done.
        """

        def try_acquire(self) -> bool:
            file = Path(self.lock_file_path)
            started, told = time.monotonic(), False
            while (handle := _lock(file)) is None:
                time.sleep(_WAIT_SECONDS)
                if not told and time.monotonic() - started > _TELL_SECONDS:
                    told = True
                    _say(_waiting(file))
            self.fd = handle
            _end_orphans(file.parent)
            if not any(file.parent.glob("*.so")):
                _say(f"compiling {file.parent.name} into {file.parent}: this takes minutes, and only once")
            return True

        def release(self) -> None:
            """Removes it before it is unlocked, or another process would lock what is removed."""
            Path(self.lock_file_path).unlink(missing_ok=True)
            os.close(self.fd)

    return Baton


def _lock(file: Path) -> int | None:
    """The descriptor of a lock file that is ours now. None if another process has it."""
    with contextlib.suppress(FileExistsError):
        handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        with contextlib.suppress(OSError):  # a file system without locks: then it is as torch's own
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(handle, f"{_BY_FLOCK.decode()} of pid {os.getpid()} on {socket.gethostname()}".encode())
        return handle
    try:
        handle = os.open(file, os.O_RDWR)
        if _is_left_over(handle, file):
            return handle
        os.close(handle)
    except OSError:  # removed meanwhile, or of another user
        pass
    return None


def _is_left_over(handle: int, file: Path) -> bool:
    """Whether its maker is gone: then it is locked, and ours.

    Of plain torch's only its age tells: the maker may be on another machine.
    """
    is_old = _seconds_old(file) > _LONGEST_COMPILATION_SECONDS and not _users_here(file)
    if not os.pread(handle, len(_BY_FLOCK), 0).startswith(_BY_FLOCK) and not is_old:
        return False
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return os.path.samestat(os.fstat(handle), file.stat())


def _seconds_old(file: Path) -> float:
    """By the clock of its disk, which may be another machine's."""
    with tempfile.TemporaryFile(dir=file.parent) as new:
        return os.fstat(new.fileno()).st_mtime - file.stat().st_mtime


def _users_here(file: Path) -> list[int]:
    """Processes of this machine that have the lock file open, as its maker has."""
    users = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and str(file.resolve()) in [opened.path for opened in process.open_files()]:
                users.append(process.pid)
    return users


def _end_orphans(folder: Path) -> None:
    """End what a killed maker of the lock has left behind: it would write the same files."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.name() == "ninja" and process.cwd() == str(folder.resolve()):
                process.terminate()  # with its compilers
                process.wait(_TELL_SECONDS)


def _waiting(file: Path) -> str:
    with contextlib.suppress(OSError):
        if maker := file.read_text(errors="replace"):
            return f"waiting until {file.parent.name} is compiled: {file} is {maker}"
    if users := _users_here(file):
        return f"waiting until pid {users[0]} has compiled {file.parent.name}"
    return (
        f"waiting for {file}, which no process on this machine holds: unless another machine is compiling, "
        f"one that was killed left it, and `rm {file}` lets this run go on"
    )


def _say(line: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
