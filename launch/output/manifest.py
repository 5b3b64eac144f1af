"""manifest.json: what a checkpoint consists of. It is written last, and makes the checkpoint count.

Before the first file of a checkpoint, `begin` puts a manifest without files into its folder. Once
every process has written, `commit` flushes files and folders to the disk, and then replaces that
manifest by one with the size and checksum of each file. So a checkpoint whose manifest names no
files was not completed; a checkpoint without a manifest is not from here.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from launch.host.files import flush, read_regular, write_whole
from recipes.run import Json

NAME = "manifest.json"
VERSION = 1
# What Trainer's own saving on SIGTERM puts into the folder, and removes when all else is there.
TRAINERS_MARKER = "checkpoint-is-incomplete.txt"

_THREADS = 4

T = TypeVar("T")
R = TypeVar("R")


def begin(folder: Path, step: int, engine: str, world_size: int, run: Json | None = None) -> None:
    """Mark the checkpoint in `folder` as being written: by which engine, how many processes, and
    which run (launch.output.identity).

    The mark is on the disk when this returns, so that it is there whatever a crash leaves.
    """
    contents = {"version": VERSION, "step": step, "engine": engine, "world_size": world_size, "run": run}
    # `begun` is different every time: a node that reads it looks at the same disk as its writer.
    _write(folder, {**contents, "files": None, "begun": secrets.token_hex(8)})
    flush(folder.parent)


def commit(folder: Path, names: Collection[str]) -> bool:
    """Complete the checkpoint: flush these files and their folders, then write the manifest.

    `names` are paths in `folder`. Returns False, and commits nothing, if one of them has vanished
    meanwhile: somebody has deleted the checkpoint. Raises `OSError` if the disk does not take it.
    """
    try:
        contents = read(folder)
        contents.pop("begun", None)
        flush_files([folder / name for name in names])
        _write(folder, {**contents, "files": described(folder, names)})
    except FileNotFoundError:
        return False
    return True


def flush_files(files: Collection[Path]) -> None:
    """Have these files and their folders on the disk when this returns.

    One process of a node flushes what all its processes wrote: the kernel knows files, not writers.
    """
    _in_parallel(flush, files)
    # A name in a folder is not on the disk when its file is.
    _in_parallel(flush, {file.parent for file in files} | {file.parent.parent for file in files})


def listed(folder: Path) -> list[str]:
    """The files of a checkpoint as they are now, as paths in `folder`."""
    return [name for name in _entries(folder) if not name.endswith("/")]


def begun(folder: Path) -> str | None:
    """What tells this save from any other. None if no save has begun on the disk that we see."""
    try:
        return read(folder).get("begun")
    except (OSError, ValueError):
        return None


def exists(folder: Path) -> bool:
    return os.path.lexists(folder / NAME)


def is_committed(folder: Path) -> bool:
    """Whether the checkpoint was completed. Its files are not looked at."""
    try:
        return read(folder)["files"] is not None
    except (OSError, ValueError):
        return False


def has_its_files(folder: Path) -> bool:
    """Whether the checkpoint was completed, and each file still has its size. None is read."""
    try:
        files = read(folder)["files"]
        return files is not None and all((folder / name).stat().st_size == files[name]["bytes"] for name in files)
    except (OSError, ValueError):
        return False


def read(folder: Path) -> Json:
    """The manifest. Raises `OSError` or `ValueError` if it cannot be read, or is damaged."""
    try:
        contents = json.loads(read_regular(folder / NAME).decode())
    except RecursionError:
        contents = None
    if not isinstance(contents, dict) or contents.pop("checksum", None) != checksum_of(contents):
        raise ValueError(f"{folder / NAME} is damaged")
    if contents["version"] != VERSION:
        raise ValueError(f"{folder / NAME} is of version {contents['version']}, not {VERSION}")
    return contents


def differences(folder: Path) -> list[str]:
    """What is not as it was written, one line each: every byte is read, and nothing executed."""
    try:
        contents = read(folder)
    except OSError:
        return [f"{NAME} cannot be read"]
    except ValueError as error:
        return [str(error).replace(f"{folder}/", "") if "version" in str(error) else f"{NAME} is damaged"]
    files = contents["files"]
    if files is None:
        return ["its save was not completed"]
    parents = {f"{parent}/" for name in files for parent in Path(name).parents}
    foreign = [
        f"{name} does not belong to it" for name in _entries(folder) if name not in files and name not in parents
    ]
    return [*changes(folder, files), *foreign]


def described(folder: Path, names: Collection[str]) -> Json:
    """Size and checksum of each of these files."""
    return dict(zip(sorted(names), _in_parallel(lambda name: _described(folder / name), sorted(names)), strict=True))


def changes(folder: Path, files: Json) -> list[str]:
    """How these files, as `described`, differ from those in a folder, one line each."""
    found = _in_parallel(lambda name: _difference(folder / name, name, files[name]), sorted(files))
    return [line for line in found if line]


def _difference(file: Path, name: str, then: Json) -> str | None:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a file"
        if status.st_size != then["bytes"]:
            return f"{name} has {status.st_size} bytes, not {then['bytes']}"
        if checksum(file) != then["xxh3_128"]:
            return f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


def _entries(folder: Path) -> Iterator[str]:
    """All files, and all folders with a / at their end, as paths in `folder`. Links count as files.

    Without manifests, and without what file systems keep in hidden files of their own; the only
    hidden file of a checkpoint is the index of FSDP's shards.
    """
    for root, folders, files in os.walk(folder):
        below = Path(root).relative_to(folder)
        for name in folders:
            linked = (Path(root) / name).is_symlink()
            yield str(below / name) + ("" if linked else "/")
        for name in files:
            own = below == Path() and name in (NAME, TRAINERS_MARKER)
            if not own and (not name.startswith(".") or name == ".metadata"):
                yield str(below / name)


def _in_parallel(work: Callable[[T], R], on: Iterable[T]) -> list[R]:
    """The results in order. One thread alone fills no fast disk, and no network's."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(work, on))


def _described(file: Path) -> Json:
    return {"bytes": file.stat().st_size, "xxh3_128": checksum(file)}


def checksum(file: Path) -> str:
    """XXH3 with 128 bits of what a file holds: as fast as memory, and sees any damage."""
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def checksum_of(contents: Any) -> str:
    return xxhash.xxh3_128(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _write(folder: Path, contents: Json) -> None:
    whole = {**contents, "checksum": checksum_of(contents)}
    write_whole(folder / NAME, json.dumps(whole, indent=1, sort_keys=True).encode())
    flush(folder)
