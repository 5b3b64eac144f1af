"""The CUDA context: what a process takes on its GPU beside what torch has reserved.

It is measured on this machine if it can be, otherwise as others have read it on such a card, or
else the most that they have read on any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from recipes.errors import UserError
from recipes.planner import measured
from recipes.run import RunSpec, known_gpus

_MIB = 1 << 20


@dataclass(frozen=True)
class Context:
    """`bytes` to plan with, the least and the most that are known, where they were read, in short
    and (`readings`) one by one.
    """

    bytes: int
    low: int
    high: int
    source: str
    readings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Reading:
    """MiB that were read on a card, by the beginning of its name in the catalogue.

    `idle` if the process had computed nothing yet: it loads more kernels when it trains.
    """

    card: str
    mib: float
    source: str
    idle: bool = False

    def __str__(self) -> str:
        loaded = f" idle, and a guess of {_LOADED_BY_TRAINING:.0f} MiB for what a step loads" if self.idle else ""
        return f"{self.card}: {self.mib:.0f} MiB{loaded} ({self.source})"


# Since CUDA 11.7 a kernel is loaded when it is first called: CUDA_MODULE_LOADING=LAZY, which torch
# sets in torch/cuda/__init__.py.
_LAZY = (
    _Reading("T4", 140.875, "torch 2.10, CUDA 12.8, github.com/Anassbzdd/fitcheck"),
    _Reading("RTX 3090", 256, "driver 610.43, torch 2.7, CUDA 12.8, github.com/invoke-ai/InvokeAI/issues/9413", True),
    _Reading("A100", 426, "driver 535.183, CUDA 12.2, github.com/pytorch/torchrec/pull/3580"),
)
# That T4 had 105 MiB before its first step. For other cards it is a guess that they load as much.
_LOADED_BY_TRAINING = 140.875 - 105
# All kernels of all libraries at once, as before 11.7, and still with CUDA_MODULE_LOADING=EAGER.
_EAGER = (
    _Reading("V100", 1341, "driver 460.91, CUDA 11.2, Hugging Face's guide to training on a single GPU"),
    _Reading("RTX 3090", 1687, "torch 1.8, CUDA 11.1, github.com/pytorch/pytorch/issues/55277", True),
    _Reading("GTX 1080", 721, "torch 1.8, CUDA 10.1, github.com/pytorch/pytorch/issues/55277", True),
)


def context_of(run: RunSpec, environment: Mapping[str, str] = os.environ) -> Context:
    """What CUDA takes on each GPU of this run; nothing on a CPU."""
    if not run.hardware.cuda:
        return Context(0, 0, 0, "")
    card = catalogue_name(run.hardware.gpus[0].name)
    own = measured.context(card, run.world_size > 1, environment)
    if own:
        return Context(own.bytes, own.bytes, own.bytes, f"measured here with {own.conditions}")
    eager = environment.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"
    found = _as_others_read(card, _EAGER if eager else _LAZY)
    if run.world_size == 1:
        return found
    return replace(found, source=f"{found.source}; what NCCL takes beside it is unknown until it is measured here")


def _as_others_read(card: str, readings: tuple[_Reading, ...]) -> Context:
    for one in readings:
        if card.startswith(one.card):
            size = _in_training(one)
            return Context(size, size, size, f"as others read it on {one.card}", (str(one),))
    sizes = [_in_training(one) for one in readings]
    low, high = min(sizes), max(sizes)
    words = f"the most of {low / _MIB:.0f} to {high / _MIB:.0f} that others read on other cards"
    return Context(high, low, high, words, tuple(map(str, readings)))


def _in_training(one: _Reading) -> int:
    return round((one.mib + _LOADED_BY_TRAINING * one.idle) * _MIB)


@cache
def catalogue_name(name: str) -> str:
    """A card by its name in the catalogue, or as it is called if it is not there."""
    try:
        return known_gpus.find(name).name
    except UserError:
        return name
