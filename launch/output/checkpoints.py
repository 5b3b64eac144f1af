"""Checkpoints: written so that only a whole one counts, judged before a resume, and rotated.

Trainer writes a checkpoint in place, file by file, and resumes from the highest number whether it
is whole or not. If the optimizer state is missing, Trainer silently starts with a fresh optimizer.

So a manifest.json says what a checkpoint consists of. Before the first file, `begin` puts one
without files into the folder. Once every process has written, `commit` flushes files and folders to
the disk, and then replaces that manifest by one with the size and checksum of each file. A manifest
also names its run: a run gets its id at its first start in an output folder, and keeps it in all
later ones. A checkpoint without a manifest is not from here: its files must be readable.

Nothing in a checkpoint is executed. A damaged one is never deleted, only one whose save was cut
short.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeVar

import xxhash

from launch.host.files import flush
from launch.output import record
from recipes.run import Json
from recipes.run.files import read_json
from recipes.run.fingerprints import MODEL_FILES

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
# What Trainer's own saving on SIGTERM puts into the folder, and removes when all else is there.
_TRAINERS_MARKER = "checkpoint-is-incomplete.txt"
# How the names of weights and of an optimizer's state begin, DeepSpeed's last.
_WEIGHTS, _OPTIMIZER = ("model", "adapter_model", "pytorch_model", "global_step"), ("optimizer", "global_step")
_THREADS = 4

T = TypeVar("T")
R = TypeVar("R")


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


# --- Its manifest ---------------------------------------------------------------------------------


def begin(folder: Path, step: int, engine: str, world_size: int, run: Json | None = None) -> None:
    """Mark the checkpoint in `folder` as being written: by which engine, how many processes, and
    which run.

    The mark is on the disk when this returns, so that it is there whatever a crash leaves.
    """
    contents = {"version": 1, "step": step, "engine": engine, "world_size": world_size, "run": run}
    # `begun` is different every time: a node that reads it looks at the same disk as its writer.
    _write(folder, {**contents, "files": None, "begun": secrets.token_hex(8)})
    flush(folder.parent)


def commit(folder: Path, names: Collection[str]) -> None:
    """Complete the checkpoint: flush these files and their folders, then write the manifest.

    `names` are paths in `folder`. Raises `OSError` if the disk does not take it.
    """
    contents = manifest_of(folder)
    contents.pop("begun", None)
    flush_files([folder / name for name in names])
    _write(folder, {**contents, "files": described(folder, names)})


def _write(folder: Path, contents: Json) -> None:
    record.write(folder, record.sealed(contents), MANIFEST)
    flush(folder)


def manifest_of(folder: Path) -> Json:
    """What the manifest of a checkpoint says; empty if it is missing or damaged."""
    return record.intact(folder / MANIFEST)


def is_committed(folder: Path) -> bool:
    """True if the checkpoint was completed. Its files are not looked at."""
    return manifest_of(folder).get("files") is not None


def is_foreign(folder: Path, run: Json | None) -> bool:
    """True if another run than this one wrote the checkpoint; false if nobody can tell."""
    writer = manifest_of(folder).get("run")
    return run is not None and writer is not None and writer["id"] != run["id"]


# --- Its files ------------------------------------------------------------------------------------


def listed(folder: Path) -> list[str]:
    """The files of a checkpoint as they are now, as paths in `folder`, without its manifest.

    The only hidden file of a checkpoint is the index of FSDP's shards; others are the file
    system's.
    """
    files = [path for path in folder.rglob("*") if path.name == ".metadata" or not path.name.startswith(".")]
    own = (folder / MANIFEST, folder / _TRAINERS_MARKER)
    return [str(file.relative_to(folder)) for file in files if file not in own and not file.is_dir()]


def model_files(folder: Path) -> list[str]:
    """The files of a model in an output folder: weights, configuration, tokenizer."""
    found = (file for pattern in MODEL_FILES for file in folder.glob(pattern))
    return sorted({file.name for file in found if file.is_file()})


def flush_files(files: Collection[Path]) -> None:
    """Have these files and their folders on the disk when this returns.

    One process of a node flushes what all its processes wrote: the kernel knows files, not writers.
    """
    _in_parallel(flush, files)
    # A name in a folder is not on the disk when its file is.
    _in_parallel(flush, {file.parent for file in files} | {file.parent.parent for file in files})


def described(folder: Path, names: Collection[str]) -> Json:
    """Size and checksum of each of these files."""
    return dict(zip(sorted(names), _in_parallel(lambda name: _described(folder / name), sorted(names)), strict=True))


def _described(file: Path) -> Json:
    """XXH3 with 128 bits is as fast as memory, and sees any damage."""
    with file.open("rb", buffering=0) as stream:
        checksum = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]
    return {"bytes": file.stat().st_size, "xxh3_128": checksum}


def changes(folder: Path, files: Json) -> list[str]:
    """How these files, as `described`, differ from those in a folder, one line each: every byte is
    read.
    """

    def of_file(name: str) -> str | None:
        try:
            is_same = _described(folder / name) == files[name]
            return None if is_same else f"{name} has changed since it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"

    return [line for line in _in_parallel(of_file, sorted(files)) if line]


def _in_parallel(work: Callable[[T], R], on: Iterable[T]) -> list[R]:
    """The results in order. One thread alone fills no fast disk, and no network's."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(work, on))


