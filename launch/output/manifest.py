"""manifest.json: what a checkpoint consists of. It is written last, and makes the checkpoint count.

Before the first file of a checkpoint, `begin` puts a manifest without files into its folder. Once
every process has written, `commit` flushes files and folders to the disk, and then replaces that
manifest by one with the size and checksum of each file. So a checkpoint whose manifest names no
files was not completed; a checkpoint without a manifest is not from here.

A manifest also names its run. A run gets its id at its first start in an output folder, and keeps
it in all later ones. Whoever names a checkpoint to begin from begins another run.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from launch.host.files import flush, read_regular, write_whole
from recipes.run import Json

NAME = "manifest.json"
# What Trainer's own saving on SIGTERM puts into the folder, and removes when all else is there.
TRAINERS_MARKER = "checkpoint-is-incomplete.txt"

_THREADS = 4

T = TypeVar("T")
R = TypeVar("R")


# --- Which run ------------------------------------------------------------------------------------


def new_run(began_from: Path | None = None, began_at: int = -1) -> Json:
    """The identity of a run that begins now, perhaps from a checkpoint that its user has named."""
    named = str(began_from.resolve()) if began_from else None
    return {"id": secrets.token_hex(8), "began_from": named, "began_at": began_at}


def run_of(checkpoint: Path) -> Json | None:
    """The run that wrote a checkpoint. None if its manifest does not tell."""
    return _readable(checkpoint).get("run")


def is_foreign(checkpoint: Path, run: Json | None) -> bool:
    """True if another run than this one wrote the checkpoint; false if nobody can tell."""
    writer = run_of(checkpoint)
    return run is not None and writer is not None and writer["id"] != run["id"]


# --- Writing --------------------------------------------------------------------------------------


def begin(folder: Path, step: int, engine: str, world_size: int, run: Json | None = None) -> None:
    """Mark the checkpoint in `folder` as being written: by which engine, how many processes, and
    which run.

    The mark is on the disk when this returns, so that it is there whatever a crash leaves.
    """
    contents = {"version": 1, "step": step, "engine": engine, "world_size": world_size, "run": run}
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


def described(folder: Path, names: Collection[str]) -> Json:
    """Size and checksum of each of these files."""

    def of_file(name: str) -> Json:
        return {"bytes": (folder / name).stat().st_size, "xxh3_128": _checksum(folder / name)}

    return dict(zip(sorted(names), _in_parallel(of_file, sorted(names)), strict=True))


def _write(folder: Path, contents: Json) -> None:
    whole = {**contents, "checksum": checksum_of(contents)}
    write_whole(folder / NAME, json.dumps(whole, indent=1, sort_keys=True).encode())
    flush(folder)


# --- Reading --------------------------------------------------------------------------------------


def exists(folder: Path) -> bool:
    return os.path.lexists(folder / NAME)


def read(folder: Path) -> Json:
    """The manifest. Raises `OSError` or `ValueError` if it cannot be read, or is damaged."""
    contents = json.loads(read_regular(folder / NAME).decode())
    if not isinstance(contents, dict) or contents.pop("checksum", None) != checksum_of(contents):
        raise ValueError(f"{folder / NAME} is damaged")
    return contents


def _readable(folder: Path) -> Json:
    """The manifest; empty if it cannot be read, or is damaged."""
    try:
        return read(folder)
    except (OSError, ValueError):
        return {}


def is_committed(folder: Path) -> bool:
    """True if the checkpoint was completed. Its files are not looked at."""
    return _readable(folder).get("files") is not None


def begun(folder: Path) -> str | None:
    """A mark that differs from save to save. None if no save has begun on the disk that we see."""
    return _readable(folder).get("begun")


def listed(folder: Path) -> list[str]:
    """The files of a checkpoint as they are now, as paths in `folder`.

    Without manifests, and without what file systems keep in hidden files of their own; the only
    hidden file of a checkpoint is the index of FSDP's shards.
    """
    files = [path for path in folder.rglob("*") if path.name == ".metadata" or not path.name.startswith(".")]
    own = (folder / NAME, folder / TRAINERS_MARKER)
    return [str(file.relative_to(folder)) for file in files if file not in own and not file.is_dir()]


def differences(folder: Path) -> list[str]:
    """What is not as it was written, one line each: every byte is read, and nothing executed."""
    contents = _readable(folder)
    if not contents:
        return [f"{NAME} is damaged"]
    files = contents["files"]
    return ["its save was not completed"] if files is None else changes(folder, files)


def changes(folder: Path, files: Json) -> list[str]:
    """How these files, as `described`, differ from those in a folder, one line each."""
    found = _in_parallel(lambda name: _difference(folder / name, name, files[name]), sorted(files))
    return [line for line in found if line]


def _difference(file: Path, name: str, then: Json) -> str | None:
    try:
        if (size := file.stat().st_size) != then["bytes"]:
            return f"{name} has {size} bytes, not {then['bytes']}"
        return None if _checksum(file) == then["xxh3_128"] else f"{name} has changed since it was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"


def checksum_of(contents: Any) -> str:
    return xxhash.xxh3_128(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _checksum(file: Path) -> str:
    """XXH3 with 128 bits of what a file holds: as fast as memory, and sees any damage."""
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]


def _in_parallel(work: Callable[[T], R], on: Iterable[T]) -> list[R]:
    """The results in order. One thread alone fills no fast disk, and no network's."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(work, on))
