"""Find the run that an output folder already holds, and choose the checkpoint to resume from."""

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from launch.host.files import require_writable, writing
from launch.host.world import World
from launch.output import other_world, record, submission
from launch.output.checkpoints import (
    MANIFEST,
    STATE,
    Checkpoint,
    archive_damaged,
    inspect,
    manifest_of,
    model_notes,
    newest_valid,
    numbered,
    remove,
)
from launch.output.record import Earlier, new_run
from launch.terminal import console, memory_size, print_note
from recipes.errors import UserError, mistake
from recipes.mixture import title
from recipes.rules.table import BY_METRIC, setting_is_read
from recipes.run import BEST_MODEL, Json, RunSpec, fingerprints
from recipes.scaling.timings import require_room

# --- The folder -----------------------------------------------------------------------------------


@contextlib.contextmanager
def output_folder(run: RunSpec, world: World) -> Iterator[None]:
    """Create the output folder and hold its lock. Raises `UserError` if that is impossible."""
    handle = world.decide(lambda: _make_and_lock(run))
    try:
        yield
    finally:
        if world.is_main:
            os.close(handle)


def _make_and_lock(run: RunSpec) -> int:
    """Create and lock the folder, remove an old out_of_memory.json. Return the file descriptor."""
    with writing(run["output_dir"]):
        Path(run["output_dir"]).mkdir(parents=True, exist_ok=True)
        require_writable(Path(run["output_dir"]))
    handle = _locked(run, fcntl.LOCK_EX)
    record.forget_out_of_memory(Path(run["output_dir"]))
    return handle


def _refused(run: RunSpec, what: str, fix: str, name: str = "output_dir") -> UserError:
    return mistake(name, what, fix, run.setting(name).source)


def _locked(run: RunSpec, kind: int) -> int:
    """Lock the folder and return the file descriptor. Raises `UserError` if a run uses it."""
    handle = os.open(run["output_dir"], os.O_RDONLY)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        what = f"another run is writing to {run['output_dir']}"
        raise _refused(run, what, "use another --output_dir, or wait") from None
    except OSError:  # a file system without locks, such as some NFS
        pass
    return handle


def make_room(run: RunSpec, needed_bytes: int = 0) -> None:
    """With --fresh, archive an older run. Remove a killed run's converted copies of checkpoints.
    Call this just before training, after all other checks.

    Raises `UserError` if the disk lacks `needed_bytes`, or if --fresh cannot move the older run.
    """
    for left in Path(run["output_dir"]).glob(f"{other_world.COPY}checkpoint-*"):
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(run["output_dir"]).free
    if free <= needed_bytes:
        needed = memory_size(needed_bytes)
        what = f"{run['output_dir']} has {memory_size(free)} free, but this run saves about {needed} or more"
        raise _refused(run, what, "choose an --output_dir on a larger disk")
    if run["fresh"]:
        _archive_older_run(run)


def _archive_older_run(run: RunSpec) -> None:
    """Move the run that the folder holds, if any, to FOLDER.old-N, or raise `UserError`."""
    folder = Path(run["output_dir"]).resolve()
    if not _holds_a_run(folder):
        return
    if Path.cwd().is_relative_to(folder):
        what = f"--fresh would move {run['output_dir']}, which is or holds the current folder"
        raise _refused(run, what, "use another --output_dir, or start from another folder")
    with writing(run["output_dir"]):
        archived = next(path for n in count(1) if not (path := folder.with_name(f"{folder.name}.old-{n}")).exists())
        archived.mkdir()
        for item in list(folder.iterdir()):  # not the folder itself, which is locked
            if item.name not in submission.KEPT_HERE:
                item.rename(archived / item.name)
    print_note(f"--fresh: the earlier run is now in {archived}", console())


# --- Where to resume ------------------------------------------------------------------------------


def look_ahead(run: RunSpec) -> Earlier | None:
    """Return the folder's run if it has finished and nothing is left to train, else None. Call this
    before tokenizing, which may take hours; `find_earlier_run` makes the final decision.

    Every rank may call this: it changes nothing, and creates only the file that --measure names.
    Raises `UserError` if the folder is in use, is not writable, or holds another training.
    """
    folder = Path(run["output_dir"])
    if run["measure"]:
        require_room(run["measure"])
    with writing(run["output_dir"]):
        require_writable(folder)
    if folder.is_dir():
        os.close(_locked(run, fcntl.LOCK_SH))
    return _finished(run, record.intact(folder))


