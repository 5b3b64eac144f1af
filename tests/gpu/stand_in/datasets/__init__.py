"""The part of the package `datasets` that train.py uses to read a JSONL file, on pyarrow alone.

For GPU machines without that package. If it is missing, the cases that run train.py put this folder
on PYTHONPATH, and their rows say so. Nothing else uses this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.json

__version__ = "5.0.0+stand.in"  # transformers asks


@dataclass(frozen=True)
class Value:
    dtype: str


@dataclass(frozen=True)
class List:
    feature: Value


class Features(dict):
    """Column names and their types."""


class ClassLabel:
    """Unused: imported by name only."""


class DatasetDict(dict):
    """Unused: imported by name only."""


class IterableDataset:
    """Unused: transformers and accelerate check whether the data is one."""


class Dataset:
    """Rows of a pyarrow table. A row is a dict of lists; any slice is the whole table."""

    cache_files: tuple = ()

    def __init__(self, table: pa.Table) -> None:
        self.data = table

    def __len__(self) -> int:
        return self.data.num_rows

    def __getitem__(self, key: int | slice) -> Any:
        if isinstance(key, slice):
            return self.data
        return {name: column[key].as_py() for name, column in zip(self.column_names, self.data.columns, strict=True)}

    @property
    def column_names(self) -> list[str]:
        return self.data.column_names

    @property
    def features(self) -> Features:
        return Features({field.name: Value(str(field.type)) for field in self.data.schema})

    def select(self, rows: Iterable[int]) -> Dataset:
        return Dataset(self.data.take(pa.array(list(rows), type=pa.int64())))

    def remove_columns(self, names: list[str]) -> Dataset:
        return Dataset(self.data.drop_columns(names))

    def with_format(self, kind: str) -> Dataset:
        return self

    def map(self, function: Callable[..., Any], features: Features | None = None, **options: Any) -> Dataset:
        """Apply a function to all rows at once: to a dict of lists, without features to a table."""
        if features is None:
            return Dataset(function(self.data))
        found = function(self.data.to_pydict())
        schema = pa.schema([(name, _arrow_type(kind)) for name, kind in features.items()])
        return Dataset(pa.table({name: found[name] for name in features}, schema=schema))


def _arrow_type(kind: Value | List) -> pa.DataType:
    if isinstance(kind, List):
        return pa.list_(_arrow_type(kind.feature))
    return getattr(pa, kind.dtype)()


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


def load_dataset(kind: str, data_files: str) -> dict[str, Dataset]:
    return {"train": Dataset(pyarrow.json.read_json(data_files))}


def disable_progress_bars() -> None:
    """Nothing to do: there are none."""
