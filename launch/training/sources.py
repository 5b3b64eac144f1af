"""Reading data: a file, a folder, the Hub or the demonstration, as rows not yet tokenized."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow.json
from datasets import Dataset, DatasetDict, ReadInstruction
from datasets.packaged_modules.json import json as json_reader

from launch.training.demo import demo_corpus, held_out
from recipes.errors import UserError, mistake
from recipes.rules.data import FILE_KINDS, nothing_to_evaluate_on
from recipes.run import Settings
from recipes.run.engine import expanded
from recipes.run.local_model import existing_path


def read_splits(run: Settings) -> tuple[Dataset, Dataset | None]:
    """The rows to train on and to evaluate on (None if the run does not evaluate).

    Raises `UserError` if there is nothing to read, or no such split.
    """
    evaluates = run["eval_strategy"] != "no"
    splits = _read(run) if run["dataset_name"] else _demo_splits(evaluates)
    train = _take(splits, "dataset_train_split", run["dataset_train_split"])
    if not evaluates:
        return train, None
    wanted = run["dataset_test_split"] or next((name for name in ("test", "validation") if name in splits), None)
    if wanted is None:
        raise UserError(nothing_to_evaluate_on(f"the data has {_listed(splits)}"))
    return train, _take(splits, "dataset_test_split", wanted)


def _demo_splits(evaluates: bool) -> dict[str, Dataset]:
    texts = demo_corpus()
    parts = dict(zip(("train", "test"), held_out(texts), strict=True)) if evaluates else {"train": texts}
    return {name: Dataset.from_dict({"text": part}) for name, part in parts.items()}


def _take(splits: Mapping[str, Dataset], flag: str, wanted: str) -> Dataset:
    """The rows of `train`, `train[:95%]` or `train[:10]+test`, from whatever source."""
    try:
        parts = ReadInstruction.from_spec(wanted).to_absolute({name: len(split) for name, split in splits.items()})
    except (ValueError, AssertionError):
        raise mistake(
            flag, f"there is no split {wanted!r}; the data has {_listed(splits)}", "name one of them, or a slice of one"
        ) from None
    taken = [splits[part.splitname].select(range(part.from_, part.to) or []) for part in parts]
    rows = taken[0] if len(taken) == 1 else datasets.concatenate_datasets(taken)
    if not len(rows):
        raise mistake(flag, f"the split {wanted!r} is empty", f"a split with rows in it: {_listed(splits)}")
    return rows


def _listed(splits: Mapping[str, Dataset]) -> str:
    return ", ".join(f"{name} ({len(split):,} rows)" for name, split in splits.items())


def _read(run: Settings) -> dict[str, Dataset]:
    """All splits of a local file, a local folder or a data set on the Hub, in this order."""
    path = existing_path(run["dataset_name"])
    with _null_is_a_row():
        if path is None:
            return _read_hub(run["dataset_name"], run["dataset_config"])
        return _read_folder(path, run["dataset_config"]) if path.is_dir() else _read_file(path)


def _read_file(path: Path) -> dict[str, Dataset]:
    kind = FILE_KINDS[path.suffix.lower()]
    try:
        # Absolute and escaped: the library takes brackets for a pattern, `http:` for an address.
        return dict(datasets.load_dataset(kind, data_files=glob.escape(str(path.absolute()))))
    except Exception as error:  # parsers raise anything, and always about this file
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    """What is wrong with a file or folder of data, whose reader has raised `error`."""
    if "::" in str(path.absolute()):
        what = f"{path} cannot be read: the library datasets takes :: for a way into an archive"
        return mistake("dataset_name", what, "another name")
    if path.is_dir():
        what = f"the folder {path} cannot be read: {_cause(error)}"
        if glob.escape(str(path.absolute())) != str(path.absolute()):
            return mistake(
                "dataset_name", f"{what}: the library datasets takes [, ], * and ? for a pattern", "rename it"
            )
        return mistake(
            "dataset_name", what, "a folder that save_to_disk wrote, or one of " + ", ".join(FILE_KINDS) + " files"
        )
    kind, bad_line = FILE_KINDS[path.suffix.lower()], _first_bad_line(path)
    fix = f"iconv -f LATIN1 -t UTF-8 {path}, if it is that" if "UTF-8" in bad_line else "correct the file"
    return mistake("dataset_name", f"{path} cannot be read as {kind}: {bad_line or _cause(error)}", fix)


def not_utf8(name: str, error: UnicodeDecodeError) -> UserError:
    """What is wrong with data whose bytes turn out not to be UTF-8 where a text is used."""
    path = existing_path(name)
    if path and path.is_file():
        return _unreadable(path, error)
    return mistake("dataset_name", f"{name} holds bytes that are not UTF-8: {error}", "its files, saved as UTF-8")


def _first_bad_line(path: Path) -> str:
    """The first line that is not UTF-8, or in a .jsonl not JSON. Empty for any other file."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return ""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig")
                if suffix == ".jsonl" and text.strip():
                    json.loads(text)
            except UnicodeDecodeError:
                return f"line {number} is not UTF-8"
            except RecursionError:
                return f"line {number} is nested too deeply"
            except ValueError as error:
                return f"line {number}: {error}"
    return ""