def find_earlier_run(run: RunSpec, data_commit: str | None = None) -> Earlier:
    """Find the earlier run in the locked folder, and the checkpoint to resume from, if any.

    Renames damaged checkpoints, deletes incomplete ones. Raises `UserError` if this run can neither
    begin nor continue in the folder. `data_commit` is the commit of Hub data.
    """
    old, named = record.intact(run["output_dir"]), _named(run)
    if finished := _finished(run, old):
        return finished
    if run["fresh"]:
        return Earlier()
    if named and not _began_from(named, run, old):
        return _begun(named, run, data_commit)
    if numbered(run["output_dir"]) or named or old.get("status") == "finished":
        return _continued(run, old, data_commit)
    return Earlier()


# With new values of these settings, a run would get the same model, or would only end sooner.
_NO_OTHER_MODEL = ("logging_steps", "save_steps", "eval_steps", "max_steps", "num_train_epochs")


def _finished(run: RunSpec, old: Json) -> Earlier | None:
    """Return the run that the folder holds if it is finished and this run asks for nothing more,
    else None. Raises `UserError` if this run can neither begin nor continue in the folder.
    """
    folder, named, finished = Path(run["output_dir"]), _named(run), old.get("status") == "finished"
    _require_no_foreign_model(run, old)
    if run["fresh"]:
        return None
    if named and not _began_from(named, run, old):
        if finished:
            what = f"{folder} holds a finished run, which a resume from {named} would overwrite"
            raise _refused(run, what, "use another --output_dir")
        _require_same_training(run, record.intact(named.parent), named)
    elif named or numbered(folder) or finished:
        _require_same_training(run, old)
    if not finished or _asks_for_more(run, old):
        return None
    kept, course = _changes(run, old)
    notes = model_notes(folder, old["model_files"])
    for name, (then, now) in (kept | course | record.changes(old, run, ["recipe"])).items():
        if run.explicit(name) and name not in _NO_OTHER_MODEL:
            what = f"{folder} holds a finished run with {name} {then}, not {now}"
            raise _refused(run, what, "use another --output_dir, or --fresh to archive that run", name)
        notes.append(f"{name} {now} (was {then}) has no effect, because the run has finished")
    return Earlier(finished=True, step=old["global_step"], notes=notes)


def _continued(run: RunSpec, old: Json, data_commit: str | None) -> Earlier:
    """Resume the run from its newest valid checkpoint or, without one, from where it began."""
    own = old.get("run") or {}
    newest, damaged = newest_valid(run["output_dir"], own.get("began_at", -1))
    notes = [_skip(checkpoint) for checkpoint in damaged]
    if not old:
        notes.append(f"{record.NAME} is missing or damaged: a resume cannot check that this is the same training")
    if newest is None and own.get("began_from"):
        return _begun(Path(own["began_from"]), run, data_commit, notes)
    if _named(run):
        notes.append(f"resuming from a later checkpoint; to begin at {_named(run)} again, use another --output_dir")
    identity = own or (newest and manifest_of(newest.path).get("run")) or new_run()
    if newest is None:
        return Earlier(notes=[*notes, "no valid checkpoint: training starts over"], identity=identity)
    return _from(newest, run, old, identity, notes, data_commit)


def _begun(path: Path, run: RunSpec, data_commit: str | None, notes: Sequence[str] = ()) -> Earlier:
    """Begin a run from the user's checkpoint `path`. Raises `UserError` if `path` is damaged."""
    checkpoint = inspect(path)
    if checkpoint.faults:
        fix = "leave --resume_from_checkpoint out: the newest valid checkpoint is found automatically"
        raise _refused(run, f"{path}: {', '.join(checkpoint.faults)}", fix, "resume_from_checkpoint")
    began_from = record.intact(path.parent)
    return _from(checkpoint, run, began_from, new_run(path, checkpoint.step), notes, data_commit)


