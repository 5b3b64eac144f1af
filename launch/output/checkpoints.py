"""Checkpoints that a run can resume from: found and inspected, and never deleted.

Trainer writes a checkpoint in place, file by file, and resumes from the highest number whether it
is whole or not. If the optimizer state is missing, Trainer silently starts with a fresh optimizer.
So we inspect the files ourselves.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from launch.output.shards import shard_faults

_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_RANK_STATE = re.compile(r"rng_state_(\d+)\.pth")
_SHARD_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Entries that Trainer reads from these files when it resumes.
_ENTRIES = {"optimizer.pt": {"state", "param_groups"}, "scheduler.pt": {"last_epoch"}}
_RANDOM_ENTRIES = {"python", "numpy", "cpu"}


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: `faults` make it unusable, `notes` say what a resume starts afresh."""

    path: Path
    step: int
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        return not self.faults


def numbered(output_dir: str | Path) -> list[Path]:
    """The folders checkpoint-N in `output_dir`, newest first."""
    named = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted((path for path in named if path.is_dir()), key=_step, reverse=True)


def inspect(path: Path) -> Checkpoint:
    """The checkpoint in a folder with its faults.

    Never raises: a file that cannot be read is a fault.
    """
    try:
        return Checkpoint(path, _step(path), tuple(faults(path)), tuple(fresh_parts(path)))
    except Exception as error:  # a damaged file may hold any byte
        return Checkpoint(path, _step(path), (f"cannot be read ({type(error).__name__}: {error})",))


def newest_valid(output_dir: str | Path) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest checkpoint that can be resumed from, and the damaged ones that are newer."""
    damaged: list[Checkpoint] = []
    for path in numbered(output_dir):
        checkpoint = inspect(path)
        if checkpoint.valid:
            return checkpoint, damaged
        damaged.append(checkpoint)
    return None, damaged


def _step(path: Path) -> int:
    """N of checkpoint-N; 0 if the folder has another name."""
    number = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(number.group(1)) if number else 0


def archive_damaged(checkpoint: Checkpoint) -> Path:
    """Rename a damaged checkpoint. Trainer's rotation counts by number and keeps the valid ones."""
    target = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}")
    count = 1
    while target.exists():
        count += 1
        target = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}-{count}")
    return checkpoint.path.rename(target)


def faults(path: Path) -> list[str]:
    """What is missing or broken, one line each; empty for a checkpoint that resumes exactly.

    The number of processes that wrote it is read from its own files. Weights alone, as
    `save_only_model` leaves them, are valid: `fresh_parts` says what a resume from them starts
    afresh.
    """
    result = ["marked incomplete"] if (path / "checkpoint-is-incomplete.txt").exists() else []
    result += _state_faults(path / "trainer_state.json", _step(path))
    if (path / "latest").exists() or any(path.glob("global_step*")):
        return result + _deepspeed_faults(path) + _rng_faults(path)
    if any(path.glob("pytorch_model_fsdp*")) or any(path.glob("optimizer_*")):
        return result + _fsdp_faults(path) + _torch_faults(path, ["scheduler.pt"]) + _rng_faults(path)
    result += _weight_faults(path)
    if _holds_weights_alone(path):
        return result
    return result + _torch_faults(path, ["optimizer.pt", "scheduler.pt"]) + _rng_faults(path)


def fresh_parts(path: Path) -> list[str]:
    """What a resume would start afresh because the checkpoint was never meant to hold it."""
    if _holds_weights_alone(path):
        return ["it holds weights alone (save_only_model): optimizer, schedule and random state start afresh"]
    return []


def _holds_weights_alone(path: Path) -> bool:
    """Trainer writes trainer_state.json last.

    If no other state is beside it, none was ever written.
    """
    states = ("optimizer*", "scheduler.pt", "rng_state*", "global_step*", "latest", "pytorch_model_fsdp*")
    return not any(True for pattern in states for _ in path.glob(pattern))


def _rng_faults(path: Path) -> list[str]:
    """One random state per rank: `rng_state.pth` of one process, or 0 to the last without a gap."""
    ranks = sorted(int(number.group(1)) for file in path.iterdir() if (number := _RANK_STATE.fullmatch(file.name)))
    if not ranks:
        return _torch_faults(path, ["rng_state.pth"])
    return _torch_faults(path, [f"rng_state_{rank}.pth" for rank in range(ranks[-1] + 1)])


