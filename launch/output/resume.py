"""What an output folder already holds, and what that means for a run that is about to write there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.host.world import World
from launch.output import record, submission
from launch.output.checkpoints import Checkpoint, judged, newest_valid, numbered, set_aside
from recipes.errors import UserError, mistake
from recipes.run import RunSpec


@dataclass(frozen=True)
class Earlier:
    """`checkpoint` to resume from, `finished` if there is nothing left to train, `notes` a person should read."""

    checkpoint: Path | None = None
    step: int = 0
    finished: bool = False
    notes: list[str] = field(default_factory=list)


def require_one_batch(run: RunSpec, world: World) -> None:
    """Ranks with other micro-batches would wait for each other: a fit holds for the devices of its own node."""
    if world.size == 1:
        return
    import torch.distributed as dist

    sizes: list[Any] = [None] * world.size
    dist.all_gather_object(sizes, run.batch.micro)
    if len(set(sizes)) > 1:
        what = f"the ranks have micro-batches of {', '.join(str(size) for size in sorted(set(sizes)))}"
        raise mistake("per_device_train_batch_size", what, f"--per_device_train_batch_size {min(sizes)}")


@contextlib.contextmanager
def output_folder(run: RunSpec, world: World) -> Iterator[None]:
    """The output folder, made and found good, and locked against a second run."""
    handle = world.decide(lambda: _made_and_locked(run))
    try:
        yield
    finally:
        if world.is_main:
            os.close(handle)


def _made_and_locked(run: RunSpec) -> int:
    _prepare_output(run)
    handle = os.open(run["output_dir"], os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        what = f"another run is writing to {run['output_dir']}"
        raise mistake("output_dir", what, "another --output_dir, or wait", run.setting("output_dir").source) from None
    except OSError:  # a file system without locks, NFS say, locks nothing
        pass
    record.forget_out_of_memory(Path(run["output_dir"]))
    return handle


def _prepare_output(run: RunSpec) -> None:
    """Make the folder, see that it can be written, and that it holds no model of somebody else."""
    folder = Path(run["output_dir"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise _unwritable(run, error) from None
    if _holds_a_run(folder):
        return
    model = run["model_name_or_path"]
    if any(folder.glob("*.safetensors")) or (model and Path(model).is_dir() and folder.samefile(model)):
        what = f"{run['output_dir']} holds a model that no run of ours has trained, and it would be overwritten"
        raise mistake("output_dir", what, "--output_dir with another folder", run.setting("output_dir").source)


def _holds_a_run(folder: Path) -> bool:
    return (folder / record.NAME).exists() or bool(numbered(folder))


def move_older_run_aside(run: RunSpec) -> None:
    """For --fresh, when everything else has been found good: a run that the folder holds gets another name."""
    folder = Path(run["output_dir"]).resolve()
    if not run["fresh"] or not _holds_a_run(folder):
        return
    if Path.cwd().is_relative_to(folder):
        what = f"{run['output_dir']} is or holds the current folder, which --fresh would move"
        raise mistake("output_dir", what, "another --output_dir, or another folder to start from")
    try:
        aside = _unused_name(folder)
        aside.mkdir()
        for item in list(folder.iterdir()):  # not the folder itself, which is locked
            if item.name not in submission.KEPT_HERE:
                item.rename(aside / item.name)
    except OSError as error:
        raise _unwritable(run, error) from None


def _unwritable(run: RunSpec, error: OSError) -> UserError:
    what = f"{run['output_dir']} cannot be written: {error.strerror}"
    return mistake("output_dir", what, "--output_dir with a folder that can", run.setting("output_dir").source)


def _unused_name(folder: Path) -> Path:
    count = 1
    while (candidate := folder.with_name(f"{folder.name}.old-{count}")).exists():
        count += 1
    return candidate


def require_disk_space(run: RunSpec, needed_bytes: int) -> None:
    """Refuse a run whose first checkpoint would not fit. `needed_bytes` is the estimated size of what it saves."""
    free = shutil.disk_usage(run["output_dir"]).free
    if free > needed_bytes:
        return
    raise mistake(
        "output_dir",
        f"{run['output_dir']} has {free / 2**30:.1f} GiB free, this run saves about {needed_bytes / 2**30:.1f} GiB",
        "--output_dir on a larger disk",
        run.setting("output_dir").source,
    )


def find_earlier_run(run: RunSpec, world: World) -> Earlier:
    """Where to go on. Raises `UserError` where going on would not be the same training."""
    folder = Path(run["output_dir"])
    if run["fresh"]:
        return Earlier()
    old = record.read(folder)
    finished = old.get("status") == "finished"
    if run["resume_from_checkpoint"] not in (None, True, "True", "true"):
        return _asked_for(run, world, finished)
    if not numbered(folder) and not finished:
        return Earlier()
    _require_same_training(run, world, old)
    if finished and not _asks_for_more(run, old):
        return Earlier(finished=True, step=old.get("global_step", 0), notes=_changes(run, old, everything=True))
    newest, damaged = newest_valid(folder)
    notes = [_skip(checkpoint) for checkpoint in damaged]
    if newest is None:
        return Earlier(notes=[*notes, "no valid checkpoint: training starts over"])
    return Earlier(newest.path, newest.step, notes=[*notes, *newest.notes, *_changes(run, old)])


def _asked_for(run: RunSpec, world: World, finished: bool) -> Earlier:
    path = Path(run["resume_from_checkpoint"])
    if finished:
        what = f"{run['output_dir']} holds a finished run, which going on from {path} would overwrite"
        raise mistake("output_dir", what, "another --output_dir", run.setting("output_dir").source)
    checkpoint = judged(path)
    if not checkpoint.valid:
        raise mistake(
            "resume_from_checkpoint",
            f"{path}: {', '.join(checkpoint.faults)}",
            "leave it out: the newest valid checkpoint is found by itself",
            run.setting("resume_from_checkpoint").source,
        )
    old = record.read(path.parent)
    _require_same_training(run, world, old)
    return Earlier(path, checkpoint.step, notes=[*checkpoint.notes, *_changes(run, old)])


def _skip(checkpoint: Checkpoint) -> str:
    kept = set_aside(checkpoint)
    return f"{checkpoint.path.name} is damaged ({', '.join(checkpoint.faults)}): skipped, kept as {kept.name}"


def _require_same_training(run: RunSpec, world: World, old: dict[str, Any]) -> None:
    changed = record.changes(old, run, record.IDENTITY)
    data = record.fingerprint(run["dataset_name"])
    if not changed and data and old.get("data") not in (None, data):
        changed = {"dataset_name": (f"{run['dataset_name']} as it was", "what it holds now")}
    if changed:
        name, (then, now) = next(iter(changed.items()))
        raise mistake(
            "output_dir",
            f"{run['output_dir']} holds a run with {name} {then}, not {now}",
            "another --output_dir, or --fresh to move that run aside",
            run.setting("output_dir").source,
        )
    sharded = "DeepSpeed" in str(old.get("engine", "")) or run.engine.kind == "deepspeed"
    then = (old.get("world_size"), old.get("engine"))
    if old and sharded and then != (world.size, run.engine.title):
        raise mistake(
            "num_processes",
            f"the checkpoints were written by {then[0]} processes with {then[1]}, sharded for just those",
            f"the same engine and --num_processes {then[0]}, another --output_dir, or --fresh",
        )


def _asks_for_more(run: RunSpec, old: dict[str, Any]) -> bool:
    """Whether the run now asked for may be longer than the finished one. Where only training can tell, it may."""
    changed = record.changes(old, run, ["max_steps", "num_train_epochs"])
    if "max_steps" in changed:
        return run["max_steps"] == -1 or run["max_steps"] > old.get("global_step", 0)
    then, now = changed.get("num_train_epochs", (0, 0))
    return run["max_steps"] == -1 and now > then


def _changes(run: RunSpec, old: dict[str, Any], everything: bool = False) -> list[str]:
    kept = record.changes(old, run, record.KEPT_BY_RESUME)
    course = record.changes(old, run, record.CHANGES_COURSE)
    if everything:
        return [
            f"asked for now and not trained: {name} {now} (was {then})" for name, (then, now) in (kept | course).items()
        ]
    return [
        *(f"{name} {now} is ignored by a resume: {then} is kept" for name, (then, now) in kept.items()),
        *(f"{name} changes from {then} to {now}: no longer the same training" for name, (then, now) in course.items()),
    ]
