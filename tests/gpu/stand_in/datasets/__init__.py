"""The part of the package `datasets` that train.py uses to read a JSONL file, on pyarrow alone.

For GPU machines without that package: `python -m tests.gpu` then puts this folder on PYTHONPATH for
its cases, and their rows say so. Nothing else uses this file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.json

__version__ = "5.0.0+stand.in"  # transformers asks


config = SimpleNamespace(HF_DATASETS_CACHE=Path(tempfile.gettempdir(), "stand_in_datasets"), HF_HUB_OFFLINE=True)


@dataclass(frozen=True)
class Value:
    dtype: str


@dataclass(frozen=True)
class List:
    feature: Value


class Features(dict):
    """Column names and their types."""

    @property
    def arrow_schema(self) -> pa.Schema:
        return pa.schema([(name, _arrow_type(kind)) for name, kind in self.items()])

    @classmethod
    def from_arrow_schema(cls, schema: pa.Schema) -> Features:
        return cls({field.name: Value(str(field.type)) for field in schema})


class ClassLabel:
    """Unused: imported by name only."""


class DatasetDict(dict):
    """Unused: imported by name only."""


@dataclass
class DatasetInfo:
    features: Features | None = None
    builder_name: str = "json"


class IterableDataset:
    """The rows of a table, at once."""

    info = DatasetInfo()

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.features = Features.from_arrow_schema(table.schema)

    def with_format(self, kind: str) -> IterableDataset:
        return self

    def iter(self, rows: int) -> Iterator[pa.Table]:
        yield self.table

    def state_dict(self) -> dict[str, Any]:
        return {}


class Dataset:
    """Rows of a pyarrow table. A row is a dict, several are a dict of lists, or a table."""

    cache_files: tuple = ()
    _indices = None

    def __init__(self, table: pa.Table, info: DatasetInfo | None = None, fingerprint: str = "", kind: str = "") -> None:
        self.data = table
        self.kind = kind

    def __len__(self) -> int:
        return self.data.num_rows

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            return self.data.slice(key, 1).to_pylist()[0]
        rows = self.data[key] if isinstance(key, slice) else self.data.take(pa.array(list(key), type=pa.int64()))
        return rows if self.kind == "arrow" else rows.to_pydict()

    @property
    def column_names(self) -> list[str]:
        return self.data.column_names

    @property
    def features(self) -> Features:
        return Features.from_arrow_schema(self.data.schema)

    def select(self, rows: Iterable[int]) -> Dataset:
        return Dataset(self.data.take(pa.array(list(rows), type=pa.int64())))

    def with_format(self, kind: str) -> Dataset:
        return Dataset(self.data, kind=kind)

    def iter(self, batch_size: int) -> Iterator[Any]:
        yield self[:]


def _arrow_type(kind: Value | List) -> pa.DataType:
    if isinstance(kind, List):
        return pa.list_(_arrow_type(kind.feature))
    return pa.bool_() if kind.dtype == "bool" else getattr(pa, kind.dtype)()


class ReadInstruction:
    """A whole split by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def from_spec(cls, name: str) -> ReadInstruction:
        return cls(name)

    def to_absolute(self, lengths: Mapping[str, int]) -> list[SimpleNamespace]:
        if self.name not in lengths:
            raise ValueError(self.name)
        return [SimpleNamespace(splitname=self.name, from_=0, to=lengths[self.name])]


def load_dataset_builder(kind: str, data_files: list[str]) -> SimpleNamespace:
    splits = {"train": IterableDataset(pa.concat_tables(map(pyarrow.json.read_json, data_files)))}
    settings = SimpleNamespace(data_files={"train": data_files})
    return SimpleNamespace(config=settings, as_streaming_dataset=lambda: splits)


def disable_progress_bars() -> None:
    """Nothing to do: there are none."""