def _state_faults(file: Path, step: int) -> list[str]:
    try:
        state = json.loads(file.read_text())
    except FileNotFoundError:
        return ["trainer_state.json is missing"]
    except (OSError, ValueError):
        return ["trainer_state.json cannot be read"]
    if not _is_trainer_state(state):
        return ["trainer_state.json is not Trainer's"]
    if step and state["global_step"] != step:
        return [f"trainer_state.json is that of step {state['global_step']}"]
    return []


def _is_trainer_state(state: Any) -> bool:
    """Whether the installed TrainerState accepts it. Fields come and go between versions."""
    from transformers import TrainerState

    try:
        TrainerState(**state)
    except TypeError:
        return False
    return {"global_step", "max_steps", "log_history"} <= set(state)


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
        shards[0]  # an index that names no shard is damaged
    except (OSError, LookupError, ValueError, TypeError, AttributeError):
        return [f"{index} cannot be read"]
    return _missing(path, shards) or [fault for name in shards for fault in _file_faults(path / name)]


def _deepspeed_faults(path: Path) -> list[str]:
    try:
        folder = path / (path / "latest").read_text().strip()
    except OSError:
        return ["latest is missing"]
    if not folder.is_dir():
        return [f"{folder.name} is missing"]
    files = sorted(folder.glob("*.pt"))
    shards = [file for file in files if file.name.endswith("_optim_states.pt")]
    result = [fault for file in files for fault in _file_faults(file)]
    writers = max(1, sum(1 for _ in path.glob("rng_state_*.pth")))
    if len(shards) != writers:
        result.append(f"{folder.name} has {len(shards)} optimizer shards of {writers} processes")
    if not any(file.name.endswith("_model_states.pt") for file in files):
        result.append(f"{folder.name} has no model states")
    return result + _torch_faults(path, ["scheduler.pt"] if (path / "scheduler.pt").exists() else [])


def _fsdp_faults(path: Path) -> list[str]:
    """Each state is one file, or a folder with the shards of all ranks."""
    result = []
    for name in ("pytorch_model_fsdp", "optimizer"):
        whole = f"{name}.bin"
        result += _torch_faults(path, [whole]) if (path / whole).exists() else shard_faults(path / f"{name}_0")
    return result


def _missing(path: Path, names: list[str]) -> list[str]:
    return [f"{name} is missing" for name in names if not (path / name).exists()]


def _torch_faults(path: Path, names: list[str]) -> list[str]:
    return _missing(path, names) + [
        fault for name in names if (path / name).exists() for fault in _file_faults(path / name)
    ]


def _file_faults(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        return [] if _whole_safetensors(file) else [f"{file.name} is cut off or damaged"]
    if not _whole_zip(file):
        return [f"{file.name} is cut off or damaged"]
    return _loading_faults(file)


def _loading_faults(file: Path) -> list[str]:
    """What goes wrong when the file is loaded as in a resume. Its tensors stay on the disk."""
    import torch
    from transformers.trainer_pt_utils import safe_globals

    # DeepSpeed pickles its own classes, and loads them the same way.
    by_deepspeed = file.name.endswith("_states.pt")
    try:
        with safe_globals():
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=not by_deepspeed)
    except Exception as error:  # whatever a pickle can raise
        return [f"{file.name} cannot be loaded ({type(error).__name__})"]
    expected = _RANDOM_ENTRIES if file.name.startswith("rng_state") else _ENTRIES.get(file.name, set())
    lacking = expected - set(content) if isinstance(content, dict) else expected or {"a dictionary"}
    return [f"{file.name} lacks {', '.join(sorted(lacking))}"] if lacking else []


def _whole_zip(file: Path) -> bool:
    """Whether every part of a torch.save file still has the checksum it was written with."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError):
        return False


def _whole_safetensors(file: Path) -> bool:
    """Whether the header is valid and the file is as long as it says. No tensor is read."""
    try:
        with safe_open(file, framework="np"):
            return True
    except (OSError, SafetensorError):
        return False
