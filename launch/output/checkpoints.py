"""Checkpoints that a run can resume from: found, inspected and rotated.

Trainer writes a checkpoint in place, file by file, and resumes from the highest number whether it
is whole or not. If the optimizer state is missing, Trainer silently starts with a fresh optimizer.
So we inspect the files ourselves: by the manifest that our own saves leave, or, in those of others,
as far as the files tell. Nothing in them is executed. A damaged checkpoint is never deleted, only
one whose save was cut short.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from launch.output import identity, manifest, record
from launch.output.trainer_state import state_faults, step_of
from launch.output.without_manifest import faults_in_part, holds_weights_alone
from launch.terminal import memory_size
from recipes.errors import mistake
from recipes.run import Json, RunSpec

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


def in_the_way(output_dir: str | Path) -> list[Checkpoint]:
    """What only has the name of a checkpoint, such as a broken link, or of a record."""
    folder = Path(output_dir)
    named = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    result = [Checkpoint(path, 0, ("it is not a folder",)) for path in named if not path.is_dir()]
    if os.path.lexists(folder / record.NAME) and not (folder / record.NAME).is_file():
        result.append(Checkpoint(folder / record.NAME, 0, ("it is not a file",)))
    return result


def inspect(path: Path, deepspeed: bool = False) -> Checkpoint:
    """The checkpoint in a folder with its faults, for a run with DeepSpeed or without.

    Never raises: a file that cannot be read is a fault.
    """
    try:
        found = tuple(faults(path, deepspeed))
        step = _step(path) if found or _number(path) is not None else step_of(path)
        return Checkpoint(path, step, found, tuple(notes(path)))
    except Exception as error:  # a damaged file may hold any byte
        return Checkpoint(path, _step(path), (f"cannot be read ({type(error).__name__}: {error})",))


def inspect_own(path: Path, run: Json | None, deepspeed: bool = False) -> Checkpoint:
    """As `inspect`, but a checkpoint of another run than this one counts as damaged."""
    fault = identity.fault(path, _step(path), run)
    return Checkpoint(path, _step(path), (fault,)) if fault else inspect(path, deepspeed)


def newest_valid(
    output_dir: str | Path, deepspeed: bool = False, after: int = -1, last: float = math.inf
) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The newest checkpoint that can be resumed from, and the damaged ones that are newer.

    Those of another run than the folder's count as damaged, and so do those beyond its `last` step.
    If no record names the folder's run, it is that of the newest whole checkpoint. Those up to step
    `after` are not looked at, and neither are those that were given up: they stay until they are
    the oldest.
    """
    run = identity.of_folder(Path(output_dir))
    damaged: list[Checkpoint] = []
    for path in numbered(output_dir):
        if _step(path) <= after:
            break
        checkpoint = inspect_own(path, run, deepspeed)
        if identity.GIVEN_UP in checkpoint.faults:
            continue
        if checkpoint.valid and checkpoint.step > last:
            checkpoint = replace(checkpoint, faults=(f"it is beyond the last step of this run, {last}",))
        if checkpoint.valid:
            return checkpoint, damaged
        damaged.append(checkpoint)
    return None, damaged


def newest_complete(output_dir: str | Path) -> Path | None:
    """The newest checkpoint of the folder's run that was saved whole, as far as can be told at
    once: a resume reads every byte, and there may be no time for that.
    """
    run = identity.of_folder(Path(output_dir))
    own = (path for path in numbered(output_dir) if not identity.fault(path, _step(path), run))
    return next((path for path in own if _looks_complete(path)), None)


def _looks_complete(path: Path) -> bool:
    return manifest.has_its_files(path) if manifest.exists(path) else inspect(path).valid


def _step(path: Path) -> int:
    return _number(path) or 0


def _number(path: Path) -> int | None:
    """N of checkpoint-N, 0 too. None if the folder has another name."""
    number = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(number.group(1)) if number else None


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
    go first, and so do those that were never completed. Those of another run stay.
    """
    if limit is None or limit <= 0:
        return
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}

    run = identity.of_checkpoint(newest)
    found = {path: identity.fault(path, _step(path), run) for path in numbered(newest.parent)}

    def worth(path: Path) -> tuple[bool, bool, int]:
        is_complete = not manifest.exists(path) or manifest.is_committed(path)
        return is_complete, not found[path] and _step(path) <= _step(newest), _step(path)

    by_age = sorted((path for path in found if found[path] != identity.FOREIGN), key=worth)
    old = [path for path in by_age if path.resolve() not in kept]
    remove(old[: max(0, len(by_age) - max(limit, len(kept)))])


def remove(checkpoints: Iterable[Path]) -> None:
    """Delete checkpoints, under another name: a kill in between leaves none that lacks files.

    What cannot be deleted stays, as with Trainer.
    """
    for path in checkpoints:
        doomed = path.with_name(f"{_REMOVED}{path.name}")
        _delete(doomed)  # a kill may have left one
        with contextlib.suppress(OSError):
            path.rename(doomed)
        _delete(doomed)


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


def finish_removals(output_dir: Path) -> None:
    """Delete what a killed run was about to delete."""
    for doomed in output_dir.glob(f"{_REMOVED}checkpoint-*"):
        _delete(doomed)


def _delete(path: Path) -> None:
    """A folder, or whatever else has its name."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()


def faults(path: Path, deepspeed: bool = False) -> list[str]:
    """What is missing, changed or broken, one line each; empty for a checkpoint that resumes
    exactly.

    A manifest answers for every byte. Only a run with DeepSpeed looks into DeepSpeed's files.
    """
    result = ["marked incomplete"] if (path / manifest.TRAINERS_MARKER).exists() else []
    if not manifest.exists(path):
        return result + faults_in_part(path, _number(path), deepspeed)
    result += manifest.differences(path)
    if result:
        return result
    step = manifest.read(path)["step"]
    if _number(path) not in (None, step):
        return [f"{manifest.NAME} is that of step {step}"]
    return state_faults(path, step)  # as this version of Trainer writes it


def notes(path: Path) -> list[str]:
    """What a resume would start afresh because the checkpoint was never meant to hold it, and how
    far the checkpoint could be judged.
    """
    result = []
    if holds_weights_alone(path):
        result = ["it holds weights alone (save_only_model): optimizer, schedule and random state start afresh"]
    if not manifest.exists(path):
        result.append(f"{path.name} has no {manifest.NAME}: it was judged in part, damaged weights may look whole")
    return result
