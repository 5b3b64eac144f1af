"""Machines with H100, A100 or T4 that are not there: the real constructors, up to the first step.

torch answers as it does on that card, the processes of a world are torch's own fake backend, and
nothing is ever computed on a GPU. So a run is compared up to where training would begin:
TrainingArguments, the plugins of accelerate, the attention checks of transformers, the Trainer.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import recipes.run.hardware
from recipes.run.hardware import Gpu, Hardware
from tests.support.runs import A100, H100, T4, machine

CARDS: dict[str, Gpu] = {"H100": H100, "A100": A100, "T4": T4}
VARIABLE = "LEGALITY_MACHINE"  # such as A100:8


def hardware(place: str) -> Hardware:
    """The machine that a place such as `A100:8` names."""
    name, _, count = place.partition(":")
    return machine(CARDS[name], int(count), liger=False)


def pretend() -> None:
    """Make this process believe in the machine of $LEGALITY_MACHINE, if there is one."""
    place = os.environ.get(VARIABLE)
    if not place:
        return
    here = hardware(place)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    _answer_as(here)
    _join_a_world_of_one(int(os.environ.get("WORLD_SIZE", 1)))
    _stop_before_the_first_step()
    _replace(recipes.run.hardware, "read", lambda: here)


def _replace(owner: object, name: str, value: object) -> None:
    """For the rest of the process. Raises `AttributeError` if there is nothing of that name."""
    mock.patch.object(owner, name, value).start()


def _answer_as(here: Hardware) -> None:
    import torch

    gpu = here.gpus[0]
    properties = SimpleNamespace(
        name=gpu.name, major=gpu.capability[0], minor=gpu.capability[1], total_memory=gpu.memory_bytes
    )
    answers = {
        "is_available": True,
        "device_count": len(here.gpus),
        "get_device_capability": gpu.capability,
        "get_device_properties": properties,
        "get_device_name": gpu.name,
        "is_bf16_supported": True,  # torch counts emulation, on a T4 too
        "current_device": 0,
        "set_device": None,
        "empty_cache": None,
        "manual_seed_all": None,
        "manual_seed": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    torch.version.cuda = "12.8"


def _join_a_world_of_one(size: int) -> None:
    """torch's fake backend: the other ranks are not there, and nobody waits for them."""
    if "RANK" not in os.environ:
        return
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from launch.host import world

    dist.init_process_group(backend="fake", store=FakeStore(), rank=0, world_size=size)
    _replace(world, "_require_same_micro_batch", lambda run, here: None)
    _replace(world, "heartbeat", lambda *arguments: nullcontext())  # nobody else has a heart


def _stop_before_the_first_step() -> None:
    from transformers import Trainer

    from launch.training import model

    def train(trainer, *args, **kwargs):
        raise SystemExit(0)

    _replace(Trainer, "train", train)
    _replace(Trainer, "_move_model_to_device", lambda trainer, moved, device: None)
    _replace(model, "_device", lambda run: "cpu")
