"""What was measured on this machine before: a file in the user's cache that costs no run anything.

`recipes doctor`, `--fit` and every training add to it (launch/doctor/measured.py). What is damaged
there, or somebody else's, counts as not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from recipes.legal.schema import version
from recipes.run import Json
from recipes.run.files import hf_home, read_json

CONTEXT, HOST = "context", "host"
MOST_ROWS = 100  # of each kind
_MOST_BYTES = 8 << 30  # of a context: what is larger is something else


@dataclass(frozen=True)
class OwnContext:
    """Bytes, and what they were measured with, in words."""

    bytes: int
    conditions: str


def file_in(environment: Mapping[str, str]) -> Path:
    """Beside what the libraries of Hugging Face keep: HF_HOME, or ~/.cache/huggingface."""
    return hf_home(environment) / "accelerate-recipes" / "measured.json"


def rows(kind: str, environment: Mapping[str, str]) -> list[Json]:
    """What was kept of this kind, the oldest first. Empty if the file is missing or damaged."""
    path = file_in(environment)
    try:
        changed = path.stat().st_mtime_ns if path.is_file() else 0
    except OSError:  # a folder that one may not read
        return []
    found = _content(str(path), changed).get(kind) if changed else None
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


@cache
def _content(path: str, changed: int) -> Json:
    return read_json(path)[0] or {}


@dataclass(frozen=True)
class Host:
    """`adam`: seconds per parameter and step, on all cores of a node. `pcie`: bytes per second
    between each GPU and the host, in the slower direction.
    """

    adam: float
    pcie: float


def host(card: str, processes: int, environment: Mapping[str, str]) -> Host | None:
    """The speed of a node with such cards, None if it was not measured here.

    Of several, that of as many processes on the node, and then the newest.
    """
    known = [row for row in rows(HOST, environment) if row.get("card") == card]
    known = [row for row in known if _is_positive(row.get("adam")) and _is_positive(row.get("pcie"))]
    if not known:
        return None
    _, best = max(enumerate(known), key=lambda item: (item[1].get("processes") == processes, item[0]))
    return Host(best["adam"], best["pcie"])


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def context(card: str, several: bool, environment: Mapping[str, str]) -> OwnContext | None:
    """The CUDA context of such a card, None if it was not measured here.

    Of several, that of as many processes, then of the installed torch, and then the newest.
    `several`: of a process among others, whose NCCL takes memory too.
    """
    torch = version("torch")
    known = [row for row in rows(CONTEXT, environment) if row.get("card") == card and is_context(row.get("bytes"))]
    if not known:
        return None
    best = max(
        enumerate(known), key=lambda item: (item[1].get("several") is several, item[1].get("torch") == torch, item[0])
    )[1]
    return OwnContext(best["bytes"], f"torch {best.get('torch')}, driver {best.get('driver')}")


def is_context(size: Any) -> bool:
    """Whether this can be the bytes of a context."""
    return type(size) is int and 0 < size <= _MOST_BYTES
