"""What an output folder already holds, and what that means for a run that is about to write there."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import record
from launch.checkpoints import Checkpoint, judged, newest_valid, numbered, set_aside
from launch.world import World
from recipes.errors import UserError, mistake
from recipes.run import RunSpec


@dataclass(frozen=True)
class Earlier:
    """`checkpoint` to resume from, `finished` if there is nothing left to train, `notes` a person should read."""

    checkpoint: Path | None = None
    step: int = 0
    finished: bool = False
    notes: list[str] = field(default_factory=list)


def decided_by_rank_0(world: World, decide: Callable[[], Any]) -> Any:
    """The result of `decide`, run on rank 0 alone and known to all; a `UserError` there is raised on every rank."""
    if world.size == 1:
        return decide()
    import torch.distributed as dist

    answer: list[Any] = [None, None]
    if world.rank == 0:
        try:
            answer = [decide(), None]
        except UserError as error:
            answer = [None, error.problems]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise UserError(*answer[1])
    return answer[0]


def prepare_output(run: RunSpec) -> None:
    """Make the output folder and see that it can be written."""
    folder = Path(run["output_dir"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise _unwritable(run, error) from None


def move_older_run_aside(run: RunSpec) -> None:
    """For --fresh, when everything else has been found good: what the folder holds gets another name."""
    folder = Path(run["output_dir"]).resolve()
    if not run["fresh"] or not any(folder.iterdir()):
        return
    try:
        folder.rename(_unused_name(folder))
        folder.mkdir()
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
    if run["resume_from_checkpoint"] not in (None, True, "True", "true"):
        return _asked_for(run)
    old = record.read(folder)
    finished = old.get("status") == "finished"
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


def _asked_for(run: RunSpec) -> Earlier:
    path = Path(run["resume_from_checkpoint"])
    checkpoint = judged(path)
    if not checkpoint.valid:
        raise mistake(
            "resume_from_checkpoint",
            f"{path}: {', '.join(checkpoint.faults)}",
            "leave it out: the newest valid checkpoint is found by itself",
            run.setting("resume_from_checkpoint").source,
        )
    return Earlier(path, checkpoint.step, notes=list(checkpoint.notes))


def _skip(checkpoint: Checkpoint) -> str:
    kept = set_aside(checkpoint)
    return f"{checkpoint.path.name} is damaged ({', '.join(checkpoint.faults)}): skipped, kept as {kept.name}"


def _require_same_training(run: RunSpec, world: World, old: dict[str, Any]) -> None:
    changed = record.changes(old, run, record.IDENTITY)
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
