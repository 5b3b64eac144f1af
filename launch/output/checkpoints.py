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
from itertools import count
from pathlib import Path

from launch.host.files import read_regular
from launch.output import manifest, record
from launch.terminal import memory_size
from recipes.errors import mistake
from recipes.run import Json, RunSpec
from recipes.run.fingerprints import MODEL_FILES

STATE = "trainer_state.json"
_REMOVED = "_removed-"  # Trainer does not push what begins with an underscore
# How the names of a checkpoint's files begin.
_WEIGHTS = ("model", "adapter_model", "pytorch_model")
_SHARDED = ("global_step", "pytorch_model_fsdp", "optimizer_")  # of DeepSpeed and FSDP
_STATES = ("optimizer", "scheduler.pt", "rng_state")


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


def inspect(path: Path, run: Json | None = None) -> Checkpoint:
    """The checkpoint in a folder with its faults. One of another run than `run` has that fault."""
    if manifest.is_foreign(path, run):
        return Checkpoint(path, _step(path), ("it is another run's",))
    try:
        found = tuple(faults(path))
        step = _step(path) if found or _number(path) is not None else _state(path)["global_step"]
        return Checkpoint(path, step, found, tuple(notes(path)))
    except Exception as error:  # a damaged file may hold any byte
        return Checkpoint(path, _step(path), (f"cannot be read ({type(error).__name__}: {error})",))


def newest_valid(output_dir: str | Path, after: int = -1) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest checkpoint that can be resumed from, and the damaged ones that are newer.

    Those of another run than the folder's count as damaged. If no record names the folder's run, it
    is that of the newest whole checkpoint. Those up to step `after` are not looked at.
    """
    run = record.read_intact(output_dir).get("run")
    damaged: list[Checkpoint] = []
    for path in (path for path in numbered(output_dir) if _step(path) > after):
        checkpoint = inspect(path, run)
        if checkpoint.valid:
            return checkpoint, damaged
        damaged.append(checkpoint)
    return None, damaged


def newest_complete(output_dir: str | Path) -> Path | None:
    """The newest checkpoint of the folder's run that was saved whole, as its manifest says: a
    resume reads every byte, and there may be no time for that.
    """
    run = record.read_intact(output_dir).get("run")
    own = (path for path in numbered(output_dir) if not manifest.is_foreign(path, run))
    return next((path for path in own if manifest.is_committed(path)), None)


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
    if (path / manifest.TRAINERS_MARKER).exists():
        return ["marked incomplete"]
    found = manifest.differences(path) if manifest.exists(path) else _faults_in_part(path)
    return found or _state_faults(path)


def notes(path: Path) -> list[str]:
    """What a resume would start afresh because the checkpoint was never meant to hold it, and how
    far the checkpoint could be judged.
    """
    result = []
    if not _holds_states(path):
        result = ["it holds weights alone (save_only_model): optimizer, schedule and random state start afresh"]
    if not manifest.exists(path):
        result.append(f"{path.name} has no {manifest.NAME}: it was judged in part, damaged weights may look whole")
    return result


def epoch_of(checkpoint: Path) -> float:
    """How many epochs a checkpoint that has no faults has trained."""
    return _state(checkpoint).get("epoch", 0.0)


def _state(checkpoint: Path) -> Json:
    return json.loads(read_regular(checkpoint / STATE))


def _state_faults(path: Path) -> list[str]:
    """What is wrong with the state that Trainer resumes from. Its fields change by version."""
    from transformers import TrainerState

    try:
        step = TrainerState(**_state(path)).global_step
    except FileNotFoundError:
        return [f"{STATE} is missing"]
    except (OSError, ValueError, TypeError, AttributeError):
        return [f"{STATE} is not Trainer's"]
    return [] if _number(path) in (None, step) else [f"{STATE} is that of step {step}"]


def _faults_in_part(path: Path) -> list[str]:
    """The faults of a checkpoint without a manifest: files that are missing or cannot be read.

    A resume needs those that Trainer would do without in silence. DeepSpeed and FSDP themselves
    refuse a checkpoint that lacks a shard. Weights alone, as `save_only_model` leaves them, are
    valid.
    """
    names = manifest.listed(path)
    is_sharded = any(name.startswith(_SHARDED) for name in names)
    needed: dict[str, str | tuple[str, ...]] = {} if is_sharded else {"model": _WEIGHTS}
    if _holds_states(path):
        needed |= {name: name for name in _STATES[2 if is_sharded else 0 :]}
    unreadable = [fault for name in names if (fault := _fault(path / name))]
    missing = [what for what, start in needed.items() if not any(name.startswith(start) for name in names)]
    return unreadable or [f"{what} is missing" for what in missing]


def _holds_states(path: Path) -> bool:
    """False if there is nothing beside the weights: a resume starts with a new optimizer."""
    return any(name.startswith((*_STATES, *_SHARDED)) for name in manifest.listed(path))


def _fault(file: Path) -> str:
    """Why a file cannot be read; empty if it can. DeepSpeed pickles classes of its own, and
    training_args.bin is one: to load them would run what they name.
    """
    import torch
    from safetensors import safe_open
    from transformers.trainer_pt_utils import safe_globals

    try:
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="np"):  # the header, and that the file is as long as it says
                pass
        elif file.suffix in (".pt", ".pth", ".bin") and file.name != "training_args.bin":
            with zipfile.ZipFile(file) as archive:  # each part has a checksum
                if archive.testzip():
                    raise zipfile.BadZipFile
            if not file.name.endswith("_states.pt"):
                with safe_globals():
                    torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # whatever a damaged file can raise
        return f"{file.name} is damaged or cannot be loaded ({type(error).__name__})"
    return ""


def model_files(folder: Path) -> list[str]:
    """The files of a model in an output folder: weights, configuration, tokenizer."""
    found = (file for pattern in MODEL_FILES for file in folder.glob(pattern))
    return sorted({file.name for file in found if file.is_file()})


def model_notes(folder: Path, then: Json) -> list[str]:
    """How the model of a finished run differs from its recorded files, and where else it is."""
    changed = manifest.changes(folder, then)
    if not changed:
        return []
    lost = {name: of_file for name, of_file in then.items() if any(line.startswith(f"{name} ") for line in changed)}
    whole = filter(manifest.is_committed, numbered(folder))
    same = next((path.name for path in whole if not manifest.changes(path, lost)), None)
    remedy = f"copy {', '.join(lost)} from {same}, which holds the same" if same else "--fresh trains it again"
    return [f"{'; '.join(changed)}: {remedy}"]


# --- Keeping and deleting -------------------------------------------------------------------------


def archive_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint. Trainer's rotation counts by number and keeps the valid ones."""
    names = (f"damaged-{path.name}" + (f"-{number}" if number > 1 else "") for number in count(1))
    return path.rename(next(target for name in names if not (target := path.with_name(name)).exists()))


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete old checkpoints beside `newest`, so that `limit` are left, among them the best.

    As Trainer does it, but by their steps, since a copied folder or a wrong clock gives any times.
    Those beyond `newest` are of a run that was resumed from an earlier step, and go first. Those of
    another run stay.
    """
    if limit is None or limit <= 0:
        return
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    run = manifest.run_of(newest)
    own = [path for path in numbered(newest.parent) if not manifest.is_foreign(path, run)]
    own.sort(key=lambda path: (_step(path) <= _step(newest), _step(path)))
    old = [path for path in own if path.resolve() not in kept]
    remove(old[: max(0, len(own) - max(limit, len(kept)))])


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


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed run has left in an output folder: checkpoints that it was deleting,
    converted copies of others, and what safetensors had written of the model.
    """
    for kind in (f"{_REMOVED}checkpoint-*", "converted-checkpoint-*"):
        for left in folder.glob(kind):
            shutil.rmtree(left, ignore_errors=True)
    for unfinished in folder.glob(".tmp??????"):  # as Rust's tempfile names it
        with contextlib.suppress(OSError):  # a folder
            unfinished.unlink()


