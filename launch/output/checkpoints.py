"""Checkpoints that a run can resume from: found, inspected, told apart and rotated.

Trainer writes a checkpoint in place, file by file, and resumes from the highest number whether it
is whole or not. If the optimizer state is missing, Trainer silently starts with a fresh optimizer.
So we inspect the files ourselves: by the manifest that our own saves leave, or, in those of others,
as far as the files tell. Nothing in them is executed. A damaged checkpoint is never deleted, only
one whose save was cut short.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from launch.host.files import read_regular
from launch.output import identity, manifest
from launch.terminal import memory_size
from recipes.errors import mistake
from recipes.run import Json, RunSpec

STATE = "trainer_state.json"
_REQUIRED = {"global_step", "max_steps", "log_history"}  # of trainer_state.json
_REMOVED = "_removed-"  # Trainer does not push what begins with an underscore
_WEIGHTS = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin")
_SHARD_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_STATES = ("optimizer*", "scheduler.pt", "rng_state*", "global_step*", "latest", "pytorch_model_fsdp*")


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


# --- Finding them ---------------------------------------------------------------------------------


def numbered(output_dir: str | Path) -> list[Path]:
    """The folders checkpoint-N in `output_dir`, newest first."""
    found = (path for path in Path(output_dir).glob("checkpoint-*") if _number(path) is not None and path.is_dir())
    return sorted(found, key=_step, reverse=True)


def inspect(path: Path) -> Checkpoint:
    """The checkpoint in a folder with its faults. A file that cannot be read is a fault."""
    try:
        found = tuple(faults(path))
        step = _step(path) if found or _number(path) is not None else _state(path)["global_step"]
        return Checkpoint(path, step, found, tuple(notes(path)))
    except Exception as error:  # a damaged file may hold any byte
        return Checkpoint(path, _step(path), (f"cannot be read ({type(error).__name__}: {error})",))


def inspect_own(path: Path, run: Json | None) -> Checkpoint:
    """As `inspect`, but a checkpoint of another run than this one counts as damaged."""
    if identity.is_foreign(path, run):
        return Checkpoint(path, _step(path), ("it is another run's",))
    return inspect(path)


def newest_valid(output_dir: str | Path, after: int = -1) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest checkpoint that can be resumed from, and the damaged ones that are newer.

    Those of another run than the folder's count as damaged. If no record names the folder's run, it
    is that of the newest whole checkpoint. Those up to step `after` are not looked at.
    """
    run = identity.of_folder(Path(output_dir))
    damaged: list[Checkpoint] = []
    for path in (path for path in numbered(output_dir) if _step(path) > after):
        checkpoint = inspect_own(path, run)
        if checkpoint.valid:
            return checkpoint, damaged
        damaged.append(checkpoint)
    return None, damaged


def newest_complete(output_dir: str | Path) -> Path | None:
    """The newest checkpoint of the folder's run that was saved whole, as far as can be told at
    once: a resume reads every byte, and there may be no time for that.
    """
    run = identity.of_folder(Path(output_dir))
    own = (path for path in numbered(output_dir) if not identity.is_foreign(path, run))
    return next((path for path in own if _looks_complete(path)), None)


def _looks_complete(path: Path) -> bool:
    return manifest.has_its_files(path) if manifest.exists(path) else inspect(path).valid


def _step(path: Path) -> int:
    return _number(path) or 0


def _number(path: Path) -> int | None:
    """N of checkpoint-N, 0 too. None if the folder has another name."""
    number = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(number.group(1)) if number else None


# --- Inspecting one -------------------------------------------------------------------------------


def faults(path: Path) -> list[str]:
    """What is missing, changed or broken, one line each; empty for a checkpoint that resumes
    exactly. A manifest answers for every byte.
    """
    result = ["marked incomplete"] if (path / manifest.TRAINERS_MARKER).exists() else []
    if not manifest.exists(path):
        return result + _faults_in_part(path)
    result += manifest.differences(path)
    if result:
        return result
    step = manifest.read(path)["step"]
    if _number(path) not in (None, step):
        return [f"{manifest.NAME} is that of step {step}"]
    return _state_faults(path, step)  # as this version of Trainer writes it


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


def epoch_of(checkpoint: Path) -> float:
    """How many epochs a checkpoint that has no faults has trained."""
    return _state(checkpoint).get("epoch", 0.0)


def _state(checkpoint: Path) -> Json:
    return json.loads(read_regular(checkpoint / STATE))


def _state_faults(checkpoint: Path, step: int | None) -> list[str]:
    """What is wrong with the state of a checkpoint of this step; any step if it is None."""
    from transformers import TrainerState

    try:
        state = _state(checkpoint)
        TrainerState(**state)  # fields come and go between versions
    except FileNotFoundError:
        return [f"{STATE} is missing"]
    except TypeError:
        return [f"{STATE} is not Trainer's"]
    except (OSError, ValueError, AttributeError):
        return [f"{STATE} cannot be read"]
    if not set(state) >= _REQUIRED:
        return [f"{STATE} is not Trainer's"]
    if type(state["global_step"]) is not int or step not in (None, state["global_step"]):
        return [f"{STATE} is that of step {state['global_step']}"]
    return []


def _faults_in_part(path: Path) -> list[str]:
    """The faults of a checkpoint without a manifest: files that are missing or cannot be read.

    A resume needs those that Trainer would do without in silence. DeepSpeed and FSDP themselves
    refuse a checkpoint that lacks a shard. Weights alone, as `save_only_model` leaves them, are
    valid.
    """
    names = manifest.listed(path)
    if odd := [name for name in names if not (path / name).is_file() and not (path / name).is_dir()]:
        return [f"{name} is not a file" for name in odd]  # to open a pipe would take forever
    try:
        missing = [f"{name} is missing" for name in _needed(path, names) if name not in names]
    except ValueError as error:
        return [str(error)]
    unreadable = [fault for name in names if name != STATE and (fault := _fault(path / name))]
    return [*_state_faults(path, _number(path)), *missing, *unreadable]


