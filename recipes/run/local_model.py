"""What a local model folder says of itself, read without transformers."""

from __future__ import annotations

import json
from pathlib import Path

from recipes.run.engine import Json


def model_folder(name: str | None) -> Path | None:
    """The folder that `model_name_or_path` names; None for a Hub id or no model."""
    folder = Path(name).expanduser() if name else None
    try:
        return folder if folder is not None and folder.is_dir() else None
    except OSError:  # a name that is too long for a file
        return None


def local_config(name: str | None) -> Json | None:
    """The content of the folder's config.json; None if there is none that can be read here."""
    folder = model_folder(name)
    if folder is None:
        return None
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def text_config(config: Json) -> Json:
    """The part that describes the decoder: that of a model with images has a section for it."""
    section = config.get("text_config")
    return section if isinstance(section, dict) else config