# --- Finding and judging --------------------------------------------------------------------------


def numbered(output_dir: str | Path) -> list[Path]:
    """The folders checkpoint-N in `output_dir`, newest first."""
    found = (path for path in Path(output_dir).glob("checkpoint-*") if _number(path) is not None and path.is_dir())
    return sorted(found, key=_step, reverse=True)


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
    own = (path for path in numbered(output_dir) if not is_foreign(path, run))
    return next((path for path in own if is_committed(path)), None)


def inspect(path: Path, run: Json | None = None) -> Checkpoint:
    """The checkpoint in a folder with its faults. One of another run than `run` has that fault."""
    if is_foreign(path, run):
        return Checkpoint(path, _step(path), ("it is another run's",))
    try:
        names = listed(path)
        if found := _faults(path, names):
            return Checkpoint(path, _step(path), tuple(found))
        return Checkpoint(path, _state(path)["global_step"], notes=tuple(_notes(path, names)))
    except Exception as error:  # a damaged file may hold any byte
        return Checkpoint(path, _step(path), (f"cannot be read ({type(error).__name__}: {error})",))


def _faults(path: Path, names: list[str]) -> list[str]:
    """What is missing, changed or broken, one line each. A manifest answers for every byte."""
    if not (path / MANIFEST).exists():
        found = [f"{name} is damaged or cannot be read" for name in names if not _is_readable(path / name)]
        if not any(name.startswith(_WEIGHTS) for name in names):
            found.append("its weights are missing")
    elif contents := manifest_of(path):
        files = contents["files"]
        found = ["its save was not completed"] if files is None else changes(path, files)
    else:
        found = [f"{MANIFEST} is damaged"]
    if found:
        return found
    step = _state(path).get("global_step")
    if not isinstance(step, int):
        return [f"{STATE} is not Trainer's"]
    return [] if _number(path) in (None, step) else [f"{STATE} is that of step {step}"]


def _is_readable(file: Path) -> bool:
    """True if a file of weights or states is whole, as far as its format tells."""
    from safetensors import safe_open

    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="np"):  # the header, and that the file is as long as it says
                pass
        elif file.suffix in (".pt", ".pth", ".bin"):
            with zipfile.ZipFile(file) as archive:  # each part has a checksum
                return archive.testzip() is None
    except Exception:  # whatever a damaged file can raise
        return False
    return True


def _notes(path: Path, names: list[str]) -> list[str]:
    """What a resume starts afresh because the checkpoint does not hold it, and how far the
    checkpoint could be judged.
    """
    result = []
    if not any(name.startswith(_OPTIMIZER) for name in names):
        result = ["it holds no optimizer (save_only_model): optimizer and schedule start afresh"]
    if not (path / MANIFEST).exists():
        result.append(f"{path.name} has no {MANIFEST}: it was judged in part, damaged weights may look whole")
    return result


def _state(path: Path) -> Json:
    return read_json(path / STATE)[0] or {}


def _step(path: Path) -> int:
    return _number(path) or 0


def _number(path: Path) -> int | None:
    """N of checkpoint-N, 0 too. None if the folder has another name."""
    number = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(number.group(1)) if number else None


def model_notes(folder: Path, then: Json) -> list[str]:
    """How the model of a finished run differs from its recorded files."""
    changed = changes(folder, then)
    remedy = "copy them from the newest checkpoint, or --fresh trains it again"
    return [f"{'; '.join(changed)}: {remedy}"] if changed else []


# --- Keeping and deleting -------------------------------------------------------------------------


def archive_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint. Trainer's rotation counts by number and keeps the valid ones."""
    names = (f"damaged-{path.name}" + (f"-{number}" if number > 1 else "") for number in count(1))
    return path.rename(next(target for name in names if not (target := path.with_name(name)).exists()))


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete old checkpoints beside `newest`, so that `limit` are left, among them the best.

    As Trainer does it, but by their steps, since a copied folder or a wrong clock gives any times.
    Those of another run stay.
    """
    if limit is None or limit <= 0:
        return
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    run = manifest_of(newest).get("run")
    own = [path for path in numbered(newest.parent) if not is_foreign(path, run)]
    old = [path for path in reversed(own) if path.resolve() not in kept]
    remove(old[: max(0, len(own) - max(limit, len(kept)))])


def remove(checkpoints: Iterable[Path]) -> None:
    """Delete checkpoints. What cannot be deleted stays, as with Trainer.

    The state goes first: what a kill in between leaves is no valid checkpoint.
    """
    for path in checkpoints:
        with contextlib.suppress(OSError):
            (path / STATE).unlink()
        shutil.rmtree(path, ignore_errors=True)
