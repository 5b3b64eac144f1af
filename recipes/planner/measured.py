"""What was measured on this machine before: a file in the user's cache that costs no run anything.

`recipes doctor`, `--fit` and every training add to it (launch/doctor/measured.py). What is damaged
there, or somebody else's, counts as not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from recipes.legal.schema import version
from recipes.run import Json
from recipes.run.files import hf_home, read_json

CONTEXT, HOST = "context", "host"
MOST_ROWS = 100  # of each kind
_MOST_BYTES = 8 << 30  # of a context: what is larger is something else


def file_in(environment: Mapping[str, str]) -> Path:
    """Beside what the libraries of Hugging Face keep: HF_HOME, or ~/.cache/huggingface."""
    return hf_home(environment) / "accelerate-recipes" / "measured.json"


def rows(kind: str, environment: Mapping[str, str]) -> list[Json]:
    """What was kept of this kind, the oldest first. Empty if the file is missing or damaged."""
    found = (read_json(file_in(environment))[0] or {}).get(kind)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


class Host(NamedTuple):
    """The speed of a node: seconds of Adam per parameter and step, on all its cores, and bytes per
    second between each GPU and the host, in the slower direction.
    """

    adam: float
    pcie: float


def host(card: str, processes: int, environment: Mapping[str, str]) -> Host | None:
    """The speed of a node with such cards, None if it was not measured here.

    Of several, that of as many processes on the node, and then the newest.
    """
    known = [row for row in rows(HOST, environment) if row.get("card") == card]
    known = [row for row in known if _is_positive(row.get("adam")) and _is_positive(row.get("pcie"))]
    best = _last(known, lambda row: row.get("processes") == processes)
    return Host(best["adam"], best["pcie"]) if best else None


def context(card: str, several: bool, environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Bytes of the CUDA context of such a card, and what they were measured with. None if it was
    not measured here.

    Of several, that of as many processes, then of the installed torch, and then the newest.
    `several`: of a process among others, whose NCCL takes memory too.
    """
    torch = version("torch")
    known = [row for row in rows(CONTEXT, environment) if row.get("card") == card and is_context(row.get("bytes"))]
    best = _last(known, lambda row: (row.get("several") is several, row.get("torch") == torch))
    return (best["bytes"], f"torch {best.get('torch')}, driver {best.get('driver')}") if best else None


def _last(known: list[Json], worth: Callable[[Json], Any]) -> Json | None:
    return max(reversed(known), key=worth, default=None)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def is_context(size: Any) -> bool:
    """Whether this can be the bytes of a context."""
    return type(size) is int and 0 < size <= _MOST_BYTES
