"""Hardware, driver and versions that the figures were measured with."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata

REHEARSAL = "CPU rehearsal"
LIBRARIES = ("torch", "transformers", "accelerate", "peft")


def describe(rehearse: bool = False) -> dict[str, str]:
    """Hardware, driver and versions by name: "unknown" or "missing" for what is."""
    from recipes.run import hardware

    found = {"hardware": REHEARSAL if rehearse else str(hardware.read())}
    if not rehearse:
        found["driver"] = _driver()
    found |= {name: _version(name) for name in LIBRARIES}
    return {**found, "CUDA": _cuda(), "python": platform.python_version()}


def versions() -> str:
    """The machine in one line."""
    return in_words(describe())


def in_words(machine: dict[str, str]) -> str:
    named = [f"{name} {value}" for name, value in machine.items() if name != "hardware"]
    return ", ".join([machine["hardware"], *named])


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _cuda() -> str:
    """The CUDA version that torch was built with."""
    try:
        import torch
    except ImportError:
        return "unknown"
    return torch.version.cuda or "none"


def _driver() -> str:
    if not shutil.which("nvidia-smi"):
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):  # a driver may hang
        return "unknown"
    return lines[0].strip() or "unknown"
