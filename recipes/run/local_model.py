"""A model's configuration, and a local folder of a model, read without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.run.files import Json, existing_path, read_json

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # whole or in shards
_TEXT_SECTIONS = ("text_config", "decoder", "generator", "text_encoder")  # as get_text_config looks for them

# The names that types of models have for their longest sequence.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "context_length")

_AGAIN = "copy or download the file again"

# These number positions from `pad_token_id + 1`, so that many of their position embeddings are
# never used.
OFFSET_POSITIONS = {
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip


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
    """True for a folder that holds a model, whole or in shards."""
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


def damage(file: Path) -> tuple[str, str] | None:
    """The fault of a file of weights, and what to do about it. None if none can be seen without
    loading it.
    """
    if not file.is_file():
        return "is missing", _AGAIN
    with file.open("rb") as opened:
        if opened.read(512).startswith(b"version https://git-lfs"):
            return "is a git-lfs pointer to the file, not the file", "`git lfs pull` in its repository"
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            safe_open(file, framework="np")
        except (SafetensorError, OSError):
            return "is cut off, or not in the safetensors format", _AGAIN
    return None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the decoder: that of a model with images has a section for it."""
    return next((config[name] for name in _TEXT_SECTIONS if isinstance(config.get(name), dict)), config)


def is_classifier(config: Mapping[str, Any]) -> bool:
    """True for the weights of a sequence classifier. Loading them does not ask."""
    names = config.get("architectures")
    return isinstance(names, list) and any("ForSequenceClassification" in str(name) for name in names)


def max_positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence, in tokens, that the model has positions for. None: no such limit."""
    text = text_config(config)
    positions = next((text[name] for name in _POSITIONS if name in text), None)
    if not isinstance(positions, int) or positions <= 0:  # DeBERTa says -1
        return None
    if str(text.get("model_type")) not in OFFSET_POSITIONS:
        return positions
    if (text.get("position_embedding_type") or "absolute") != "absolute":
        return positions
    padding = text.get("pad_token_id")
    return positions - (padding if isinstance(padding, int) else 0) - 1
