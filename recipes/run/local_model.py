"""What a model's configuration says, and a local folder of a model, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.legal import models
from recipes.run.engine import Json

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # whole or in shards
_TEXT_SECTIONS = ("text_config", "decoder", "generator", "text_encoder")  # as get_text_config looks for them

# These number positions from `pad_token_id + 1`, so that many of their position embeddings are
# never used.
OFFSET_POSITIONS = {
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip


def existing_path(name: str | None) -> Path | None:
    """The file or folder that a user names; None if there is none here."""
    try:
        path = Path(name or "").expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError):  # too long for a path, or the home folder of nobody
        return None


def model_folder(name: str | None) -> Path | None:
    """The folder that `model_name_or_path` names; None for a Hub id or no model."""
    path = existing_path(name)
    return path if path is not None and path.is_dir() else None


def local_config(name: str | None) -> Json | None:
    """The content of the folder's config.json, or of a named one; None if it cannot be read."""
    folder = model_folder(name)
    file = folder / "config.json" if folder else existing_path(name)
    if file is None or file.suffix != ".json":
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a model, whole or in shards."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the decoder: that of a model with images has a section for it."""
    return next((config[name] for name in _TEXT_SECTIONS if isinstance(config.get(name), dict)), config)


def config_value(config: Mapping[str, Any], field: str) -> Any:
    """A field, whatever the model's type calls it; its default if the configuration omits it."""
    if field in config:
        return config[field]
    model_type = str(config.get("model_type"))
    name = models.own_name(model_type, field)
    return config[name] if name in config else models.config_default(model_type, name)


def max_positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence, in tokens, that the model has positions for.

    None if it has no such limit.
    """
    text = text_config(config)
    positions = config_value(text, "max_position_embeddings")
    if not isinstance(positions, int) or positions <= 0:  # DeBERTa says -1
        return None
    if text.get("model_type") not in OFFSET_POSITIONS:
        return positions
    if (config_value(text, "position_embedding_type") or "absolute") != "absolute":
        return positions
    return positions - (config_value(text, "pad_token_id") or 0) - 1
