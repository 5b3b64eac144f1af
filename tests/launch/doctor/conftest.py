"""For the tests of the doctor: a broken torch, and an nvidia-smi that is a script."""

import os

import pytest

from launch.doctor import machine
from tests.support.running import ROOT

SMI = """\
#!/bin/sh
case "$1" in
    --query-gpu=uuid) printf 'GPU-a\\nGPU-b\\n' ;;
    --query-gpu=driver_version) printf '580.1\\n580.1\\n' ;;
    --query-gpu=index,memory.free,memory.total) printf '0, 80000, 81559\\n1, 1000, 81559\\n' ;;
    --query-compute-apps=*) printf '4242, python\\n' ;;
esac
"""


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
