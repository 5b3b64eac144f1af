"""The CUDA context: what a process takes on its GPU beside what torch has reserved.

It is measured on this machine if it can be, otherwise as others have read it on such a card, or
else the most that they have read on any.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
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


# MiB that a training had, by the beginning of the card's name in the catalogue. Kernels are loaded
# when they are first called, which torch asks of CUDA (CUDA_MODULE_LOADING=LAZY).
_READ = {
    "T4": (140.875, "torch 2.10, CUDA 12.8, github.com/Anassbzdd/fitcheck"),
    # 256 MiB were read before a step. That T4 had 105 then: a guess that others load as much.
    "RTX 3090": (
        256 + 140.875 - 105,
        "256 idle, and a guess for what a step loads: driver 610.43, torch 2.7, CUDA 12.8, "
        "github.com/invoke-ai/InvokeAI/issues/9413",
    ),
    "A100": (426, "driver 535.183, CUDA 12.2, github.com/pytorch/torchrec/pull/3580"),
}


def context_of(run: RunSpec, environment: Mapping[str, str] = os.environ) -> Context:
    """What CUDA takes on each GPU of this run; nothing on a CPU."""
    if not run.hardware.cuda:
        return Context(0, 0, 0, "")
    card, several = catalogue_name(run.hardware.gpus[0].name), run.world_size > 1
    if own := measured.context(card, several, environment):
        size, conditions = own
        return Context(size, size, size, f"measured here with {conditions}")
    alike = [name for name in _READ if card.startswith(name)]
    sizes = [round(_READ[name][0] * _MIB) for name in alike or _READ]
    low, high = min(sizes), max(sizes)
    source = f"the most of {low / _MIB:.0f} to {high / _MIB:.0f} that others read on other cards"
    if alike:
        source = f"as others read it on {alike[0]}"
    if several:
        source += "; what NCCL takes beside it is unknown until it is measured here"
    readings = (f"{name}: {_READ[name][0]:.0f} MiB ({_READ[name][1]})" for name in alike or _READ)
    return Context(high, low, high, source, tuple(readings))


@cache
def catalogue_name(name: str) -> str:
    """A card by its name in the catalogue, or as it is called if it is not there."""
    try:
        return known_gpus.find(name).name
    except UserError:
        return name
