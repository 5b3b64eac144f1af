"""The saved model of a finished run, compared with the checksums in run.json."""

from __future__ import annotations

from pathlib import Path

from launch.output import manifest
from launch.output.checkpoints import numbered
from recipes.run import Json
from recipes.run.fingerprints import MODEL_FILES


def files(folder: Path) -> list[str]:
    """The files of a model in an output folder: weights, configuration, tokenizer."""
    found = (file for pattern in MODEL_FILES for file in folder.glob(pattern))
    return sorted({file.name for file in found if file.is_file()})


def weights(folder: Path) -> list[str]:
    """The files of a model's weights in an output folder, and the index of several."""
    patterns = ("*.safetensors", "*model*.bin", "*.index.json")
    return sorted({file.name for pattern in patterns for file in folder.glob(pattern)})


def notes(folder: Path, record: Json) -> list[str]:
    """What became of the model of a finished run, and where else it is. Empty if it is whole."""
    then, left = record.get("model_files") or {}, [path.name for path in numbered(folder)]
    changed = manifest.changes(folder, then)
    needed = {name: of_file for name, of_file in then.items() if any(line.startswith(f"{name} ") for line in changed)}
    if not weights(folder):
        changed = ["the model of the run is gone" + (f"; left are {', '.join(left)}" if left else "")]
    if not changed:
        return []
    same = next((path.name for path in numbered(folder) if needed and _holds(path, needed)), None)
    remedy = f"copy {', '.join(needed)} from {same}, which holds the same" if same else "--fresh trains it again"
    return [f"{'; '.join(changed)}: {remedy}"]


def _holds(checkpoint: Path, files: Json) -> bool:
    return manifest.is_committed(checkpoint) and not manifest.changes(checkpoint, files)
