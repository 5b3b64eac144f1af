"""Examples as a person reads them: decoded, with the tokens that are learned marked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from launch.data.batches import IGNORED
from launch.data.labels import Labelled
from launch.data.load import Data
from launch.data.packing import Cut
from launch.data.streams import Stream

_MOST_CHARACTERS = 400


def shown_examples(data: Data, tokenizer, count: int) -> Iterator[str]:
    """The first examples, each on its own even if they are packed. None of a stream."""
    if isinstance(data.train, Stream):
        return
    rows = data.train if isinstance(data.train, Cut) else Cut(data.train.examples, data.train.length)
    for number in range(min(count, len(rows))):
        ids, labels = rows[number]["input_ids"], rows[number]["labels"]
        if isinstance(rows, Labelled):
            yield f"{tokenizer.decode(ids)} -> {rows.examples[number]['label']}"
            continue
        pieces = groupby(zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED)
        texts = ((is_learned, tokenizer.decode([token for token, _ in piece])) for is_learned, piece in pieces)
        yield "".join(f"«{text}»" if is_learned else text for is_learned, text in texts)


def shortened(text: str) -> str:
    """An example on one line, of a long one the beginning and the end: what is learned often stands
    at the end.
    """
    text, half = text.replace("\n", "⏎"), _MOST_CHARACTERS // 2
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
