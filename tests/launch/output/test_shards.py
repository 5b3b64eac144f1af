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


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_missing_file_is_named(state, file, checkpoint):
    (checkpoint / state / file).unlink()
    assert faults(checkpoint) == [f"{state}/{file.replace('__0_0', '*')} is missing"]


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_what_is_beside_the_shards_is_needed_too(name, checkpoint):
    (checkpoint / name).unlink()
    assert faults(checkpoint) == [f"{name} is missing"]


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9, 0.999])
def test_a_file_cut_off_is_a_fault(kept, checkpoint):
    path = checkpoint / "optimizer_0" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])
    assert faults(checkpoint) == ["__0_0.distcp is cut off or damaged"]


def test_whole_states_are_files(checkpoint):
    for name, file in zip(STATES, ("pytorch_model_fsdp.bin", "optimizer.bin"), strict=True):
        shutil.rmtree(checkpoint / name)
        torch.save({"weight": torch.ones(3)}, checkpoint / file)
    assert faults(checkpoint) == []
    (checkpoint / "optimizer.bin").write_bytes(b"cut off")
    assert faults(checkpoint) == ["optimizer.bin is cut off or damaged"]
