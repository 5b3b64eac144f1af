"""The tokens of the data: how the cache holds them, and the labels of an example."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, List, Value

from launch.data.batches import IGNORED

NOTHING = np.iinfo(np.int32).max  # as first_learned: no label at all

# `learned` takes a bit for each token where labels take four bytes. The labels are the tokens that
# are learned; `labels` holds those of the few rows whose own are others, and is null elsewhere.
# `first_learned` is the place of the first label that a token predicts.
TOKENS = Features(
    {
        "input_ids": List(Value("int32")),
        "learned": List(Value("bool")),
        "labels": List(Value("int32")),
        "first_learned": Value("int32"),
    }
)


def token_table(ids: list[list[int]], labels: list[list[int]]) -> pa.Table:
    """Encoded rows as the cache holds them."""
    flat, offsets = _flat(ids)
    wanted = flat if labels is ids else _flat(labels)[0]
    learned = wanted != IGNORED
    others = np.repeat(np.arange(len(ids)), np.diff(offsets))[learned & (wanted != flat)]
    rows = set(others.tolist())
    own = [labels[row] if row in rows else None for row in range(len(ids))] if rows else pa.nulls(len(ids))
    columns = [
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)),
        pa.ListArray.from_arrays(pa.array(offsets), pa.array(learned)),
        pa.array(own, pa.list_(pa.int32())),
        pa.array(_first_learned(learned, offsets)),
    ]
    return pa.Table.from_arrays(columns, schema=TOKENS.arrow_schema)


def labelled_table(ids: list[list[int]], rows: Dataset, column: str) -> pa.Table:
    """Encoded texts, each with the label of its row as the data has it."""
    flat, offsets = _flat(ids)
    schema = Features({"input_ids": TOKENS["input_ids"], "label": rows.features[column]}).arrow_schema
    arrays = [pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)), rows.data.column(column).combine_chunks()]
    return pa.Table.from_arrays(arrays, schema=schema)


def labels_of(table: pa.Table) -> pa.ChunkedArray:
    """The labels of the rows of a table: each row's own, or else the tokens that are learned."""
    return pa.chunked_array([_labels(part) for part in table.to_batches()], pa.list_(pa.int32()))


def of_examples(examples: Dataset, values: np.ndarray) -> np.ndarray:
    """Of values for each row of their table those of the examples, which may be a selection.

    It reads no tokens, where `datasets` would gather all columns of the selected rows.
    """
    return values if examples._indices is None else values[examples._indices.column(0).to_numpy()]


def _labels(rows: pa.RecordBatch) -> pa.ListArray:
    ids, learned, own = (rows.column(name) for name in ("input_ids", "learned", "labels"))
    is_learned = learned.flatten().to_numpy(zero_copy_only=False)
    labels = np.where(is_learned, ids.flatten().to_numpy(), np.int32(IGNORED))
    offsets = ids.offsets.to_numpy() - ids.offsets[0].as_py()
    for row in np.flatnonzero(own.is_valid().to_numpy(zero_copy_only=False)):
        labels[offsets[row] : offsets[row + 1]] = own[row].values.to_numpy()
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(labels))


def _flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """All values in one array, and where each row begins in it."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.fromiter((value for row in rows for value in row), np.int32, offsets[-1]), offsets


def _first_learned(learned: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Nothing predicts the first token of a row, so that one does not count."""
    places = np.flatnonzero(learned)
    starts, ends = offsets[:-1], offsets[1:]
    found = np.append(places, NOTHING)[np.searchsorted(places, starts + 1)]
    return np.where(found < ends, found - starts, NOTHING).astype(np.int32)
