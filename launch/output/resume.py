"""What an output folder already holds, and what that means for a run that will write there."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launch.host.files import make_folder
from launch.host.world import World
from launch.output import manifest, other_world, record, submission
from launch.output.checkpoints import (
    Checkpoint,
    archive_damaged,
    finish_removals,
    inspect,
    newest_valid,
    not_folders,
    numbered,
    remove,
)
from launch.terminal import memory_size
from recipes.errors import Problem, UserError, mistake
from recipes.run import Json, RunSpec, fingerprints
from recipes.scaling.timings import require_room


@dataclass(frozen=True)
class Earlier:
    """The run that the folder already holds, if any.

    `checkpoint` is the one to resume from, `finished` true if nothing is left to train, `notes`
    are for a person. `refusal` says why the folder is not for this run.
    """

    checkpoint: Path | None = None
    step: int = 0
    finished: bool = False
    refusal: tuple[Problem, ...] = ()
    notes: list[str] = field(default_factory=list)

    def require_same_training(self) -> None:
        """Raises `UserError` with the refusal, if there is one."""
        if self.refusal:
            raise UserError(*self.refusal)


@contextlib.contextmanager
def output_folder(run: RunSpec, world: World) -> Iterator[None]:
    """Make the output folder, check that a run may write to it, and lock it."""
    handle = world.decide(lambda: _make_and_lock(run))
    try:
        yield
    finally:
        if world.is_main:
            os.close(handle)


def _make_and_lock(run: RunSpec) -> int:
    """The file descriptor that holds the lock."""
    if run["measure"]:
        require_room(run["measure"])
    _make_folder(run)
    handle = os.open(run["output_dir"], os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        what = f"another run is writing to {run['output_dir']}"
        raise mistake("output_dir", what, "another --output_dir, or wait", run.setting("output_dir").source) from None
    except OSError:  # a file system without locks, such as some NFS
        pass
    record.forget_out_of_memory(Path(run["output_dir"]))
    return handle


def _make_folder(run: RunSpec) -> None:
    """Make the folder. Raises `UserError` if it is not writable."""
    folder = Path(run["output_dir"])
    try:
        make_folder(folder)
        probe = folder / ".writable"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise _unwritable(run, error) from None


def _require_no_foreign_model(run: RunSpec) -> None:
    """Raises `UserError` if the folder holds a model that this program did not train."""
    folder = Path(run["output_dir"])
    if _holds_a_run(folder):
        return
    model = run["model_name_or_path"]
    if any(folder.glob("*.safetensors")) or (model and Path(model).is_dir() and folder.samefile(model)):
        what = f"{run['output_dir']} holds a model that was not trained here, and it would be overwritten"
        raise mistake("output_dir", what, "--output_dir with another folder", run.setting("output_dir").source)


def _holds_a_run(folder: Path) -> bool:
    return (folder / record.NAME).exists() or bool(numbered(folder))


def _archive_older_run(run: RunSpec) -> None:
    """Move the run that the folder holds, if any, to FOLDER.old-N."""
    folder = Path(run["output_dir"]).resolve()
    if not _holds_a_run(folder):
        return
    if Path.cwd().is_relative_to(folder):
        what = f"{run['output_dir']} is or holds the current folder, which --fresh would move"
        raise mistake("output_dir", what, "another --output_dir, or another folder to start from")
    try:
        archived = _unused_name(folder)
        archived.mkdir()
        for item in list(folder.iterdir()):  # not the folder itself, which is locked
            if item.name not in submission.KEPT_HERE:
                item.rename(archived / item.name)
    except OSError as error:
        raise _unwritable(run, error) from None


def _unwritable(run: RunSpec, error: OSError) -> UserError:
    what = f"{run['output_dir']} cannot be written: {error.strerror}"
    return mistake("output_dir", what, "choose a writable --output_dir", run.setting("output_dir").source)


def _unused_name(folder: Path) -> Path:
    count = 1
    while (candidate := folder.with_name(f"{folder.name}.old-{count}")).exists():
        count += 1
    return candidate


def make_room(run: RunSpec, checkpoint_bytes: int, model_bytes: int, steps: int) -> None:
    """Require space for what the run keeps at once, and archive an older run if --fresh says so.

    Sizes are estimates of one checkpoint and of the model at the end, `steps` of the whole run.
    Call it last before training, once nothing else is wrong.
    """
    other_world.remove_leftovers(Path(run["output_dir"]))
    _require_disk_space(run, checkpoint_bytes, model_bytes, steps)
    if run["fresh"]:
        _archive_older_run(run)


def _require_disk_space(run: RunSpec, checkpoint_bytes: int, model_bytes: int, steps: int) -> None:
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


def find_earlier_run(run: RunSpec, world: World) -> Earlier:
    """Where to resume. Refused if that would not be the same training, or overwrite a model."""
    try:
        return _earlier_run(run, world)
    except UserError as error:
        return Earlier(refusal=error.problems)


def _earlier_run(run: RunSpec, world: World) -> Earlier:
    _require_no_foreign_model(run)
    folder = Path(run["output_dir"])
    if run["fresh"]:
        return Earlier()
    old = record.read(folder)
    finished = old.get("status") == "finished"
    if run["resume_from_checkpoint"] not in (None, True, "True", "true"):
        return _asked_for(run, world, finished)
    in_the_way = [_skip(Checkpoint(path, 0, ("it is not a folder",))) for path in not_folders(folder)]
    if not numbered(folder) and not finished:
        return Earlier(notes=in_the_way)
    _require_same_training(run, old)
    if finished and not _asks_for_more(run, old):
        notes = [*_missing_model(folder), *_changes(run, old, everything=True)]
        return Earlier(finished=True, step=old.get("global_step", 0), notes=notes)
    finish_removals(folder)
    newest, damaged = newest_valid(folder, run.engine.kind == "deepspeed")
    notes = [*in_the_way, *(_skip(checkpoint) for checkpoint in damaged)]
    if not old:
        notes.append(f"{record.NAME} is missing or damaged: whether this is the same training cannot be told")
    if newest is None:
        return Earlier(notes=[*notes, "no valid checkpoint: training starts over"])
    return Earlier(newest.path, newest.step, notes=[*notes, *_notes(newest, run, world, old)])


def _missing_model(folder: Path) -> list[str]:
    if any(folder.glob("*.safetensors")) or any(folder.glob("*model*.bin")):
        return []
    left = [path.name for path in numbered(folder)]
    return [f"the model of the run is gone; left are {', '.join(left)}" if left else "the model of the run is gone"]


def _asked_for(run: RunSpec, world: World, finished: bool) -> Earlier:
    path = Path(run["resume_from_checkpoint"])
    if finished:
        what = f"{run['output_dir']} holds a finished run, which a resume from {path} would overwrite"
        raise mistake("output_dir", what, "another --output_dir", run.setting("output_dir").source)
    checkpoint = inspect(path, run.engine.kind == "deepspeed")
    if not checkpoint.valid:
        raise mistake(
            "resume_from_checkpoint",
            f"{path}: {', '.join(checkpoint.faults)}",
            "leave it out: the newest valid checkpoint is found automatically",
            run.setting("resume_from_checkpoint").source,
        )
    old = record.read(path.parent)
    _require_same_training(run, old)
    return Earlier(path, checkpoint.step, notes=_notes(checkpoint, run, world, old))


def _notes(checkpoint: Checkpoint, run: RunSpec, world: World, old: Json) -> list[str]:
    of_other_world = other_world.note(checkpoint.path, world.size)
    return [*checkpoint.notes, *([of_other_world] if of_other_world else []), *_changes(run, old)]


def _skip(checkpoint: Checkpoint) -> str:
    """Archives a damaged checkpoint, and deletes one whose save was cut short: with each kill the
    disk would hold one more. Returns the note about it.
    """
    if manifest.begun(checkpoint.path) is not None:
        remove([checkpoint.path])
        return f"{checkpoint.path.name} is damaged ({', '.join(checkpoint.faults)}): skipped and deleted"
    kept = archive_damaged(checkpoint)
    return f"{checkpoint.path.name} is damaged ({', '.join(checkpoint.faults)}): skipped, kept as {kept.name}"


def _require_same_training(run: RunSpec, old: Json) -> None:
    changed = record.changes(old, run, record.IDENTITY)
    data = fingerprints.of_data(run["dataset_name"])
    if data and old.get("data") == data:  # Azure ML mounts the same data at another path at every start
        changed.pop("dataset_name", None)
    if not changed and fingerprints.differ(old.get("data"), data):
        name = run["dataset_name"] or "Python's standard library"
        changed = {"dataset_name": (f"{name} as it was", "what it holds now")}
    if changed:
        name, (then, now) = next(iter(changed.items()))
        raise mistake(
            "output_dir",
            f"{run['output_dir']} holds a run with {name} {then}, not {now}",
            "another --output_dir, or --fresh to move that run aside",
            run.setting("output_dir").source,
        )
    before, now = str(old.get("engine")), run.engine.title
    if "DeepSpeed" not in before + now:  # FSDP's settings do not matter, and older records lack its version
        before, now = before.partition(",")[0], now.partition(",")[0]
    same = before == now or (before == "FSDP" and now.startswith("FSDP"))
    sharded = "DeepSpeed" in before + now or "FSDP" in before + now
    if old and sharded and not same:
        raise mistake(
            "accelerate_config",
            f"the checkpoints were written with {before}, and {now} cannot read them",
            "the same engine, another --output_dir, or --fresh",
        )


def _asks_for_more(run: RunSpec, old: Json) -> bool:
    """Whether the run is longer than the finished one. True if only training can tell."""
    changed = record.changes(old, run, ["max_steps", "num_train_epochs"])
    if "max_steps" in changed:
        return run["max_steps"] == -1 or run["max_steps"] > old.get("global_step", 0)
    then, now = changed.get("num_train_epochs", (0, 0))
    return run["max_steps"] == -1 and now > then


def _changes(run: RunSpec, old: Json, everything: bool = False) -> list[str]:
    kept = record.changes(old, run, record.KEPT_BY_RESUME)
    course = record.changes(old, run, record.CHANGES_COURSE)
    if everything:
        return [
            f"requested now but not trained: {name} {now} (was {then})" for name, (then, now) in (kept | course).items()
        ]
    return [
        *(f"{name} {now} is ignored by a resume: {then} is kept" for name, (then, now) in kept.items()),
        *(f"{name} changes from {then} to {now}: no longer the same training" for name, (then, now) in course.items()),
    ]
