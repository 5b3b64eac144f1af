"""What can be told of a checkpoint that has no manifest: plain Trainer or DeepSpeed has written it,
or an older version of this program.

Its files are judged as far as they tell, and nothing in them is executed.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from launch.output import manifest
from launch.output.shards import saved_object, shard_faults
from launch.output.trainer_state import state_faults
from launch.terminal import plural

_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_CONFIGS = ("config.json", "adapter_config.json")  # a resume reads them, if only for a version
_RANK_STATE = re.compile(r"rng_state_(\d+)\.pth")
_SHARD_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Entries that Trainer reads from these files when it resumes.
_ENTRIES = {"optimizer.pt": {"state", "param_groups"}, "scheduler.pt": {"last_epoch"}}
_RANDOM_ENTRIES = {"python", "numpy", "cpu"}


def faults_in_part(path: Path, step: int | None, deepspeed: bool) -> list[str]:
    """What the files of a checkpoint without a manifest tell.

    The number of processes that wrote it is read from its own files. Weights alone, as
    `save_only_model` leaves them, are valid. `step` is that of the folder's name, if it has one.
    """
    if odd := [name for name in manifest.listed(path) if not (path / name).is_file() and not (path / name).is_dir()]:
        return [f"{name} is not a file" for name in odd]  # to open a pipe would take forever
    result = state_faults(path, step) + _config_faults(path)
    if deepspeed and ((path / "latest").exists() or any(path.glob("global_step*"))):
        return result + _deepspeed_faults(path) + _rng_faults(path)
    if any(path.glob("pytorch_model_fsdp*")) or any(path.glob("optimizer_*")):
        return result + _fsdp_faults(path) + _torch_faults(path, ["scheduler.pt"]) + _rng_faults(path)
    result += _weight_faults(path)
    if holds_weights_alone(path):
        return result
    return result + _torch_faults(path, ["optimizer.pt", "scheduler.pt"]) + _rng_faults(path)


def holds_weights_alone(path: Path) -> bool:
    """Whether no state was ever meant to be beside the weights, by the arguments of the run.

    Whoever passes weights on may leave the arguments out.
    """
    states = ("optimizer*", "scheduler.pt", "rng_state*", "global_step*", "latest", "pytorch_model_fsdp*")
    if any(True for pattern in states for _ in path.glob(pattern)):
        return False
    arguments = path / "training_args.bin"
    return not arguments.exists() or _saved_only_model(arguments)


def _saved_only_model(arguments: Path) -> bool:
    try:
        return bool(saved_object(arguments)["save_only_model"])
    except Exception:  # a damaged pickle may hold any byte; before 4.37 there was no such argument
        return False


def _rng_faults(path: Path) -> list[str]:
    """One random state per rank: `rng_state.pth` of one process, or 0 to the last without a gap."""
    ranks = sorted(int(number.group(1)) for file in path.iterdir() if (number := _RANK_STATE.fullmatch(file.name)))
    if not ranks:
        return _torch_faults(path, ["rng_state.pth"])
    return _torch_faults(path, [f"rng_state_{rank}.pth" for rank in range(ranks[-1] + 1)])


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
        result.append(f"{folder.name} has {plural(len(shards), 'optimizer shard')} of {plural(writers, 'process')}")
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
