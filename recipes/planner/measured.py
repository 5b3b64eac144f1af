"""Facts about a card and its node: measured on this machine before, or else published.

`recipes doctor`, `--fit` and every training add to a file in the user's cache
(launch/doctor/measured.py), which costs no run anything. What is damaged there, or somebody else's,
counts as not measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from recipes.errors import UserError
from recipes.legal.schema import version
from recipes.run import Json, RunSpec, known_gpus
from recipes.run.files import hf_home, read_json

CONTEXT, HOST = "context", "host"
MOST_ROWS = 100  # of each kind
_MIB = 1 << 20
_MOST_BYTES = 8 << 30  # of a context: what is larger is something else


def file_in(environment: Mapping[str, str]) -> Path:
    """Beside what the libraries of Hugging Face keep: HF_HOME, or ~/.cache/huggingface."""
    return hf_home(environment) / "accelerate-recipes" / "measured.json"


def rows(kind: str, environment: Mapping[str, str]) -> list[Json]:
    """All that was kept of this kind, the oldest first. Empty if the file is missing or damaged."""
    found = (read_json(file_in(environment))[0] or {}).get(kind)
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _best(kind: str, card: str, environment: Mapping[str, str], is_valid: Callable, worth: Callable) -> Json | None:
    """Of this card's rows the one that is worth most, of equal ones the newest."""
    known = [row for row in rows(kind, environment) if row.get("card") == card and is_valid(row)]
    return max(reversed(known), key=worth, default=None)


@cache
def catalogue_name(name: str) -> str:
    """A card by its name in the catalogue, or as it is called if it is not there."""
    try:
        return known_gpus.find(name).name
    except UserError:
        return name


# --- PCIe, and Adam on the host -------------------------------------------------------------------

# Bytes per second between a GPU and its host, one way, by the major compute capability: half of
# what NVIDIA's data sheets give for both ways. T4: PCIe Gen3 x16, 32 GB/s; A100, A10, L4, L40S:
# Gen4, 64 GB/s; H100, H200, B200: Gen5, 128 GB/s.
_PCIE = {7: 16e9, 8: 32e9}
# Adam on the host, seconds per parameter and node: 8.2 s for 11.6B by DeepSpeed's author, in
# github.com/deepspeedai/DeepSpeed/pull/735. issues/6834 reads 10 s for 18B on each node.
_ADAM_SECONDS = 8.2 / 11.6e9


class Host(NamedTuple):
    """The speed of a node: seconds of Adam per parameter and step, on all its cores, and bytes per
    second between each GPU and the host, in the slower direction.
    """

    adam: float
    pcie: float


def pcie_of(capability: tuple[int, int]) -> float:
    return _PCIE.get(capability[0], 64e9)


def host_of(run: RunSpec, environment: Mapping[str, str] = os.environ) -> tuple[Host, str]:
    """The speed of a node with this run's cards, and where it comes from.

    Of several measurements, that of as many processes on the node, and then the newest.
    """
    card, processes = catalogue_name(run.hardware.gpus[0].name) if run.hardware.cuda else "", run.local_world_size

    def is_valid(row: Json) -> bool:
        return all(
            isinstance(one, (int, float)) and 0 < one < float("inf") for one in (row.get("adam"), row.get("pcie"))
        )

    if own := _best(HOST, card, environment, is_valid, lambda row: row.get("processes") == processes):
        return Host(own["adam"], own["pcie"]), "measured here"
    published = Host(_ADAM_SECONDS, pcie_of(run.hardware.capability))
    return published, "PCIe of data sheets, Adam as DeepSpeed's author published"


# --- The CUDA context -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    """Bytes that a process takes on its GPU beside torch's, and where they were read."""

    bytes: int
    source: str


# MiB that a training had, by the beginning of the card's name in the catalogue. Kernels are loaded
# when they are first called, which torch asks of CUDA (CUDA_MODULE_LOADING=LAZY).
_READ = {
    "T4": (140.875, "torch 2.10, CUDA 12.8, github.com/Anassbzdd/fitcheck"),
    "A100": (426, "driver 535.183, CUDA 12.2, github.com/pytorch/torchrec/pull/3580"),
}


def context_of(run: RunSpec, environment: Mapping[str, str] = os.environ) -> Context:
    """CUDA's own overhead on each GPU of this run; nothing on a CPU.

    It is measured on this machine if it can be, otherwise as others have read it on such a card, or
    else the most that they have read on any. Of several measurements, that of as many processes
    counts (among others NCCL takes memory too), then of the installed torch, and then the newest.
    """
    if not run.hardware.cuda:
        return Context(0, "")
    card, several, torch = catalogue_name(run.hardware.gpus[0].name), run.world_size > 1, version("torch")

    def worth(row: Json) -> tuple[bool, bool]:
        return row.get("several") is several, row.get("torch") == torch

    if own := _best(CONTEXT, card, environment, lambda row: is_context(row.get("bytes")), worth):
        return Context(own["bytes"], f"measured here with torch {own.get('torch')}, driver {own.get('driver')}")
    alike = next((name for name in _READ if card.startswith(name)), None)
    most = alike or max(_READ, key=lambda name: _READ[name][0])
    mib, where = _READ[most]
    source = f"as others read it on {most}" if alike else f"the most that others read, on {most}"
    unknown = "; what NCCL takes beside it is unknown until it is measured here" if several else ""
    return Context(round(mib * _MIB), f"{source} ({where}){unknown}")


def is_context(size: Any) -> bool:
    """True if this can be the bytes of a context."""
    return type(size) is int and 0 < size <= _MOST_BYTES
