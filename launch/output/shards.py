"""Whether the shards that FSDP's ranks have written are whole.

torch writes a folder with one or more .distcp files from each rank, and last the index .metadata,
which says where in them each tensor lies. The index is a pickle: it is read without running what
it names.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

_INDEX = ".metadata"


def shard_faults(folder: Path) -> list[str]:
    """What is missing or damaged in a folder of shards, one line each."""
    if not folder.is_dir():
        return [f"{folder.name} is missing"]
    if not (folder / _INDEX).exists():
        return [f"{folder.name}/{_INDEX} is missing"]
    try:
        pieces = _pieces(folder / _INDEX)
    except Exception:  # a damaged pickle may hold any byte
        return [f"{folder.name}/{_INDEX} cannot be read"]
    if not pieces:
        return [f"{folder.name}/{_INDEX} names no shard"]
    return [fault for name in sorted(pieces) for fault in _file_faults(folder / name, pieces[name])]


def _pieces(index: Path) -> dict[str, list[tuple[int, int]]]:
    """For each file its pieces, as offset and length in bytes."""
    with index.open("rb") as stream:
        stored = _Inert(stream).load().state["storage_data"]
    pieces = defaultdict(list)
    for info in stored.values():
        pieces[str(info.state["relative_path"])].append((int(info.state["offset"]), int(info.state["length"])))
    return pieces


def _file_faults(file: Path, pieces: list[tuple[int, int]]) -> list[str]:
    name = f"{file.parent.name}/{file.name}"
    if not file.exists():
        return [f"{name} is missing"]
    with file.open("rb") as stream:
        if all(_whole(stream, offset, length) for offset, length in pieces):
            return []
    return [f"{name} is cut off or damaged"]


def _whole(stream: io.BufferedReader, offset: int, length: int) -> bool:
    """Whether a piece, which torch.save has written, still has its checksums."""
    stream.seek(offset)
    try:
        with zipfile.ZipFile(io.BytesIO(stream.read(length))) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError):
        return False


def saved_object(file: Path) -> dict[str, Any]:
    """The fields of the one object that torch.save has written, without running what it names.

    Raises whatever a damaged file leads to.
    """
    with zipfile.ZipFile(file) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        return _Inert(io.BytesIO(archive.read(pickled))).load().state


class _Inert(pickle.Unpickler):
    """Reads a pickle with a plain record in place of every class or function that it names."""

    def find_class(self, module: str, name: str) -> Any:
        return _Record


class _Record:
    """What a pickled object was made from: `state` are its fields."""

    def __init__(self, *args: Any) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state