def _from(
    checkpoint: Checkpoint, run: RunSpec, old: Json, identity: Json, notes: Sequence[str], data_commit: str | None
) -> Earlier:
    """Resume from a checkpoint of the run that `old` records. The new record keeps the fingerprints
    of data and model, which `evaluate`, `merge` and `rerun` compare. Raises `UserError` if the
    checkpoint has trained longer than this run asks for.
    """
    name, done = "max_steps", float(checkpoint.step)
    if run["max_steps"] <= 0:
        name, done = "num_train_epochs", round(record.read(checkpoint.path, STATE).get("epoch") or 0, 2)
    if done - done / checkpoint.step >= run[name]:  # the model would pass for that of a shorter training
        what = f"{checkpoint.path.name} has trained {done:g} {name.split('_')[-1]} already, more than {run[name]:g}"
        have_it = f"use --max_steps {checkpoint.step} to get the checkpoint's model"
        raise _refused(run, what, f"{have_it}, an older --resume_from_checkpoint, or --fresh", name)
    kept, course = _changes(run, old)
    notes = [*notes, *checkpoint.notes]
    # Only streams and Hub data can differ here. No error, because no flag sets an older commit.
    if fingerprints.differ(old.get("data"), record.material(run, data_commit)["data"]):
        rows = ": the stream skips as many rows as were trained on, or begins its next epoch if the shard count changed"
        notes.append(f"the data has changed since the checkpoint{rows if run['dataset_streaming'] else ''}")
    if note := other_world.note(checkpoint.path, run.world_size, run["dataloader_num_workers"]):
        notes.append(note)
    for name, (then, now) in kept.items():
        fix = "use --fresh or another --output_dir for the new value"
        notes.append(f"{name} {now} is ignored by a resume, which keeps {then}; {fix}")
    for name, (then, now) in course.items():
        notes.append(f"{name} was {then} and is now {now}, so this is no longer the same training")
    recorded = {what: old[what] for what in record.MATERIAL.values() if old.get(what)}
    recorded["settings"] = {name: old["settings"][name] for name in kept}
    recorded |= {"sessions": old.get("sessions", []), "changed": sorted({*old.get("changed", ()), *course})}
    return Earlier(checkpoint.path, checkpoint.step, notes=notes, kept=recorded, identity=identity)


def _named(run: RunSpec) -> Path | None:
    """Return the checkpoint that the user has named, if any."""
    path = run["resume_from_checkpoint"]
    return None if path in (None, True, "True", "true") else Path(path)


def _began_from(named: Path, run: RunSpec, old: Json) -> bool:
    """True if the run that the folder holds began from this checkpoint, with the same settings.

    If so, the same command was started again, for example by a queue. Trainer itself would start
    from the named checkpoint every time, and lose all later steps.
    """
    same = (old.get("run") or {}).get("began_from") == str(named.resolve())
    return same and not record.changes(old, run, [*record.IDENTITY, *record.CHANGES_COURSE])


def _require_no_foreign_model(run: RunSpec, old: Json) -> None:
    """Raise `UserError` if the folder holds a model or checkpoints, but no intact record and no
    manifest. With --fresh, any record or checkpoint is enough, because --fresh archives the folder.
    """
    folder, model = Path(run["output_dir"]), run["model_name_or_path"]
    is_its_model = model and Path(model).resolve() == folder.resolve()
    saved = numbered(folder)
    is_known = _holds_a_run(folder) if run["fresh"] else old or any((path / MANIFEST).exists() for path in saved)
    if not is_known and (is_its_model or saved or any(folder.glob("*.safetensors"))):
        what = f"{run['output_dir']} holds a model that was not trained here, or whose {record.NAME} is damaged"
        go_on = f", with --resume_from_checkpoint {saved[0]} to continue from there" if saved else ""
        raise _refused(run, f"{what}: the run would overwrite the model", f"use another --output_dir{go_on}")


def _holds_a_run(folder: Path) -> bool:
    return (folder / record.NAME).exists() or bool(numbered(folder))


