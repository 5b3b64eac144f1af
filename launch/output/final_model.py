"""Whether the model of a finished run is still as it was written: run.json has its checksums."""

from __future__ import annotations

from pathlib import Path

from launch.output import manifest
from launch.output.checkpoints import numbered
from recipes.run import Json


def weights(folder: Path) -> list[str]:
    """The files of a model's weights in an output folder, and the index of several."""
    patterns = ("*.safetensors", "*model*.bin", "*.index.json")
    return sorted({file.name for pattern in patterns for file in folder.glob(pattern)})


def notes(folder: Path, record: Json) -> list[str]:
    """What became of the model of a finished run, and where else it is. Empty if it is whole.

    An older record lacks its checksums: then it is only seen whether it is there.
    """
    then, left = _checksums(record), [path.name for path in numbered(folder)]
    changed = manifest.changes(folder, then)
    if not weights(folder):
        changed = ["the model of the run is gone" + (f"; left are {', '.join(left)}" if left else "")]
    if not changed:
        return []
    same = next((path.name for path in numbered(folder) if then and _holds(path, then)), None)
    remedy = f"copy {', '.join(then)} from {same}, which holds the same" if same else "--fresh trains it again"
    return [f"{'; '.join(changed)}: {remedy}"]


def _holds(checkpoint: Path, files: Json) -> bool:
    return manifest.is_committed(checkpoint) and not manifest.changes(checkpoint, files)


def _checksums(record: Json) -> Json:
    """The files of the model, as `manifest.described`; none if the record is older, or damaged."""
    files = record.get("model_files")
    if not isinstance(files, dict):
        return {}
    whole = all(isinstance(then, dict) and then.keys() >= {"bytes", "xxh3_128"} for then in files.values())
    return files if whole else {}
