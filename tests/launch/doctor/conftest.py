"""For the tests of the doctor: a broken torch, and an nvidia-smi that is a script."""

import os

import pytest

from launch.doctor import machine
from tests.support.doctor import SMI
from tests.support.running import ROOT


@pytest.fixture
def broken_torch(tmp_path) -> dict[str, str]:
    """An environment in which `import torch` fails."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise ImportError('libcudart is missing')")
    search = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": search, "PYTHONIOENCODING": "utf-8"}


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Replaces nvidia-smi by a script, by default one that shows two H100s connected by NVLink."""

    def write(script: str = SMI) -> None:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    for answer in (machine.driver, machine.smi_rows):
        answer.cache_clear()
    yield write
    for answer in (machine.driver, machine.smi_rows):
        answer.cache_clear()
