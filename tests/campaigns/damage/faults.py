"""What can happen to a file of a checkpoint, or to the whole of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

PAGE = 4096
REPLACED = "replaced by another run's"


def _truncated(content: bytes, other: bytes | None, random: Random) -> bytes:
    return content[: random.randrange(1, len(content))] if len(content) > 1 else b""


def _emptied(content: bytes, other: bytes | None, random: Random) -> bytes:
    return b""


def _half_zeroed(content: bytes, other: bytes | None, random: Random) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes(len(content) - half)


def _page_zeroed(content: bytes, other: bytes | None, random: Random) -> bytes:
    starts = [at for at in range(0, len(content), PAGE) if any(content[at : at + PAGE])]
    if not starts:
        return content
    start = random.choice(starts)
    page = content[start : start + PAGE]
    return content[:start] + bytes(len(page)) + content[start + len(page) :]


def _bit_flipped(content: bytes, other: bytes | None, random: Random) -> bytes:
    if not content:
        return content
    place = random.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]


def _removed(content: bytes, other: bytes | None, random: Random) -> None:
    return None


def _replaced(content: bytes, other: bytes | None, random: Random) -> bytes:
    return content if other is None else other


FAULTS: dict[str, Callable[[bytes, bytes | None, Random], bytes | None]] = {
    "truncated": _truncated,
    "emptied": _emptied,
    "half zeroed": _half_zeroed,
    "one page zeroed": _page_zeroed,
    "one bit flipped": _bit_flipped,
    "removed": _removed,
    REPLACED: _replaced,
}


def do(fault: str, file: Path, others: Path, random: Random) -> bool:
    """Damage a file; `others` is that of another run, if there is one. False if nothing changed.

    A whole checkpoint can only be REPLACED.
    """
    if file.is_dir():
        shutil.rmtree(file)
        shutil.copytree(others, file)
        return True
    content = file.read_bytes()
    damaged = FAULTS[fault](content, others.read_bytes() if others.is_file() else None, random)
    if damaged is None:
        file.unlink()
    else:
        file.write_bytes(damaged)
    return damaged != content
