"""Which run a checkpoint is of: run.json and the manifest of each checkpoint name it.

A run gets its id at its first start in an output folder, and keeps it in all later ones. Whoever
names a checkpoint to begin from (--resume_from_checkpoint) begins another run.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from launch.output import manifest, record
from recipes.run import Json


def new(began_from: Path | None = None, began_at: int = -1) -> Json:
    """The identity of a run that begins now, perhaps from a checkpoint that its user has named."""
    named = str(began_from.resolve()) if began_from else None
    run = {"id": secrets.token_hex(8), "began_from": named, "began_at": began_at}
    # One wrong bit in run.json would make all its checkpoints another run's.
    return {**run, "checksum": manifest.checksum_of(run)}


def of_folder(folder: Path) -> Json | None:
    """The run that an output folder holds. None if its record is missing or damaged, or older."""
    return _valid(record.read(folder))


def of_checkpoint(checkpoint: Path) -> Json | None:
    """The run that wrote a checkpoint. None if its manifest does not tell."""
    try:
        return _valid(manifest.read(checkpoint))
    except (OSError, ValueError):
        return None


def is_foreign(checkpoint: Path, run: Json | None) -> bool:
    """True if another run than this one wrote the checkpoint; false if nobody can tell."""
    writer = of_checkpoint(checkpoint)
    return run is not None and writer is not None and not is_same(writer, run)


def is_same(one: Json | None, other: Json | None) -> bool:
    return one is not None and other is not None and one["id"] == other["id"]


def _valid(contents: Json) -> Json | None:
    run = contents.get("run")
    if not isinstance(run, dict):
        return None
    named = {name: value for name, value in run.items() if name != "checksum"}
    return run if run.get("checksum") == manifest.checksum_of(named) else None