def _holds_weights_alone(path: Path) -> bool:
    """True if there is no state beside the weights: a resume starts with a new optimizer."""
    return not any(True for pattern in _STATES for _ in path.glob(pattern))


def _needed(path: Path, names: list[str]) -> list[str]:
    """The files without which Trainer would start something afresh. The number of processes that
    wrote the checkpoint is read from its own files.

    Raises `ValueError` with the fault if there are no weights, or their index cannot be read.
    """
    ranks = [int(found[1]) for name in names if (found := re.fullmatch(r"rng_state_(\d+)\.pth", name))]
    random = [f"rng_state_{rank}.pth" for rank in range(max(ranks) + 1)] if ranks else ["rng_state.pth"]
    if any(name.startswith("global_step") for name in names):
        return random  # DeepSpeed keeps the schedule with its states
    if any(name.startswith(("pytorch_model_fsdp", "optimizer_")) for name in names):
        return ["scheduler.pt", *random]
    return [*_weights(path, names), *([] if _holds_weights_alone(path) else ["optimizer.pt", "scheduler.pt", *random])]


def _weights(path: Path, names: list[str]) -> list[str]:
    for index in (name for name in _SHARD_INDEXES if name in names):
        try:
            return sorted({*json.loads((path / index).read_text())["weight_map"].values()})
        except (OSError, LookupError, ValueError, TypeError, AttributeError):
            raise ValueError(f"{index} cannot be read") from None
    if not any(name in names for name in _WEIGHTS):
        raise ValueError("the weights are missing")
    return []


def _fault(file: Path) -> str:
    """What is wrong with a file that is there; empty if nothing is."""
    try:
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="np"):  # the header, and that the file is as long as it says
                pass
        elif file.suffix in (".pt", ".pth", ".bin") and file.name != "training_args.bin":
            with zipfile.ZipFile(file) as archive:  # each part has a checksum
                if archive.testzip() is not None:
                    return f"{file.name} is cut off or damaged"
            # DeepSpeed pickles classes of its own: to load them would run what they name.
            return "" if file.name.endswith("_states.pt") else _refusal_to_load(file)
    except (ValueError, RecursionError):
        return f"{file.name} cannot be read"
    except (OSError, SafetensorError, zipfile.BadZipFile, EOFError, NotImplementedError):
        return f"{file.name} is cut off or damaged"
    return ""


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


# --- Keeping and deleting -------------------------------------------------------------------------


def archive_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint. Trainer's rotation counts by number and keeps the valid ones."""
    target, count = path.with_name(f"damaged-{path.name}"), 1
    while target.exists():
        count += 1
        target = path.with_name(f"damaged-{path.name}-{count}")
    return path.rename(target)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete old checkpoints beside `newest`, so that `limit` are left, among them the best.

    As Trainer does it, but by their steps, since a copied folder or a wrong clock gives any times.
    Those beyond `newest` are of a run that was resumed from an earlier step. They go first, and so
    do those that were never completed. Those of another run stay.
    """
    if limit is None or limit <= 0:
        return
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    run = identity.of_checkpoint(newest)

    def worth(path: Path) -> tuple[bool, bool, int]:
        is_complete = not manifest.exists(path) or manifest.is_committed(path)
        return is_complete, _step(path) <= _step(newest), _step(path)

    by_age = sorted((path for path in numbered(newest.parent) if not identity.is_foreign(path, run)), key=worth)
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


def require_disk_space(run: RunSpec, checkpoint_bytes: int, model_bytes: int, steps: int) -> None:
    """Raises `UserError` if the checkpoints that are kept, and one being written, would not fit.

    Those of this run that are there already make room for new ones.
    """
    there = 0 if run["fresh"] else len(numbered(run["output_dir"]))
    new = _new_checkpoints(run, there, steps)
    is_model_beside_all = new < (run["save_total_limit"] or 0) + 1 - there
    needed = new * checkpoint_bytes + (model_bytes if is_model_beside_all or not new else 0)
    free = shutil.disk_usage(run["output_dir"]).free
    if free > needed:
        return
    at_once = f" in {new} checkpoints at once: an older one is deleted when a newer one is whole" if new > 1 else ""
    what = f"{run['output_dir']} has {memory_size(free)} free, this run saves about {memory_size(needed)}{at_once}"
    fix = "--output_dir on a larger disk"
    if new > 1 and run["save_total_limit"] > 1:
        fix += ", or --save_total_limit 1"
    raise mistake("output_dir", what, fix, run.setting("output_dir").source)


def _new_checkpoints(run: RunSpec, there: int, steps: int) -> int:
    """How many checkpoints will be there at once beside those that are there; at least, if nobody
    can know: only the evaluations tell when `save_strategy best` saves.
    """
    if run["save_strategy"] == "no":
        return 0
    every = run["save_steps"] * (steps if run["save_steps"] < 1 else 1)
    epochs = math.ceil(run["num_train_epochs"])
    saves = {"steps": math.ceil(steps / max(1, every)), "epoch": epochs if run["max_steps"] < 1 else 1}
    limit = run["save_total_limit"]
    wanted = 1 if limit is None or limit < 1 else max(1, limit + 1 - there)  # without a limit the user deletes them
    return min(wanted, saves.get(run["save_strategy"], 1))
