"""Mark complete checkpoints, check a checkpoint before a resume, and delete old checkpoints.

Trainer writes a checkpoint in place, file by file, and resumes from the highest number even if that
checkpoint is incomplete. If the optimizer state is missing, Trainer silently starts with a fresh
optimizer.

So a manifest.json lists the files of a checkpoint. `begin` writes a manifest without files before
the first file. Once every process has written, `commit` flushes files and folders to the disk, and
then writes a manifest with each file's size and checksum. A manifest also holds the id of the run,
which the run gets at its first start in an output folder and keeps in all later starts. A
checkpoint without a manifest comes from another program: its files must be readable.

The checks execute no code of a checkpoint. A damaged checkpoint is deleted only if its save was
cut short.
"""

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

from launch.host.files import flush, share
from launch.output import record
from recipes.run import Json
from recipes.run.fingerprints import MODEL_FILES

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
# When Trainer itself saves on SIGTERM, it writes this marker first, and removes it at the end.
_TRAINERS_MARKER = "checkpoint-is-incomplete.txt"
# How file names of weights and of optimizer states begin; `global_step` is DeepSpeed's.
_WEIGHTS, _OPTIMIZER = ("model", "adapter_model", "pytorch_model", "global_step"), ("optimizer", "global_step")
_THREADS = 4

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, with reasons not to resume from it (`faults`), and with warnings (`notes`)."""

    path: Path
    step: int
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


# --- The manifest ---------------------------------------------------------------------------------


def begin(folder: Path, step: int, engine: str, world_size: int, run: Json | None = None) -> None:
    """Mark the checkpoint as unfinished, with a manifest that names engine, processes and run.

    The manifest is flushed to the disk, so that it survives any crash.
    """
    contents = {"version": 1, "step": step, "engine": engine, "world_size": world_size, "run": run}
    # `begun` is random: a node that reads the same value sees the same disk as the writer.
    _write(folder, {**contents, "files": None, "begun": secrets.token_hex(8)})
    flush(folder.parent)


def commit(folder: Path, names: Collection[str]) -> None:
    """Complete the checkpoint: flush these files and their folders, then write the manifest.

    `names` are paths relative to `folder`. Raises `OSError` for a full disk or a missing file.
    """
    contents = manifest_of(folder)
    contents.pop("begun", None)
    share(folder / MANIFEST)
    flush_files([folder / name for name in names])
    _write(folder, {**contents, "files": described(folder, names)})


def _write(folder: Path, contents: Json) -> None:
    record.write(folder, record.sealed(contents), MANIFEST)
    flush(folder)


def manifest_of(folder: Path) -> Json:
    """Return the content of a checkpoint's manifest; empty if it is missing or damaged."""
    return record.intact(folder, MANIFEST)


def is_foreign(folder: Path, run: Json | None) -> bool:
    """True if another run than `run` wrote the checkpoint; False if either run is unknown."""
    writer = manifest_of(folder).get("run")
    return run is not None and writer is not None and writer["id"] != run["id"]


# --- The files ------------------------------------------------------------------------------------


def listed(folder: Path) -> list[str]:
    """List a checkpoint's files, except manifest.json and Trainer's marker, relative to `folder`.

    The only hidden file of a checkpoint is FSDP's index; other hidden files are the file system's.
    """
    files = [path for path in folder.rglob("*") if path.name == ".metadata" or not path.name.startswith(".")]
    own = (folder / MANIFEST, folder / _TRAINERS_MARKER)
    return [str(file.relative_to(folder)) for file in files if file not in own and not file.is_dir()]


def model_files(folder: Path) -> list[str]:
    """List the files of a model in an output folder: weights, configuration, tokenizer."""
    found = (file for pattern in MODEL_FILES for file in folder.glob(pattern))
    return sorted({file.name for file in found if file.is_file()})


def flush_files(files: Collection[Path]) -> None:
    """Flush these files and their folders to the disk.

    One process per node is enough: a flush covers what all processes of the node wrote to a file.
    """
    _in_parallel(flush, files)
    # Flushing a file does not flush the file's name in its folder.
    _in_parallel(flush, {file.parent for file in files} | {file.parent.parent for file in files})


def described(folder: Path, names: Collection[str]) -> Json:
    """Map the name of each file to the file's size and checksum."""
    return dict(zip(sorted(names), _in_parallel(lambda name: _described(folder / name), sorted(names)), strict=True))


def _described(file: Path) -> Json:
    """Return the size and checksum of a file. 128-bit XXH3 is as fast as memory, and in practice
    detects any damage.
    """
    with file.open("rb", buffering=0) as stream:
        checksum = hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()  # type: ignore[arg-type]
    return {"bytes": file.stat().st_size, "xxh3_128": checksum}


def changes(folder: Path, files: Json) -> list[str]:
    """Read each file, and return a line for each difference from `files`, which `described` made.
    Missing and unreadable files count as different.
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
    """Return `work(item)` for each item, from threads: one thread cannot saturate a fast disk."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(work, on))


# --- Finding and judging --------------------------------------------------------------------------