def require_disk_space(run: RunSpec, checkpoint_bytes: int, model_bytes: int, steps: int) -> None:
    """Raises `UserError` if the checkpoints that are kept, and one being written, would not fit.

    Those of this run that are there already make room for new ones. Only the evaluations tell when
    `save_strategy best` saves: at least once.
    """
    every = run["save_steps"] * (steps if run["save_steps"] < 1 else 1)
    epochs = math.ceil(run["num_train_epochs"]) if run["max_steps"] < 1 else 1
    saves = {"no": 0, "best": 1, "epoch": epochs, "steps": math.ceil(steps / max(1, every))}[run["save_strategy"]]
    there = 0 if run["fresh"] else len(numbered(run["output_dir"]))
    at_once = max(1, (run["save_total_limit"] or 0) + 1 - there)  # without a limit the user deletes them
    new = min(saves, at_once)
    needed = new * checkpoint_bytes + (model_bytes if new < at_once else 0)  # the model comes when all are saved
    free = shutil.disk_usage(run["output_dir"]).free
    if free > needed:
        return
    kept = f" in {new} checkpoints at once: an older one is deleted when a newer one is whole" if new > 1 else ""
    what = f"{run['output_dir']} has {memory_size(free)} free, this run saves about {memory_size(needed)}{kept}"
    fix = "--output_dir on a larger disk" + ", or --save_total_limit 1" * (new > 1 and run["save_total_limit"] > 1)
    raise mistake("output_dir", what, fix, run.setting("output_dir").source)
