"""What an output folder already holds, and what that means for a run that will write there."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from launch.host.files import make_folder, require_writable
from launch.host.world import World
from launch.output import final_model, identity, manifest, other_world, record, submission
from launch.output.checkpoints import (
    Checkpoint,
    archive_damaged,
    epoch_of,
    finish_removals,
    inspect,
    newest_valid,
    numbered,
    remove,
    require_disk_space,
)
from recipes.errors import UserError, mistake
from recipes.mixture import title
from recipes.run import Json, RunSpec, fingerprints
from recipes.scaling.timings import require_room


@dataclass(frozen=True)
class Earlier:
    """The run that the folder already holds, if any.

    `checkpoint` is the one to resume from, `finished` true if nothing is left to train, `notes`
    are for a person. `kept` are the recorded settings that the checkpoint brings, whatever this run
    says. `identity` is that of the run that goes on, or begins.
    """

    checkpoint: Path | None = None
    step: int = 0
    finished: bool = False
    notes: list[str] = field(default_factory=list)
    kept: Json = field(default_factory=dict)
    identity: Json = field(default_factory=identity.new)


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
    try:
        make_folder(Path(run["output_dir"]))
        require_writable(Path(run["output_dir"]))
    except OSError as error:
        raise _unwritable(run, error) from None
    handle = _locked(run, fcntl.LOCK_EX)
    record.forget_out_of_memory(Path(run["output_dir"]))
    return handle


def _locked(run: RunSpec, kind: int) -> int:
    """The file descriptor that holds the lock of the folder. Raises `UserError` if it is in use."""
    handle = os.open(run["output_dir"], os.O_RDONLY)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        what = f"another run is writing to {run['output_dir']}"
        raise mistake("output_dir", what, "another --output_dir, or wait", run.setting("output_dir").source) from None
    except OSError:  # a file system without locks, such as some NFS
        pass
    return handle


def look_ahead(run: RunSpec) -> Earlier:
    """What the records tell of the folder before the data is tokenized, which may take hours.

    It changes nothing, except that --measure begins its file, so every rank may ask. It looks into
    no checkpoint: `find_earlier_run` has the last word. Raises `UserError` if the folder is in use,
    not writable, or of another training.
    """
    if run["measure"]:
        require_room(run["measure"])
    folder = Path(run["output_dir"])
    try:
        require_writable(folder)
    except OSError as error:
        raise _unwritable(run, error) from None
    if folder.is_dir():
        os.close(_locked(run, fcntl.LOCK_SH))
    return _by_records(run, record.read_intact(folder), identity.of_folder(folder))


def find_earlier_run(run: RunSpec, world: World) -> Earlier:
    """Where to resume. Raises `UserError` if that would not be the same training, or overwrite a
    model.
    """
    folder = Path(run["output_dir"])
    old, own, named = record.read_intact(folder), identity.of_folder(folder), _named(run)
    earlier = _by_records(run, old, own)
    if run["fresh"] or earlier.finished:
        return earlier
    if named and not _began_from(named, run, own, old):
        return _begun(named, run, world)
    holds_a_run = numbered(folder) or named or old.get("status") == "finished"
    return _continued(run, world, old, own) if holds_a_run else earlier


def _by_records(run: RunSpec, old: Json, own: Json | None) -> Earlier:
    """What the folder holds, as far as its record `old` and its run `own` tell."""
    folder, named = Path(run["output_dir"]), _named(run)
    _require_no_foreign_model(run)
    if run["fresh"]:
        return Earlier()
    finished = old.get("status") == "finished"
    if named and not _began_from(named, run, own, old):
        if finished:
            what = f"{folder} holds a finished run, which a resume from {named} would overwrite"
            raise mistake("output_dir", what, "another --output_dir", run.setting("output_dir").source)
        _require_same_training(run, record.read_intact(named.parent))
    elif numbered(folder) or named or finished:
        _require_same_training(run, old)
        if finished and not _asks_for_more(run, old):
            notes = [*final_model.notes(folder, old), *_changes(run, old, everything=True)]
            return Earlier(finished=True, step=_steps_of(old), notes=notes)
    return Earlier()


def _continued(run: RunSpec, world: World, old: Json, own: Json | None) -> Earlier:
    """The run that the folder holds goes on: from its newest checkpoint, or from the one that it
    began from.
    """
    folder = Path(run["output_dir"])
    finish_removals(folder)
    newest, damaged = newest_valid(folder, own["began_at"] if own else -1)
    if newest is not None:
        _require_steps_left(run, newest)
    notes = [_skip(checkpoint) for checkpoint in damaged]
    if not old:
        notes.append(f"{record.NAME} is missing or damaged: whether this is the same training cannot be told")
    if newest is None and own and own["began_from"]:
        again = _begun(Path(own["began_from"]), run, world)
        return replace(again, notes=[*notes, *again.notes])
    if _named(run):
        notes.append(f"this run began from {_named(run)} and goes on; another --output_dir begins there again")
    if newest is None:
        return Earlier(notes=[*notes, "no valid checkpoint: training starts over"], identity=own or identity.new())
    own = own or identity.of_checkpoint(newest.path) or identity.new()
    notes += _notes(newest, run, world, old)
    return Earlier(newest.path, newest.step, notes=notes, kept=_kept(run, old), identity=own)


def _begun(path: Path, run: RunSpec, world: World) -> Earlier:
    """A run begins from a checkpoint that is named."""
    checkpoint = inspect(path)
    if not checkpoint.valid:
        raise mistake(
            "resume_from_checkpoint",
            f"{path}: {', '.join(checkpoint.faults)}",
            "leave it out: the newest valid checkpoint is found automatically",
            run.setting("resume_from_checkpoint").source,
        )
    _require_steps_left(run, checkpoint)
    old = record.read_intact(path.parent)
    begun = identity.new(path, checkpoint.step)
    return Earlier(
        path, checkpoint.step, notes=_notes(checkpoint, run, world, old), kept=_kept(run, old), identity=begun
    )


def _named(run: RunSpec) -> Path | None:
    """The checkpoint that the user has named, if any."""
    path = run["resume_from_checkpoint"]
    return None if path in (None, True, "True", "true") else Path(path)


def _began_from(named: Path, run: RunSpec, own: Json | None, old: Json) -> bool:
    """Whether the run that the folder holds began from this checkpoint, and by the same settings.

    Then the same command was started again, as a job that is queued again is: it would lose all
    steps since. Trainer itself starts from there every time.
    """
    if own is None or own["began_from"] != str(named.resolve()):
        return False
    return not record.changes(old, run, [*record.IDENTITY, *record.CHANGES_COURSE])


def _require_no_foreign_model(run: RunSpec) -> None:
    """Raises `UserError` if the folder holds a model that this program did not train."""
    folder = Path(run["output_dir"])
    if _holds_a_run(folder):
        return
    model = run["model_name_or_path"]
    if any(folder.glob("*.safetensors")) or (model and Path(model).resolve() == folder.resolve()):
        what = f"{run['output_dir']} holds a model that was not trained here, and it would be overwritten"
        raise mistake("output_dir", what, "--output_dir with another folder", run.setting("output_dir").source)


def _holds_a_run(folder: Path) -> bool:
    return (folder / record.NAME).exists() or bool(numbered(folder))


# --- Room for the run -----------------------------------------------------------------------------


def make_room(run: RunSpec, checkpoint_bytes: int, model_bytes: int, steps: int) -> None:
    """Require space for what the run keeps at once, and archive an older run if --fresh says so.

    Sizes are estimates of one checkpoint and of the model at the end, `steps` of the whole run.
    Call it last before training, once nothing else is wrong.
    """
    other_world.remove_leftovers(Path(run["output_dir"]))
    require_disk_space(run, checkpoint_bytes, model_bytes, steps)
    if run["fresh"]:
        _archive_older_run(run)


def _archive_older_run(run: RunSpec) -> None:
    """Move the run that the folder holds, if any, to FOLDER.old-N."""
    folder = Path(run["output_dir"]).resolve()
    if not _holds_a_run(folder):
        return
    if Path.cwd().is_relative_to(folder):
        what = f"{run['output_dir']} is or holds the current folder, which --fresh would move"
        raise mistake("output_dir", what, "another --output_dir, or another folder to start from")
    try:
        archived = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.old-{n}")).exists())
        archived.mkdir()
        for item in list(folder.iterdir()):  # not the folder itself, which is locked
            if item.name not in submission.KEPT_HERE:
                item.rename(archived / item.name)
    except OSError as error:
        raise _unwritable(run, error) from None


def _unwritable(run: RunSpec, error: OSError) -> UserError:
    what = f"{run['output_dir']} cannot be written: {error.strerror}"
    return mistake("output_dir", what, "choose a writable --output_dir", run.setting("output_dir").source)


# --- Notes, and what makes it another training ----------------------------------------------------


def _notes(checkpoint: Checkpoint, run: RunSpec, world: World, old: Json) -> list[str]:
    of_other_world = other_world.note(checkpoint.path, world.size, run["dataloader_num_workers"])
    notes = [*checkpoint.notes, *([of_other_world] if of_other_world else []), *_changes(run, old)]
    if run["dataset_streaming"] and other_world.readers_of(checkpoint.path) is None:
        what = "has no place in the stream, or one that an earlier version wrote: it begins another round"
        notes.append(f"{checkpoint.path.name} {what}, in which examples may come again")
    if run["dataset_streaming"] and fingerprints.differ(old.get("data"), fingerprints.of_data(run["dataset_name"])):
        what = "the data has changed since: the stream goes on at the same rows of its shards"
        notes.append(f"{what}, or with another round if their number has changed")
    return notes


def _skip(checkpoint: Checkpoint) -> str:
    """Archives a damaged checkpoint, and deletes one whose save was cut short: with each kill the
    disk would hold one more. Returns the note about it.
    """
    if manifest.begun(checkpoint.path) is not None:
        remove([checkpoint.path])
        return f"{checkpoint.path.name} is incomplete ({', '.join(checkpoint.faults)}): skipped and deleted"
    kept = archive_damaged(checkpoint.path)
    return f"{checkpoint.path.name} is damaged ({', '.join(checkpoint.faults)}): skipped, kept as {kept.name}"


def _require_same_training(run: RunSpec, old: Json) -> None:
    changed = record.changes(old, run, record.IDENTITY)
    data = fingerprints.of_data(run["dataset_name"])
    model = fingerprints.of_model(run["model_name_or_path"], run["model_revision"])
    # The same contents count under any name: Azure ML mounts them elsewhere at every start.
    if data and old.get("data") == data:
        changed.pop("dataset_name", None)
    if model and old.get("model") == model:
        changed.pop("model_name_or_path", None)
        changed.pop("model_revision", None)
    if run["problem_type"] is None:  # the data will tell, and it is the same
        changed.pop("problem_type", None)
    fix = "another --output_dir, or --fresh to move that run aside"
    streams = run["dataset_streaming"]  # whose broken row may have been mended: the others are as they were
    if not changed and not streams and fingerprints.differ(old.get("data"), data):
        name = title(run["dataset_name"]) or "Python's standard library"
        changed = {"dataset_name": (f"{name} as it was", "what it holds now")}
    if not changed and fingerprints.differ(old.get("model"), model):
        changed = {"model_name_or_path": (f"{run['model_name_or_path']} as it was", "what it holds now")}
        revision = old["model"].removeprefix("commit ")
        fix = f"--model_revision {revision}, {fix}" if revision != old["model"] else f"the model as it was, {fix}"
    if changed:
        name, (then, now) = next(iter(changed.items()))
        what = f"{run['output_dir']} holds a run with {name} {then}, not {now}"
        raise mistake("output_dir", what, fix, run.setting("output_dir").source)
    before, now = str(old.get("engine")), run.engine.title
    if "DeepSpeed" not in before + now:  # of FSDP only the version matters
        before, now = before.partition(",")[0], now.partition(",")[0]
    if old and before != now and re.search("DeepSpeed|FSDP", before + now):
        raise mistake(
            "accelerate_config",
            f"the checkpoints were written with {before}, and {now} cannot read them",
            "the same engine, another --output_dir, or --fresh",
        )


def _require_steps_left(run: RunSpec, checkpoint: Checkpoint) -> None:
    """Raises `UserError` if the checkpoint has trained more than this run is asked for: its model
    would be saved as that of a shorter training.
    """
    name = "max_steps" if run["max_steps"] > 0 else "num_train_epochs"
    epoch = epoch_of(checkpoint.path)
    done, unit = (checkpoint.step, "steps") if name == "max_steps" else (round(epoch, 2), "epochs")
    if done <= math.ceil(run[name]):
        return
    raise mistake(
        name,
        f"{checkpoint.path.name} has trained {done} {unit} already, more than {run[name]}",
        f"--max_steps {checkpoint.step} to have its model, --resume_from_checkpoint with an older one, or --fresh",
        run.setting(name).source,
    )


def _steps_of(old: Json) -> int:
    """The steps of a finished run; 0 if its record does not tell."""
    steps = old.get("global_step")
    return steps if isinstance(steps, int) else 0


def _asks_for_more(run: RunSpec, old: Json) -> bool:
    """Whether the run is longer than the finished one. True if only training can tell."""
    changed = record.changes(old, run, ["max_steps", "num_train_epochs"])
    if "max_steps" in changed:
        return run["max_steps"] == -1 or run["max_steps"] > _steps_of(old)
    then, now = changed.get("num_train_epochs", (0, 0))
    return run["max_steps"] == -1 and now > then


def _kept(run: RunSpec, old: Json) -> Json:
    return {name: old["settings"][name] for name in _kept_by_resume(run, old)}


def _kept_by_resume(run: RunSpec, old: Json) -> dict[str, tuple[Any, Any]]:
    """Settings that stay as they were, as name -> (then, now). An interval of 0 was none."""
    changed = record.changes(old, run, record.KEPT_BY_RESUME)
    return {name: values for name, values in changed.items() if values[0] or not name.endswith("_steps")}


def _changes(run: RunSpec, old: Json, everything: bool = False) -> list[str]:
    kept = _kept_by_resume(run, old)
    course = record.changes(old, run, record.CHANGES_COURSE)
    if everything:
        return [
            f"requested now but not trained: {name} {now} (was {then})" for name, (then, now) in (kept | course).items()
        ]
    return [
        *(f"{name} {now} is ignored by a resume: {then} is kept" for name, (then, now) in kept.items()),
        *(f"{name} changes from {then} to {now}: no longer the same training" for name, (then, now) in course.items()),
    ]