def numbered(output_dir: str | Path) -> list[Path]:
    """List the folders checkpoint-N in `output_dir`, newest first."""
    found = (path for path in Path(output_dir).glob("checkpoint-*") if _step(path) >= 0 and path.is_dir())
    return sorted(found, key=_step, reverse=True)


def newest_valid(output_dir: str | Path, after: int = -1) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """Return the newest valid checkpoint (or None), and all newer checkpoints, which are damaged.

    A checkpoint of another run than the folder's is treated as damaged. If the folder's run is not
    known, a checkpoint of any run is valid. Checkpoints up to step `after` are ignored.
    """
    run = record.intact(output_dir).get("run")
    damaged: list[Checkpoint] = []
    for path in (path for path in numbered(output_dir) if _step(path) > after):
        checkpoint = inspect(path, run)
        if not checkpoint.faults:
            return checkpoint, damaged
        damaged.append(checkpoint)
    return None, damaged


def newest_complete(output_dir: str | Path) -> Path | None:
    """Return the newest complete checkpoint of the folder's run, or None. Only the manifests are
    read, in which `commit` lists the files. A resume also checks the files; here there may be no
    time to read them.
    """
    run = record.intact(output_dir).get("run")
    own = (path for path in numbered(output_dir) if not is_foreign(path, run))
    return next((path for path in own if manifest_of(path).get("files") is not None), None)


def inspect(path: Path, run: Json | None = None) -> Checkpoint:
    """Return a folder as a `Checkpoint` with its faults; a checkpoint of another run is faulty."""
    if is_foreign(path, run):
        return Checkpoint(path, _step(path), ("it belongs to another run",))
    try:
        names = listed(path)
        if found := _faults(path, names):
            return Checkpoint(path, _step(path), tuple(found))
        return Checkpoint(path, record.read(path, STATE)["global_step"], notes=tuple(_notes(path, names)))
    except Exception as error:  # a damaged file may hold any byte
        return Checkpoint(path, _step(path), (f"cannot be read ({type(error).__name__}: {error})",))


def _faults(path: Path, names: list[str]) -> list[str]:
    """Return a line per fault, such as a missing file. With a manifest, every byte is checked."""
    if not (path / MANIFEST).exists():
        if (path / _TRAINERS_MARKER).exists():
            return ["its save was not completed"]
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
    step = record.read(path, STATE).get("global_step")
    if not isinstance(step, int):
        return [f"{STATE} is not a Trainer state"]
    return [] if _step(path) in (-1, step) else [f"{STATE} belongs to step {step}"]


def _is_readable(file: Path) -> bool:
    """True if a file of weights or states is complete, as far as its format shows."""
    from safetensors import safe_open

    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="np"):  # checks the header, and the file's length against the header
                pass
        elif file.suffix in (".pt", ".pth", ".bin"):
            with zipfile.ZipFile(file) as archive:  # each part has a checksum
                return archive.testzip() is None
    except Exception:  # a damaged file can raise any exception
        return False
    return True


def _notes(path: Path, names: list[str]) -> list[str]:
    """Return lines to print: one if the optimizer's state is missing, so that a resume resets it,
    and one if the checkpoint could be checked only in part.
    """
    result = []
    if not any(name.startswith(_OPTIMIZER) for name in names):
        result = ["the checkpoint holds no optimizer (save_only_model): optimizer and schedule start afresh"]
    if not (path / MANIFEST).exists():
        result.append(f"{path.name} has no {MANIFEST}: it was checked only in part, damaged weights may go unnoticed")
    return result


def _step(path: Path) -> int:
    """Return N of checkpoint-N, which may be 0; -1 if the folder has another name."""
    number = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(number.group(1)) if number else -1


def model_notes(folder: Path, then: Json) -> list[str]:
    """Return a line to print if files of a finished run's model have changed, else no line."""
    changed = changes(folder, then)
    remedy = "copy the files from the newest checkpoint, or train the model again with --fresh"
    return [f"{'; '.join(changed)}: {remedy}"] if changed else []


# --- Keeping and deleting -------------------------------------------------------------------------


def archive_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint, so that `rotate` ignores it and keeps valid checkpoints."""
    names = (f"damaged-{path.name}" + (f"-{number}" if number > 1 else "") for number in count(1))
    return path.rename(next(target for name in names if not (target := path.with_name(name)).exists()))


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints until `limit` are left (None keeps all), but never `newest` or
    `best`. Checkpoints are ordered by step. Trainer orders them by file time, which is wrong in a
    copied folder or after a change of the clock. Checkpoints of another run stay.
    """
    if limit is None or limit <= 0:
        return
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    run = manifest_of(newest).get("run")
    own = [path for path in numbered(newest.parent) if not is_foreign(path, run)]
    old = [path for path in reversed(own) if path.resolve() not in kept]
    remove(old[: max(0, len(own) - max(limit, len(kept)))])


def remove(checkpoints: Iterable[Path]) -> None:
    """Delete checkpoints. Files that cannot be deleted stay, as with Trainer.

    trainer_state.json goes first, so that a half-deleted checkpoint never looks valid.
    """
    for path in checkpoints:
        with contextlib.suppress(OSError):
            (path / STATE).unlink()
        shutil.rmtree(path, ignore_errors=True)
