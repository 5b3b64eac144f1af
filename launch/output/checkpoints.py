"""Checkpoints that a run can resume from: found, inspected and rotated.

Trainer writes a checkpoint in place, file by file, and resumes from the highest number whether it
is whole or not. If the optimizer state is missing, Trainer silently starts with a fresh optimizer.
So we inspect the files ourselves: by the manifest that our own saves leave, or, in those of others,
as far as the files tell. Nothing in them is executed. A damaged checkpoint is never deleted.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from launch.output import manifest
from launch.output.shards import shard_faults

_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_CONFIGS = ("config.json", "adapter_config.json")  # a resume reads them, if only for a version
_RANK_STATE = re.compile(r"rng_state_(\d+)\.pth")
_SHARD_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Entries that Trainer reads from these files when it resumes.
_ENTRIES = {"optimizer.pt": {"state", "param_groups"}, "scheduler.pt": {"last_epoch"}}
_RANDOM_ENTRIES = {"python", "numpy", "cpu"}
_REMOVED = "_removed-"  # Trainer does not push what begins with an underscore


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


def not_folders(output_dir: str | Path) -> list[Path]:
    """What else has the name of a checkpoint, such as a broken link: it would be in the way."""
    found = Path(output_dir).glob("checkpoint-*")
    return [path for path in found if re.fullmatch(r"checkpoint-\d+", path.name) and not path.is_dir()]


def inspect(path: Path, deepspeed: bool = False) -> Checkpoint:
    """The checkpoint in a folder with its faults, for a run with DeepSpeed or without.

    Never raises: a file that cannot be read is a fault.
    """
    try:
        return Checkpoint(path, _step(path), tuple(faults(path, deepspeed)), tuple(notes(path)))
    except Exception as error:  # a damaged file may hold any byte
        return Checkpoint(path, _step(path), (f"cannot be read ({type(error).__name__}: {error})",))


def newest_valid(output_dir: str | Path, deepspeed: bool = False) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest checkpoint that can be resumed from, and the damaged ones that are newer."""
    damaged: list[Checkpoint] = []
    for path in numbered(output_dir):
        checkpoint = inspect(path, deepspeed)
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


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete old checkpoints beside `newest`, so that `limit` are left, among them the best.

    As Trainer does it, but by their steps, since a copied folder or a wrong clock gives any times.
    Those beyond `newest` are of a run that was given up when it resumed from an earlier step. They
    go first, and so do those that were never completed.
    """
    if limit is None or limit <= 0:
        return
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}

    def worth(path: Path) -> tuple[bool, bool, int]:
        is_complete = not manifest.exists(path) or manifest.is_committed(path)
        return is_complete, _step(path) <= _step(newest), _step(path)

    by_age = sorted(numbered(newest.parent), key=worth)
    old = [path for path in by_age if path.resolve() not in kept]
    remove(old[: max(0, len(by_age) - max(limit, len(kept)))])


def remove(checkpoints: Iterable[Path]) -> None:
    """Delete checkpoints, under another name: a kill in between leaves none that lacks files.

    What cannot be deleted stays, as with Trainer.
    """
    for path in checkpoints:
        doomed = path.with_name(f"{_REMOVED}{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)  # a kill may have left one
        with contextlib.suppress(OSError):
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def finish_removals(output_dir: Path) -> None:
    """Delete what a killed run was about to delete."""
    for doomed in output_dir.glob(f"{_REMOVED}checkpoint-*"):
        shutil.rmtree(doomed, ignore_errors=True)


def faults(path: Path, deepspeed: bool = False) -> list[str]:
    """What is missing, changed or broken, one line each; empty for a checkpoint that resumes
    exactly.

    A manifest answers for every byte. Only a run with DeepSpeed looks into DeepSpeed's files.
    """
    result = ["marked incomplete"] if (path / manifest.TRAINERS_MARKER).exists() else []
    if not manifest.exists(path):
        return result + _faults_in_part(path, deepspeed)
    result += manifest.differences(path)
    if result:
        return result
    step = manifest.read(path)["step"]
    if _step(path) and step != _step(path):
        return [f"{manifest.NAME} is that of step {step}"]
    return _state_faults(path / "trainer_state.json", step)  # as this version of Trainer writes it


def _faults_in_part(path: Path, deepspeed: bool) -> list[str]:
    """What the files of a checkpoint without a manifest tell.

    The number of processes that wrote it is read from its own files. Weights alone, as
    `save_only_model` leaves them, are valid: `notes` says what a resume from them starts afresh.
    """
    result = _state_faults(path / "trainer_state.json", _step(path)) + _config_faults(path)
    if deepspeed and ((path / "latest").exists() or any(path.glob("global_step*"))):
        return result + _deepspeed_faults(path) + _rng_faults(path)
    if any(path.glob("pytorch_model_fsdp*")) or any(path.glob("optimizer_*")):
        return result + _fsdp_faults(path) + _torch_faults(path, ["scheduler.pt"]) + _rng_faults(path)
    result += _weight_faults(path)
    if _holds_weights_alone(path):
        return result
    return result + _torch_faults(path, ["optimizer.pt", "scheduler.pt"]) + _rng_faults(path)


def notes(path: Path) -> list[str]:
    """What a resume would start afresh because the checkpoint was never meant to hold it, and how
    far the checkpoint could be judged.
    """
    result = []
    if _holds_weights_alone(path):
        result = ["it holds weights alone (save_only_model): optimizer, schedule and random state start afresh"]
    if not manifest.exists(path):
        result.append(f"{path.name} has no {manifest.NAME}: it was judged in part, damaged weights may look whole")
    return result


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


def _config_faults(path: Path) -> list[str]:
    """A resume reads these files, and ends in an error if they are not JSON objects."""
    found = [path / name for name in _CONFIGS if (path / name).exists()]
    return [f"{file.name} cannot be read" for file in found if not _is_json_object(file)]


def _is_json_object(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        return False


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
        name = (path / "latest").read_text().strip()
    except OSError:
        return ["latest is missing"]
    except ValueError:
        return ["latest cannot be read"]
    folder = path / name
    if not re.fullmatch(r"global_step\d+", name) or folder.is_symlink():
        return ["latest does not name a folder of this checkpoint"]
    if not folder.is_dir():
        return [f"{folder.name} is missing"]
    files = sorted(folder.glob("*.pt"))
    shards = [file for file in files if file.name.endswith("_optim_states.pt")]
    # DeepSpeed pickles its own classes: only loading would tell more, and would run what they name.
    result = [f"{file.name} is cut off or damaged" for file in files if not _whole_zip(file)]
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

    try:
        with safe_globals():
            content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
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
