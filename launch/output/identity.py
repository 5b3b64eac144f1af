"""Which run a checkpoint is of: run.json and the manifest of each checkpoint name it.

A run gets its id at its first start in an output folder, and keeps it in all later ones. Whoever
names a checkpoint to begin from (--resume_from_checkpoint) begins another run. That one comes
`after` others: their ids, each with the last step that the new run goes on from. What they saved
beyond it is given up.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from launch.output import manifest, record
from recipes.run import Json

FOREIGN, GIVEN_UP = "it is another run's", "it was given up"


def new() -> Json:
    """The identity of a run that begins now."""
    return _sealed({"id": secrets.token_hex(8), "after": {}, "began_from": None, "began_at": 0})


def begun_from(checkpoint: Path, step: int) -> Json:
    """The identity of a run that begins from a checkpoint which its user has named."""
    parent = of_checkpoint(checkpoint)
    after = {**parent["after"], parent["id"]: step} if parent else {}
    return _sealed({**new(), "after": after, "began_from": str(checkpoint.resolve()), "began_at": step})


def of_folder(folder: Path) -> Json | None:
    """The run that an output folder holds. None if its record is missing or damaged, or older."""
    return _valid(record.read(folder))


def of_checkpoint(checkpoint: Path) -> Json | None:
    """The run that wrote a checkpoint. None if its manifest does not tell."""
    try:
        return _valid(manifest.read(checkpoint))
    except (OSError, ValueError):
        return None


def fault(checkpoint: Path, step: int, run: Json | None) -> str:
    """FOREIGN if the checkpoint is of another run than this one, GIVEN_UP if this run began from an
    earlier one of the run that wrote it. Empty if neither, or if nobody can tell.
    """
    writer = of_checkpoint(checkpoint)
    if run is None or writer is None or is_same(writer, run) or step <= run["after"].get(writer["id"], -1):
        return ""
    return GIVEN_UP if writer["id"] in run["after"] else FOREIGN


def is_same(one: Json | None, other: Json | None) -> bool:
    return one is not None and other is not None and one["id"] == other["id"]


def _sealed(run: Json) -> Json:
    """With a checksum: one wrong bit in run.json would make all its checkpoints another run's."""
    contents = {name: value for name, value in run.items() if name != "checksum"}
    return {**contents, "checksum": manifest.checksum_of(contents)}


def _valid(contents: Json) -> Json | None:
    run = contents.get("run")
    return run if isinstance(run, dict) and run == _sealed(run) else None