@contextlib.contextmanager
def _null_is_a_row() -> Iterator[None]:
    """pyarrow dies with a segmentation fault of a block of JSON lines that begins with `null`.

    `{}` is the same row, without a value in any column.
    """

    def read_json(stream: io.BytesIO, **options) -> pyarrow.Table:
        # With a line break before it, the search takes a tenth of the time that parsing takes.
        lines = re.sub(rb"\n[ \t]*null[ \t\r]*(?=\n|$)", b"\n{}", b"\n" + stream.getvalue())[1:]
        return pyarrow.json.read_json(io.BytesIO(lines), **options)

    json_reader.paj = SimpleNamespace(read_json=read_json, ReadOptions=pyarrow.json.ReadOptions)
    try:
        yield
    finally:
        json_reader.paj = pyarrow.json


def _read_folder(path: Path, config: str | None) -> dict[str, Dataset]:
    saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    try:
        loaded = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path), config)
    except Exception as error:
        raise _unreadable(path, error) from None
    return dict(loaded) if isinstance(loaded, DatasetDict) else {"train": loaded}


def unread_files(run: Settings, rows: Dataset) -> str:
    """A note on a folder's data files that were left out: the library reads those of one kind only.

    `rows` are what it has read. Empty if it has read all.
    """
    folder = expanded(run["dataset_name"] or "no folder")
    if not folder.is_dir() or (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return ""
    kind = rows.info.builder_name
    others = [path for path in folder.rglob("*") if FILE_KINDS.get(path.suffix.lower(), kind) != kind]
    names = sorted(path.name for path in others if not path.name.startswith((".", "_")))
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return f"; not read, since most files are {kind}: {names[0]}{more}" if names else ""


def _read_hub(name: str, config: str | None) -> dict[str, Dataset]:
    try:
        return dict(datasets.load_dataset(name, config))
    # No such configuration, or one must be chosen: the library lists them.
    except ValueError as error:
        if "config" in str(error).lower():
            raise mistake("dataset_config", _cause(error), "--dataset_config with one of them") from None
        raise _not_on_hub(name, error) from None
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise _not_on_hub(name, error) from None


def _not_on_hub(name: str, error: Exception) -> UserError:
    return mistake(
        "dataset_name",
        f"{name!r} is neither a local file or folder nor a data set that can be read from the Hub: {_cause(error)}",
        "check the spelling, the network and `hf auth login`; a local path is found from the current folder",
    )


def _cause(error: BaseException) -> str:
    """The innermost explicit cause, cut to one short line."""
    while error.__cause__:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
