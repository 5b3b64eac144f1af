"""A fresh state for each test: the libraries remember things for a whole process."""

from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate keeps its state for a whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def gpu_rank(monkeypatch):
    """The only rank of a world, that accelerate believes to have a GPU. All else is real, with gloo
    and on the CPU.
    """
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", **address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU))
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def write_yaml(tmp_path):
    """Writes an Accelerate YAML for two processes."""

    def write(type_: str, *lines: str, processes: int = 2) -> Path:
        file = tmp_path / "accelerate.yaml"
        head = ["compute_environment: LOCAL_MACHINE", f"distributed_type: {type_}", f"num_processes: {processes}"]
        file.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
        return file

    return write
