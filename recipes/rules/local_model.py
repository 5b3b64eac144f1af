"""Reads a model's configuration and its local folder without importing transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.run.files import Json, existing_path, read_json

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # whole or in shards
_TEXT_SECTIONS = ("text_config", "decoder", "generator", "text_encoder")  # the names that get_text_config looks for

# The configuration keys for the longest sequence; model types use different keys.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length", "context_length")

# Model types that number positions from `pad_token_id + 1`, and never use smaller numbers.
OFFSET_POSITIONS = {
    "camembert", "data2vec-text", "esm", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
}  # fmt: skip


def model_folder(name: str | None) -> Path | None:
    """The folder that `model_name_or_path` names; None for a Hub id, a file or no model."""
    path = existing_path(name)
    return path if path is not None and path.is_dir() else None


def local_config(name: str | None) -> Json | None:
    """The content of the config.json in a model's folder, or of a .json file; else None."""
    folder = model_folder(name)
    file = folder / "config.json" if folder else existing_path(name)
    return None if file is None or file.suffix != ".json" else read_json(file)[0]


def weights_in(folder: Path) -> list[Path]:
    """The weight files in a folder, whole or in shards; empty if there are none."""
    return [path for pattern in WEIGHTS for path in sorted(folder.glob(pattern)) if path.is_file()]


def is_git_lfs_pointer(file: Path) -> bool:
    """True for the small pointer file that `git clone` without git-lfs writes for a large file."""
    with file.open("rb") as opened:
        return opened.read(512).startswith(b"version https://git-lfs")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's section of a configuration; the whole configuration if it has none."""
    return next((config[name] for name in _TEXT_SECTIONS if isinstance(config.get(name), dict)), config)


def is_rotary(config: Mapping[str, Any]) -> bool:
    """True if the model computes its rotary embeddings for any position, without a table."""
    text = text_config(config)
    absolute = text.get("position_embedding_type") == "absolute"  # an absolute ESM has a rope_theta all the same
    return not absolute and any(name.startswith("rope_") for name in text)


def is_classifier(config: Mapping[str, Any]) -> bool:
    """True if the configuration is of a sequence classifier. A classifier's weights would
    load into a language model without an error.
    """
    names = config.get("architectures")
    return isinstance(names, list) and any("ForSequenceClassification" in str(name) for name in names)


def max_positions(config: Mapping[str, Any]) -> int | None:
    """The longest sequence, in tokens, that the model has positions for; None: no known limit."""
    text = text_config(config)
    positions = next((text[name] for name in _POSITIONS if name in text), None)
    if not isinstance(positions, int) or positions <= 0:  # DeBERTa has -1
        return None
    is_absolute = (text.get("position_embedding_type") or "absolute") == "absolute"
    if not is_absolute or str(text.get("model_type")) not in OFFSET_POSITIONS:
        return positions
    padding = text.get("pad_token_id")
    return positions - (padding if isinstance(padding, int) else 0) - 1
