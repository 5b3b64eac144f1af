"""Fingerprints of data and models: equal fingerprints mean that two runs read the same files."""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.mixture import parts_of, paths_of
from recipes.run.files import expanded, files_in, hf_home

_METHOD = "sha256-"
_BLOCK_BYTES = 1 << 16
_BLOCKS = 4096  # read from more than 256 MiB of data, because reading terabytes would take hours

# The files that transformers reads from a model's folder. The folder may hold other files too.
MODEL_FILES = (
    "config.json", "generation_config.json", "adapter_config.json", "*.index.json", "*.safetensors", "*_model*.bin",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.jinja", "*.py",
)  # fmt: skip


def of_data(dataset_name: str | Sequence[Any] | None) -> str | None:
    """Hash a local file, or the files of a folder or pattern. Returns None for data on the Hub, and
    if a file cannot be read.

    Without data, hash the demonstration's texts: the standard library of this Python. The hash of a
    mixture combines each part's hash (or else its name) with the settings of that part. Data up
    to 256 MiB are read whole, larger data in about 4,096 blocks, with each file's start and end.
    """
    if not dataset_name:
        return _hash_of(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not isinstance(dataset_name, str):
        parts = [asdict(part) | {"name": of_data(part.name) or part.name} for part in parts_of(dataset_name)]
        return f"{_METHOD}{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"
    paths = paths_of(dataset_name)
    if len(paths) != 1:
        return _hash_of(paths) if paths else None
    path = paths[0]
    return _hash_of([path] if path.is_file() else files_in(path), path)


def of_model(name: str | None, revision: str) -> str | None:
    """Hash a local folder's weights, configuration and tokenizer. For a model on the Hub, return
    `commit HASH`: the revision if it is a commit hash, else the commit that the local cache has for
    the revision. None without a model, if the commit is unknown, or if a file cannot be read.
    """
    if not name:
        return None
    folder = expanded(name)
    if folder.is_dir():
        return _hash_of((file for pattern in MODEL_FILES for file in folder.glob(pattern)), folder)
    if re.fullmatch(r"[0-9a-f]{40}", revision):
        return f"commit {revision}"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")  # the older name of the variable
    cache = Path(named or hf_home() / "hub")
    try:
        reference = cache / f"models--{name.replace('/', '--')}" / "refs" / revision
        return f"commit {reference.read_text(encoding='utf-8').strip()}"
    except (OSError, ValueError):
        return None


def differ(one: object, other: object) -> bool:
    """True if two known fingerprints differ; False if one of the two is unknown (None)."""
    return isinstance(one, str) and isinstance(other, str) and one != other


def _hash_of(files: Iterable[Path], folder: Path | None = None) -> str | None:
    """Hash files and their names relative to a folder. Returns None if a file cannot be read."""
    digest = hashlib.sha256()
    try:
        sizes = {file: file.stat().st_size for file in sorted({file for file in files if file.is_file()})}
        step = max(_BLOCK_BYTES, sum(sizes.values()) // _BLOCKS)
        for file, size in sizes.items():
            # A single file keeps its fingerprint under another name, but not with another suffix.
            name = file.suffix if file == folder else file.relative_to(folder) if folder else file.name
            digest.update(f"{name} {size}\n".encode(errors="surrogateescape"))
            with file.open("rb") as stream:
                for start in [*range(0, size, step), max(0, size - _BLOCK_BYTES)]:
                    stream.seek(start)
                    digest.update(stream.read(_BLOCK_BYTES))
    except OSError:  # the code that reads the data or the model reports the error
        return None
    return f"{_METHOD}{digest.hexdigest()[:16]}"
