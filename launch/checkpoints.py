"""Checkpoints that can really be resumed from: found, judged, and never deleted by us.

Trainer writes a checkpoint in place, file by file, and resumes from the highest number whether it is whole or not;
a missing optimizer state then restarts the optimizer without a word. So validity is judged here, from the files.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_SHARD_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    faults: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        return not self.faults

    def state(self) -> dict[str, Any]:
        """The content of trainer_state.json."""
        return json.loads((self.path / "trainer_state.json").read_text())


def checkpoints(output_dir: str | Path, world_size: int) -> list[Checkpoint]:
    """All checkpoints in `output_dir`, newest first, each judged for the `world_size` that wrote it."""
    folder = Path(output_dir)
    found = []
    for path in folder.glob("checkpoint-*") if folder.is_dir() else ():
        number = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if number and path.is_dir():
            found.append(Checkpoint(path, int(number.group(1)), tuple(faults(path, world_size))))
    return sorted(found, key=lambda checkpoint: -checkpoint.step)


def newest_valid(found: list[Checkpoint]) -> Checkpoint | None:
    return next((checkpoint for checkpoint in found if checkpoint.valid), None)


def set_aside(checkpoint: Checkpoint) -> Path:
    """Rename a damaged checkpoint, so that Trainer's rotation, which counts by number, keeps the valid ones."""
    target = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}")
    count = 1
    while target.exists():
        count += 1
        target = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}-{count}")
    return checkpoint.path.rename(target)


def faults(path: Path, world_size: int) -> list[str]:
    """What is missing or broken, one line each; empty for a checkpoint that resumes exactly."""
    found = []
    if (path / "checkpoint-is-incomplete.txt").exists():
        found.append("marked incomplete")
    found += _state_faults(path / "trainer_state.json")
    if (path / "latest").exists() or any(path.glob("global_step*")):
        found += _deepspeed_faults(path, world_size)
    elif any(path.glob("pytorch_model_fsdp*")) or any(path.glob("optimizer_*")):
        found += _missing(path, ["scheduler.pt"])
    else:
        found += _weight_faults(path) + _torch_faults(path, ["optimizer.pt", "scheduler.pt"])
    return found + _torch_faults(path, _rng_files(world_size))


def _rng_files(world_size: int) -> list[str]:
    return ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]


def _state_faults(file: Path) -> list[str]:
    try:
        state = json.loads(file.read_text())
    except FileNotFoundError:
        return ["trainer_state.json is missing"]
    except (OSError, ValueError):
        return ["trainer_state.json cannot be read"]
    return (
        []
        if isinstance(state, dict) and isinstance(state.get("global_step"), int)
        else ["trainer_state.json has no step"]
    )


def _weight_faults(path: Path) -> list[str]:
    for name in _SHARD_INDEXES:
        if (path / name).exists():
            return _sharded_faults(path, name)
    weights = [name for name in _WEIGHTS if (path / name).exists()]
    if not weights:
        return ["the weights are missing"]
    return [fault for name in weights for fault in _file_faults(path / name)]


def _sharded_faults(path: Path, index: str) -> list[str]:
    try:
        shards = sorted(set(json.loads((path / index).read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{index} cannot be read"]
    return _missing(path, shards) or [fault for name in shards for fault in _file_faults(path / name)]


def _deepspeed_faults(path: Path, world_size: int) -> list[str]:
    try:
        folder = path / (path / "latest").read_text().strip()
    except OSError:
        return ["latest is missing"]
    if not folder.is_dir():
        return [f"{folder.name} is missing"]
    files = sorted(folder.glob("*.pt"))
    shards = [file for file in files if file.name.endswith("_optim_states.pt")]
    found = [fault for file in files for fault in _file_faults(file)]
    if len(shards) != world_size:
        found.append(f"{folder.name} has {len(shards)} optimizer shards for {world_size} processes")
    if not any(file.name.endswith("_model_states.pt") for file in files):
        found.append(f"{folder.name} has no model states")
    return found + _torch_faults(path, ["scheduler.pt"] if (path / "scheduler.pt").exists() else [])


def _missing(path: Path, names: list[str]) -> list[str]:
    return [f"{name} is missing" for name in names if not (path / name).exists()]


def _torch_faults(path: Path, names: list[str]) -> list[str]:
    return _missing(path, names) + [
        fault for name in names if (path / name).exists() for fault in _file_faults(path / name)
    ]


def _file_faults(file: Path) -> list[str]:
    whole = _whole_safetensors(file) if file.suffix == ".safetensors" else zipfile.is_zipfile(file)
    return [] if whole else [f"{file.name} is cut off or damaged"]


def _whole_safetensors(file: Path) -> bool:
    """Whether the header parses and the file is just as long as it says (format: 8-byte length, JSON, data)."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size:
                return False
            header = json.loads(stream.read(length))
        end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return False
    return size == 8 + length + end