def _skip(checkpoint: Checkpoint) -> str:
    """Rename a damaged checkpoint; delete a checkpoint whose save was cut short, because otherwise
    each kill would leave one more on the disk. Returns a line to print.
    """
    if "begun" in manifest_of(checkpoint.path):
        remove([checkpoint.path])
        return f"{checkpoint.path.name} is incomplete ({', '.join(checkpoint.faults)}): skipped and deleted"
    kept = archive_damaged(checkpoint.path)
    return f"{checkpoint.path.name} cannot be used ({', '.join(checkpoint.faults)}): skipped, kept as {kept.name}"


# --- The same training, or another ----------------------------------------------------------------


def _require_same_training(run: RunSpec, old: Json, named: Path | None = None) -> None:
    kept = [name for name in record.KEPT_BY_RESUME if run.explicit(name) and name not in _NO_OTHER_MODEL]
    metric, had = "metric_for_best_model", {name: one["value"] for name, one in old.get("settings", {}).items()}
    compares = [values.get(BEST_MODEL) or values.get(metric) for values in (had, run)]
    names = [*record.IDENTITY, *kept, *(record.COMPARES_BY if all(compares) else ())]
    # The state of these schedules holds settings and rate, and no other schedule can read it.
    if {had.get("lr_scheduler_type"), run["lr_scheduler_type"]} & BY_METRIC:
        names += ["lr_scheduler_type", "lr_scheduler_kwargs"]
    changed = record.changes(old, run, [name for name in names if setting_is_read(run, name)])
    if len({(name or "loss").removeprefix("eval_") for name in changed.get(metric, ())}) == 1:  # one metric, two names
        del changed[metric]
    if run["problem_type"] is None:  # the data decides the type, and is the same
        changed.pop("problem_type", None)
    if run["use_peft"] and not run.explicit("dtype"):  # the dtype of frozen weights depends on the GPU
        changed.pop("dtype", None)
    now = record.material(run)
    remedies = {name: f"--{name} {changed[name][0]} to continue, " for name in kept if name in changed}
    for name, what in record.MATERIAL.items():
        then = old.get(what)
        if now[what] and now[what] == then:  # whatever the path: Azure ML mounts inputs elsewhere each time
            changed.pop(name, None)
            if what == "model":
                changed.pop("model_revision", None)
        # A stream may have changed: perhaps a broken row was repaired.
        elif fingerprints.differ(then, now[what]) and not (what == "data" and run["dataset_streaming"]):
            changed.setdefault(name, (f"{title(run[name]) or 'the standard library'} as it was", "as it is now"))
            _, is_commit, commit = str(then).partition("commit ")
            remedies[name] = f"--model_revision {commit}, " if is_commit else f"the earlier {what}, "
    for name, (then, given) in changed.items():
        what = f"{named or run['output_dir']} holds a run with {name} {then}, not {given}"
        others = "--resume_from_checkpoint, or omit it" if named else "--output_dir, or --fresh to archive that run"
        raise _refused(run, what, f"use {remedies.get(name, '')}another {others}")
    before, by = str(old.get("engine")), run.engine.title
    if "DeepSpeed" not in before + by:  # for FSDP, only its version matters
        before, by = before.partition(",")[0], by.partition(",")[0]
    if old and before != by and re.search("DeepSpeed|FSDP", before + by):
        what = f"the checkpoints were written with {before}, and {by} cannot read them"
        raise mistake("accelerate_config", what, f"train with {before} again, or use another --output_dir, or --fresh")


def _asks_for_more(run: RunSpec, old: Json) -> bool:
    """True if this run trains longer than the finished run did, or may train longer."""
    changed = record.changes(old, run, ["max_steps", "num_train_epochs"])
    if "max_steps" in changed:
        return run["max_steps"] <= 0 or run["max_steps"] > old["global_step"]
    then, now = changed.get("num_train_epochs", (0, 0))
    return run["max_steps"] <= 0 and now > then


def _changes(run: RunSpec, old: Json) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Return two dicts of name -> (then, now): settings that keep their old value in a resume,
    and settings that take their new value.
    """
    kept = record.changes(old, run, record.KEPT_BY_RESUME)
    kept = {name: values for name, values in kept.items() if values[0] or not name.endswith("_steps")}  # 0 is not kept
    return kept, record.changes(old, run, record.CHANGES_COURSE)
