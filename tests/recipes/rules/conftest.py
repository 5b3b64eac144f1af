"""A fresh state for each test: the libraries remember things for a whole process."""

from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate keeps its state for a whole process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def write_yaml(tmp_path):
    """Writes an Accelerate YAML for two processes."""

    def write(type_: str, *lines: str, processes: int = 2) -> Path:
        file = tmp_path / "accelerate.yaml"
        head = ["compute_environment: LOCAL_MACHINE", f"distributed_type: {type_}", f"num_processes: {processes}"]
        file.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
        return file

    return write
