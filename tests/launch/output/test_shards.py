"""Checkpoints in FSDP's shards: what is missing or damaged is named, and nothing in them is run."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from launch.output.checkpoints import faults, notes

STATES = {"pytorch_model_fsdp_0": "model", "optimizer_0": "optimizer"}


@pytest.fixture
def checkpoint(real_checkpoint, tmp_path):
    """As Trainer writes it under FSDP2: the states of model and optimizer by torch's own writer."""
    folder = shutil.copytree(real_checkpoint, tmp_path / "checkpoint-4")
    for name in ("model.safetensors", "optimizer.pt", "manifest.json"):
        (folder / name).unlink()
    for name, state in STATES.items():
        content = {state: {"weight": torch.arange(1000.0), "bias": torch.ones(10)}}
        dcp.save(content, storage_writer=dcp.FileSystemWriter(folder / name), no_dist=True)
    return folder


def test_what_torch_wrote_is_valid(checkpoint):
    assert faults(checkpoint) == []
    assert not any("start afresh" in note for note in notes(checkpoint))


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_what_is_beside_the_shards_is_needed_too(name, checkpoint):
    (checkpoint / name).unlink()
    assert faults(checkpoint) == [f"{name} is missing"]
