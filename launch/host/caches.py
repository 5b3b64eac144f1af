"""The folders outside a run's own that libraries write to, and the variables that move them.

They are under the home folder unless somebody says otherwise: read-only in many containers, small
on many clusters.
"""

from __future__ import annotations

import errno
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch.host.storage import FULL, causes
from recipes.errors import Problem
from recipes.run.engine import hf_home

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
