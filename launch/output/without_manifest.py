"""A checkpoint without a manifest, as plain Trainer or DeepSpeed writes it: are the files that a
resume needs there, and can they be read?

Nothing in the files is executed.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from launch.output import manifest
from launch.output.trainer_state import state_faults

_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_SHARD_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_CONFIGS = ("config.json", "adapter_config.json")  # a resume reads them, if only for a version
_STATES = ("optimizer*", "scheduler.pt", "rng_state*", "global_step*", "latest", "pytorch_model_fsdp*")
_END_OF_ZIP, _END_BYTES = b"PK\5\6", 22


def faults_in_part(path: Path, step: int | None, deepspeed: bool) -> list[str]:
    """What is missing or cannot be read, one line each. `step` is the folder's, or None.

    The number of processes that wrote it is read from its own files. Weights alone, as
    `save_only_model` leaves them, are valid.
    """
    names = manifest.listed(path)
    if odd := [name for name in names if not (path / name).is_file() and not (path / name).is_dir()]:
        return [f"{name} is not a file" for name in odd]  # to open a pipe would take forever
    try:
        needed = _needed(path, deepspeed)
    except ValueError as error:
        return [str(error)]
    result = state_faults(path, step)
    for pattern in [*needed, *(name for name in _CONFIGS if name in names)]:
        files = sorted(path.glob(pattern))
        result += [fault for file in files if (fault := _fault(file))] if files else [f"{pattern} is missing"]
    return result


def holds_weights_alone(path: Path) -> bool:
    """True if there is no state beside the weights: a resume starts with a new optimizer."""
    return not any(True for pattern in _STATES for _ in path.glob(pattern))


def _needed(path: Path, deepspeed: bool) -> list[str]:
    """Names or patterns of the files that a resume by this kind of engine reads.

    Raises `ValueError` with the fault if a file that names others cannot be read.
    """
    names = [file.name for file in path.iterdir()]
    ranks = [int(found[1]) for name in names if (found := re.fullmatch(r"rng_state_(\d+)\.pth", name))]
    random = [f"rng_state_{rank}.pth" for rank in range(max(ranks) + 1)] if ranks else ["rng_state.pth"]
    if deepspeed and any(name == "latest" or name.startswith("global_step") for name in names):
        folder = _deepspeed_folder(path)
        shards = [f"{folder}/*zero_pp_rank_{rank}_*_optim_states.pt" for rank in ranks or [0]]
        return [f"{folder}/*_model_states.pt", *shards, *random]
    states = ["scheduler.pt", *random]
    if any(name.startswith(("pytorch_model_fsdp", "optimizer_")) for name in names):
        for state in ("pytorch_model_fsdp", "optimizer"):
            states += [f"{state}.bin"] if f"{state}.bin" in names else [f"{state}_0/.metadata", f"{state}_0/*.distcp"]
        return states
    return [*_weights(path), *([] if holds_weights_alone(path) else ["optimizer.pt", *states])]


def _weights(path: Path) -> list[str]:
    for index in _SHARD_INDEXES:
        if (path / index).exists():
            try:
                return sorted(
                    {Path(name).name for name in json.loads((path / index).read_text())["weight_map"].values()}
                )
            except (OSError, LookupError, ValueError, TypeError, AttributeError):
                raise ValueError(f"{index} cannot be read") from None
    weights = [name for name in _WEIGHTS if (path / name).exists()]
    if not weights:
        raise ValueError("the weights are missing")
    return weights


def _deepspeed_folder(path: Path) -> str:
    try:
        name = (path / "latest").read_text().strip()
    except OSError:
        raise ValueError("latest is missing") from None
    except UnicodeDecodeError:
        raise ValueError("latest cannot be read") from None
    if not re.fullmatch(r"global_step\d+", name) or (path / name).is_symlink():
        raise ValueError("latest does not name a folder of this checkpoint")
    return name


def _fault(file: Path) -> str:
    """What is wrong with a file that is there; empty if nothing is."""
    if file.suffix == ".json":
        return "" if _is_json_object(file) else f"{file.name} cannot be read"
    if file.suffix == ".safetensors":
        is_whole = _whole_safetensors(file)
    elif file.suffix == ".distcp":
        is_whole = _ends_as_zip(file)
    else:
        is_whole = file.name == ".metadata" or _whole_zip(file)
    if not is_whole:
        return f"{file.name} is cut off or damaged"
    if file.suffix not in (".pt", ".pth", ".bin") or file.name.endswith("_states.pt"):
        return ""  # DeepSpeed pickles classes of its own: to load them would run what they name
    return _refusal_to_load(file)


def _refusal_to_load(file: Path) -> str:
    """Why torch does not load the file as in a resume. Its tensors stay on the disk."""
    import torch
    from transformers.trainer_pt_utils import safe_globals

    try:
        with safe_globals():
            torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever a pickle can raise
        return f"{file.name} cannot be loaded ({type(error).__name__})"
    return ""


def _is_json_object(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except (OSError, ValueError, RecursionError):
        return False


def _whole_zip(file: Path) -> bool:
    """True if every part of a torch.save file still has the checksum it was written with."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError):
        return False


def _ends_as_zip(file: Path) -> bool:
    """True if a .distcp file, which is one torch.save after another, is not cut off."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - _END_BYTES))
        return stream.read().startswith(_END_OF_ZIP)


def _whole_safetensors(file: Path) -> bool:
    """True if the header is valid and the file is as long as it says. No tensor is read."""
    try:
        with safe_open(file, framework="np"):
            return True
    except (OSError, SafetensorError):
        return False
