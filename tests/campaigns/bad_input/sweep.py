"""Every field of every JSON file in turn, with each of a few odd values in its place.

Drawing at random meets a single field of a single file too rarely.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.campaigns.bad_input.case import Case
from tests.campaigns.bad_input.draw import SEEDS

_DEPTH = 2  # fields of fields, but not the vocabulary of a tokenizer
_ELEMENTS = 3  # of a list or of a large dictionary
_ODD: list[Any] = [None, True, -1, 0, 1e30, 5.5, "x", "", [], [None], ["x"], {}, {"x": None}, {"0": 5}]


def sweep(world: Path, kind: str | None) -> list[Case]:
    """The cases of one kind of seed, or of all, in the same order each time."""
    return [
        Case(seed.kind, seed.argv, {name: json.dumps(content).encode()}, seed.to_the_end)
        for seed in SEEDS
        if kind in (None, seed.kind)
        for name in seed.files
        if name.endswith(".json") and (world / name).is_file()
        for content in _changed(json.loads((world / name).read_bytes()), _DEPTH)
    ]


def _changed(content: Any, depth: int) -> Iterator[Any]:
    """The content with one field of it made odd, once for each field and value."""
    if depth == 0 or not isinstance(content, (dict, list)):
        return
    fields = list(content) if isinstance(content, dict) else list(range(len(content)))
    for field in fields if depth == _DEPTH and isinstance(content, dict) else fields[:_ELEMENTS]:
        for new in (*_ODD, *_changed(content[field], depth - 1)):
            changed = content.copy()
            changed[field] = new
            yield changed
