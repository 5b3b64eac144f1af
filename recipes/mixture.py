"""The sources of a run's data: one source, or the parts of a mixture with their weights.

For one source, `dataset_name` is a string. For a mixture it is a list of strings or, in a --config
file, a list of entries with the fields of a `Part`.
"""

import glob
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """A file, a folder, a pattern such as `data/*.jsonl`, or a data set on the Hub.

    `weight` is the part's share of the examples, relative to the weights of the other parts. A
    weight of None means that an epoch uses every example once. `split` and `config` replace
    --dataset_train_split and --dataset_config for this part. `columns` maps old names to new names.
    """

    name: str
    weight: float | None = None
    split: str | None = None
    config: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(filter(None, (self.name, self.config, self.split)))


FIELDS = tuple(entry.name for entry in fields(Part))


def parts_of(dataset_name: str | Sequence[Any] | None) -> list[Part]:
    """Return each source of the data as a `Part`; an empty list if no data set is named."""
    if not dataset_name:
        return []
    entries = [dataset_name] if isinstance(dataset_name, str) else dataset_name
    return [Part(entry) if isinstance(entry, str) else Part(**entry) for entry in entries]


def parts_of_run(run: Mapping[str, Any]) -> list[Part]:
    """Return a run's data as `Part`s. --dataset_columns applies to the parts without `columns`."""
    named = new_columns(run["dataset_columns"])
    return [part if part.columns else replace(part, columns=named) for part in parts_of(run["dataset_name"])]


def new_columns(pairs: Sequence[str] | None) -> dict[str, str]:
    """Return {old: new} for pairs `old=new` of column names. Raises `ValueError` for other text."""
    split = [pair.partition("=") for pair in pairs or ()]
    if not all(old and new for old, _, new in split):
        raise ValueError(f"needs pairs old=new, such as question=prompt, got {' '.join(pairs or ())!r}")
    return {old: new for old, _, new in split}


def checked(entries: list[Any]) -> str | list[Any]:
    """Check and return a list for `dataset_name`. A list of one plain name becomes that name.

    Raises `ValueError` for an empty list, an illegal entry, or if only some entries have weights.
    """
    try:
        parts = parts_of(entries)
    except TypeError:
        unknown = [repr(key) for entry in entries if isinstance(entry, Mapping) for key in entry if key not in FIELDS]
        got = ", ".join(unknown) or repr(entries)
        raise ValueError(f"needs names, or entries with keys of {', '.join(FIELDS)}; got {got}") from None
    for part in parts:
        columns = part.columns if isinstance(part.columns, Mapping) else {None: None}
        texts = (part.name, part.split or "-", part.config or "-", *columns, *columns.values())
        if not all(isinstance(text, str) and text for text in texts):
            what = "needs name, split and config as text, and columns as a mapping: {question: prompt}"
            raise ValueError(f"{what}, got {part!r}")
        if part.weight is not None and (type(part.weight) not in (int, float) or not 0 < part.weight < math.inf):
            raise ValueError(f"needs a weight above 0, got {part.weight!r} for {part.name}")
    weighted = [part for part in parts if part.weight is not None]
    if not parts or len(weighted) not in (0, len(parts)):
        raise ValueError("needs at least one part, and weights for all parts or for none")
    return parts[0].name if parts == [Part(parts[0].name)] else entries


def files_of(name: str | None) -> list[Path]:
    """Return the files that a name or pattern stands for; none for a folder or data on the Hub."""
    return [path for path in paths_of(name) if not path.is_dir()]


def paths_of(name: str | None) -> list[Path]:
    """Return the file or folder `name` if it exists. Otherwise return the files of the glob `name`.

    The list is sorted, and empty if this machine has no such file or folder.
    """
    path = os.path.expanduser(name or "")  # noqa: PTH111, Path.expanduser raises for an unknown user
    if os.path.exists(path):  # noqa: PTH110, Path.exists raises for a long name
        return [Path(path)]
    return [Path(match) for match in sorted(glob.glob(path, recursive=True)) if Path(match).is_file()]  # noqa: PTH207


def title(dataset_name: str | Sequence[Any] | None) -> str:
    """Return the first three names of the data and the number of the others, for a message."""
    names = [part.name for part in parts_of(dataset_name)]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
