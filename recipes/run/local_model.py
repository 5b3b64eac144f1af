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

_AGAIN = "copy or download the file again"
# How a file begins that a server, git or a program for archives has left in place of the real one.
_FOREIGN = {
    b"version https://git-lfs": ("is a git-lfs pointer to the file, not the file", "`git lfs pull` in its repository"),
    b"<!doctype html": ("is a web page", _AGAIN),
    b"<html": ("is a web page", _AGAIN),
    b"<?xml": ("is an XML document, such as a server's error", _AGAIN),
    b"\x1f\x8b": ("is compressed with gzip", "unpack it"),
    b"\0" * 64: ("begins with zeros", _AGAIN),
}
_TORCH = (b"PK\x03\x04", b"\x80")  # a zip, or a pickle as torch wrote it before 1.6

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
    """The files of weights that transformers loads from a folder, missing shards among them."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (folder / whole).is_file():
            return [folder / whole]
        shards = (read_json(folder / f"{whole}.index.json")[0] or {}).get("weight_map")
        if isinstance(shards, dict):
            return [folder / str(name) for name in sorted(set(map(str, shards.values())))]
    return []


def tensor_names(folder: Path) -> list[str]:
    """The names of a folder's weights; empty if they are unknown, as in a .bin file."""
    headers = [safetensors_header(file) for file in weight_files(folder) if file.is_file()]
    return [name for header in headers for name in header or {} if name != "__metadata__"]


def safetensors_header(file: Path) -> Json | None:
    """What a safetensors file says of its tensors; None if it is cut off, or another format.

    The format: 8 bytes, little-endian, with the header's length; the header in JSON; the data, in
    which `data_offsets` of each tensor count.
    """
    try:
        size = file.stat().st_size
        opened = file.open("rb")
    except OSError:
        return None
    with opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 + length:
            return None
        try:
            header = json.loads(opened.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
            return None
    return header if max(ends, default=0) == size - 8 - length else None


def damage(file: Path) -> tuple[str, str] | None:
    """What is wrong with a file of weights, and what to do. None if nothing is that can be seen
    without loading it.
    """
    if not file.is_file():
        return "is missing", _AGAIN
    foreign = foreign_content(file)
    if foreign:
        return foreign
    if file.suffix == ".safetensors":
        return ("is cut off, or not in the safetensors format", _AGAIN) if safetensors_header(file) is None else None
    return None if _beginning(file).startswith(_TORCH) else ("is not in torch's format", _AGAIN)


def foreign_content(file: Path) -> tuple[str, str] | None:
    """What a file is instead of a model's, and what to do. None if its first bytes do not tell."""
    try:
        beginning = _beginning(file)
    except OSError as error:
        return f"cannot be read: {error.strerror}", "make it readable"
    if not beginning:
        return "is empty", _AGAIN
    return next((found for start, found in _FOREIGN.items() if beginning.lstrip().lower().startswith(start)), None)


def _beginning(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(512)


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


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether the weights are those of a sequence classifier. Loading them does not ask."""
    names = config.get("architectures")
    return isinstance(names, list) and any("ForSequenceClassification" in str(name) for name in names)


def max_positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence, in tokens, that the model has positions for.

    None if it has no such limit.
    """
    text = text_config(config)
    positions = config_value(text, "max_position_embeddings")
    if not isinstance(positions, int) or positions <= 0:  # DeBERTa says -1
        return None
    if str(text.get("model_type")) not in OFFSET_POSITIONS:
        return positions
    if (config_value(text, "position_embedding_type") or "absolute") != "absolute":
        return positions
    padding = config_value(text, "pad_token_id")
    return positions - (padding if isinstance(padding, int) else 0) - 1
