"""What a model's configuration says, and a local folder of a model, read without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.legal import models
from recipes.run.engine import Json, expanded, read_json

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
        path = expanded(name or "")
        return path if name and path.exists() else None
    except OSError:  # too long for a path
        return None


def model_folder(name: str | None) -> Path | None:
    """The folder that `model_name_or_path` names; None for a Hub id or no model."""
    path = existing_path(name)
    return path if path is not None and path.is_dir() else None


def local_config(name: str | None) -> Json | None:
    """The content of the folder's config.json, or of a named one; None if it cannot be read."""
    folder = model_folder(name)
    file = folder / "config.json" if folder else existing_path(name)
    return None if file is None or file.suffix != ".json" else read_json(file)[0]


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a model, whole or in shards."""
    return any(path.is_file() for pattern in WEIGHTS for path in folder.glob(pattern))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers loads from a folder, missing shards among them."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    shards = (read_json(folder / "model.safetensors.index.json")[0] or {}).get("weight_map")
    return [folder / str(name) for name in sorted(set(map(str, shards.values())))] if isinstance(shards, dict) else []


def tensor_names(folder: Path) -> list[str]:
    """The names of a folder's weights; empty if they are unknown, as in a .bin file."""
    headers = [safetensors_header(file) for file in weight_files(folder) if file.is_file()]
    return [name for header in headers for name in header or {} if name != "__metadata__"]


def safetensors_header(file: Path) -> Json | None:
    """What a safetensors file says of its tensors; None if it is cut off, or another format.

    The format: 8 bytes, little-endian, with the header's length; the header in JSON; the data, in
    which `data_offsets` of each tensor count.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 + length:
            return None
        try:
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
            return None
    return header if max(ends, default=0) == size - 8 - length else None


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
