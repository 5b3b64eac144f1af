"""Data for a run: found, recognised by its columns, tokenized, and checked before a single step is taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, ReadInstruction, Value
from transformers import DataCollatorWithFlattening

from launch.training.batches import (
    Encoder,
    Pad,
    encode_and_cut,
    encode_chat_completions,
    encode_chats,
    encode_classified,
    encode_completions,
    encode_texts,
    encode_tokenized,
    pack,
    stack,
)
from launch.training.demo import demo_corpus, held_out
from recipes import __version__
from recipes.errors import UserError, mistake

FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
TEXT_TYPES = ("string", "large_string")  # CSV and Parquet files load as the second
TOKENIZED = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
CLASSIFIED = Features({"input_ids": List(Value("int32")), "labels": Value("int64")})


@dataclass
class Data:
    """What Trainer needs, and what a person is told about it. `labels` are class names, for classification."""

    train: Dataset
    eval: Dataset | None
    collator: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]
    description: str
    labels: list[str] | None


def load_data(run: Mapping[str, Any], tokenizer, max_positions: int | None = None, classes: Sequence[str] = ()) -> Data:
    """The run's data, ready to train on. Raises `UserError` for anything the user can mend.

    `classes` are those the model knows already, in its order.
    """
    require_fitting_length(run, max_positions)
    with _local_main_first() if run["dataset_name"] else nullcontext():  # the demonstration is in memory
        train, evaluation = _raw_splits(run)
        if run["task"] == "sequence_classification":
            return _classification(run, tokenizer, train, evaluation, classes)
        return _causal_lm(run, tokenizer, train, evaluation)


def require_fitting_length(run: Mapping[str, Any], max_positions: int | None) -> None:
    if max_positions and run["max_length"] > max_positions:
        raise mistake(
            "max_length",
            f"{run['max_length']} tokens are more than the {max_positions} positions the model has",
            f"--max_length {max_positions} or less",
        )


def repeated_longest(rows: Dataset, count: int) -> Dataset:
    """The longest example of the data, `count` times: what takes the most memory."""
    return rows.select([int(_lengths(rows).argmax())] * count)


def compute_accuracy(prediction) -> dict[str, float]:
    """For `Trainer(compute_metrics=...)`. Some models return more than the logits, which come first."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((np.argmax(logits, axis=-1) == prediction.label_ids).mean())}


@contextmanager
def _local_main_first() -> Iterator[None]:
    """Rank 0 of each node fills the cache, then the others read it. Its mistakes release the others as well."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        yield
        return
    from accelerate import PartialState

    state = PartialState()
    if not state.is_local_main_process:
        state.wait_for_everyone()
    try:
        yield
    finally:
        if state.is_local_main_process:
            state.wait_for_everyone()


# --- Finding it ------------------------------------------------------------------------------------------------------


def _raw_splits(run: Mapping[str, Any]) -> tuple[Dataset, Dataset | None]:
    evaluates = run["eval_strategy"] != "no"
    splits = _read(run) if run["dataset_name"] else _demo_splits(evaluates)
    train = _take(splits, "dataset_train_split", run["dataset_train_split"])
    if not evaluates:
        return train, None
    wanted = run["dataset_test_split"] or next((name for name in ("test", "validation") if name in splits), None)
    if wanted is None:
        raise mistake(
            "dataset_test_split",
            f"there is nothing to evaluate on: the data has {_listed(splits)}, no test and no validation",
            "--dataset_test_split 'train[95%:]' --dataset_train_split 'train[:95%]', or --eval_strategy no",
        )
    return train, _take(splits, "dataset_test_split", wanted)


def _demo_splits(evaluates: bool) -> dict[str, Dataset]:
    texts = demo_corpus()
    parts = dict(zip(("train", "test"), held_out(texts), strict=True)) if evaluates else {"train": texts}
    return {name: Dataset.from_dict({"text": part}) for name, part in parts.items()}


def _take(splits: Mapping[str, Dataset], flag: str, wanted: str) -> Dataset:
    """The rows of `train`, `train[:95%]` or `train[:10]+test`: the same for files, folders and the Hub."""
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


def _read(run: Mapping[str, Any]) -> dict[str, Dataset]:
    """All splits of a local file, a local folder or a data set on the Hub, in this order."""
    name = run["dataset_name"]
    path = Path(name).expanduser()
    if path.is_file():
        _require_no_config(run, path)
        return _read_file(path)
    if path.is_dir():
        return _read_folder(path, run["dataset_config"])
    if name.startswith((".", "/", "~")) or path.suffix.lower() in FILE_KINDS:
        raise mistake("dataset_name", f"there is no file or folder {name}", "the path of one that exists")
    return _read_hub(name, run["dataset_config"])


def _require_no_config(run: Mapping[str, Any], path: Path) -> None:
    if run["dataset_config"]:
        raise mistake("dataset_config", f"{run['dataset_config']} is not in {path}, a single file", "leave it out")


def _read_file(path: Path) -> dict[str, Dataset]:
    kind = FILE_KINDS.get(path.suffix.lower())
    if kind is None:
        raise mistake("dataset_name", f"{path} is of no known kind", "a file ending in " + ", ".join(FILE_KINDS))
    if not path.stat().st_size:
        raise mistake("dataset_name", f"{path} is empty", "a file with rows in it")
    try:
        return dict(datasets.load_dataset(kind, data_files=str(path)))
    except Exception as error:  # parsers raise what they like: all of it is about this file
        reason = _first_bad_json_line(path) if path.suffix == ".jsonl" else None
        raise mistake(
            "dataset_name", f"{path} cannot be read as {kind}: {reason or _cause(error)}", "mend the file"
        ) from None


def _first_bad_json_line(path: Path) -> str | None:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip():
                    json.loads(line)
            except ValueError as error:
                return f"line {number}: {error}"
    return None


def _read_folder(path: Path, config: str | None) -> dict[str, Dataset]:
    saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    try:
        found = datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path), config)
    except Exception as error:
        raise mistake(
            "dataset_name",
            f"the folder {path} cannot be read: {_cause(error)}",
            "a folder that save_to_disk wrote, or one of " + ", ".join(FILE_KINDS) + " files",
        ) from None
    return dict(found) if isinstance(found, DatasetDict) else {"train": found}


def _read_hub(name: str, config: str | None) -> dict[str, Dataset]:
    try:
        return dict(datasets.load_dataset(name, config))
    except ValueError as error:  # no such configuration, or one must be chosen: the library lists them
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


# --- Language models -------------------------------------------------------------------------------------------------


def _causal_lm(run: Mapping[str, Any], tokenizer, train: Dataset, evaluation: Dataset | None) -> Data:
    ready, left_out = _token_rows(run, tokenizer, train, "dataset_train_split")
    ready_evaluation = None
    if evaluation is not None:
        ready_evaluation, _ = _token_rows(run, tokenizer, evaluation, "dataset_test_split")
    tools = "; the column tools is not used" if {"messages", "tools"} <= set(train.column_names) else ""
    return Data(
        train=ready,
        eval=ready_evaluation,
        collator=_collator(run, tokenizer),
        description=_describe(run, _lengths(ready), left_out) + tools,
        labels=None,
    )


def _collator(run: Mapping[str, Any], tokenizer) -> Callable:
    if run["packing"]:
        return stack
    if run["padding_free"]:
        return DataCollatorWithFlattening()
    return _padding(run, tokenizer)


def _padding(run: Mapping[str, Any], tokenizer) -> Pad:
    return Pad(tokenizer.pad_token_id or 0, run["max_length"])  # what is padded is masked, so any token will do


def _token_rows(run: Mapping[str, Any], tokenizer, rows: Dataset, flag: str) -> tuple[Dataset, int]:
    """Rows of `input_ids` and `labels`, and how many examples were left out because they teach nothing."""
    encode = _encoder(run, tokenizer, rows)
    longest = None if run["packing"] else run["max_length"]
    examples = rows.map(
        partial(encode_and_cut, encode=encode, longest=longest, version=__version__),
        batched=True,
        remove_columns=rows.column_names,
        features=TOKENIZED,
        desc="Tokenizing",
    )
    if not len(examples):
        raise _nothing_to_learn(run, flag)
    left_out = len(rows) - len(examples)
    return (_packed(run, examples, flag), left_out) if run["packing"] else (examples, left_out)


def _packed(run: Mapping[str, Any], examples: Dataset, flag: str) -> Dataset:
    packed = pack(examples, run["max_length"])
    if len(packed):
        return packed
    total = int(_lengths(examples).sum())
    if total >= run["max_length"]:
        raise _nothing_to_learn(run, flag)
    raise mistake(
        "max_length",
        f"the data of --{flag} has {total:,} tokens, too few for one packed sequence of {run['max_length']:,}",
        f"--max_length {total} or less, or --packing false",
    )


def _nothing_to_learn(run: Mapping[str, Any], flag: str) -> UserError:
    return mistake(
        flag,
        f"no example has anything to learn within {run['max_length']:,} tokens: "
        "all labels are masked, and the loss would be nan",
        "texts, completions or assistant messages that are not empty, or a larger --max_length",
    )


def _encoder(run: Mapping[str, Any], tokenizer, rows: Dataset) -> Encoder:
    """How to tokenize this data, recognised by its columns."""
    columns = set(rows.column_names)
    if "input_ids" in columns:
        _require_known_tokens(rows, tokenizer)
        return encode_tokenized
    if "messages" in columns:
        if getattr(rows.features["messages"], "dtype", None) in TEXT_TYPES:
            what = "the column 'messages' holds texts, not lists of messages"
            raise mistake("dataset_name", what, 'lists of {"role": ..., "content": ...}')
        _require_chat_template(tokenizer, run)
        if run["assistant_only_loss"]:
            _require_offsets(tokenizer, "assistant_only_loss")
        return partial(encode_chats, tokenizer=tokenizer, assistant_only=run["assistant_only_loss"])
    if run["assistant_only_loss"]:
        raise mistake(
            "assistant_only_loss", f"needs chats; {_has_columns(rows)}", "data with a column messages, or leave it out"
        )
    if {"prompt", "completion"} <= columns:
        completion_only = run["completion_only_loss"] is not False
        if getattr(rows.features["prompt"], "dtype", None) in TEXT_TYPES:
            return partial(encode_completions, tokenizer=tokenizer, completion_only=completion_only)
        _require_chat_template(tokenizer, run)
        _require_offsets(tokenizer, "dataset_name")
        return partial(encode_chat_completions, tokenizer=tokenizer, completion_only=completion_only)
    if run["completion_only_loss"]:
        raise mistake(
            "completion_only_loss",
            f"needs the columns prompt and completion; {_has_columns(rows)}",
            "data with both columns, or leave it out",
        )
    _require_text(rows, run["dataset_text_field"], "messages, prompt and completion, input_ids or a text column")
    return partial(encode_texts, tokenizer=tokenizer, column=run["dataset_text_field"])


# --- Classification --------------------------------------------------------------------------------------------------


def _classification(
    run: Mapping[str, Any], tokenizer, train: Dataset, evaluation: Dataset | None, classes: Sequence[str]
) -> Data:
    if not run["dataset_name"]:
        raise mistake("dataset_name", "is missing: classification needs labelled texts", "--dataset_name FILE_OR_ID")
    names = _class_names(train, run["dataset_label_field"])
    as_text = train.features[run["dataset_label_field"]].dtype in TEXT_TYPES
    in_order = _in_models_order(names, classes)
    numbers = {name if as_text else number: in_order.index(name) for number, name in enumerate(names)}
    ready = _classified_rows(run, tokenizer, train, numbers, "dataset_train_split")
    ready_evaluation = None
    if evaluation is not None:
        ready_evaluation = _classified_rows(run, tokenizer, evaluation, numbers, "dataset_test_split")
    lengths = _lengths(ready)
    return Data(
        train=ready,
        eval=ready_evaluation,
        collator=_padding(run, tokenizer),
        description=f"{_describe(run, lengths, len(train) - len(ready))}, {len(names)} classes",
        labels=in_order,
    )


def _in_models_order(names: list[str], classes: Sequence[str]) -> list[str]:
    """The names as a model that was trained on the same classes numbers them; else as they are."""
    order = [name.lower() for name in classes]
    if len(names) != len(order) or {name.lower() for name in names} != set(order):
        return names
    return sorted(names, key=lambda name: order.index(name.lower()))


def _class_names(rows: Dataset, field: str) -> list[str]:
    """Names of the classes by number. Numbers stay as they are; texts are numbered in alphabetical order."""
    _require_column(rows, field, "dataset_label_field")
    if isinstance(rows.features[field], ClassLabel):
        return list(rows.features[field].names)
    values = rows.unique(field)
    if all(isinstance(value, str) for value in values):
        names = sorted(values)
    elif all(isinstance(value, int) and value >= 0 for value in values):
        names = [str(number) for number in range(max(values) + 1)]
        if len(names) > 10 * len(values):
            raise mistake(
                "dataset_label_field",
                f"the numbers in {field!r} go up to {max(values)}, and there are {len(values)} of them",
                "classes numbered from 0 without gaps, or as texts",
            )
    else:
        shown = ", ".join(repr(value) for value in values[:5])
        raise mistake(
            "dataset_label_field",
            f"the column {field!r} holds {shown}: a class is a text or a number from 0",
            "a label for every row, as text or as a number from 0",
        )
    if len(names) < 2:
        raise mistake("dataset_label_field", f"all rows have the label {names[0]!r}", "data with two classes or more")
    return names


def _classified_rows(
    run: Mapping[str, Any], tokenizer, rows: Dataset, numbers: Mapping[Any, int], flag: str
) -> Dataset:
    _require_text(rows, run["dataset_text_field"], "a text column")
    field = run["dataset_label_field"]
    if field not in rows.column_names:
        raise mistake(flag, f"has no column {field!r}; {_has_columns(rows)}", "rows with labels")
    unknown = [value for value in rows.unique(field) if value not in numbers]
    if unknown:
        shown = ", ".join(repr(value) for value in unknown[:5])
        raise mistake(
            flag, f"has labels that are not among the classes: {shown}", "rows whose labels the training data has too"
        )
    encode = partial(
        encode_classified,
        tokenizer=tokenizer,
        columns=(run["dataset_text_field"], field),
        numbers=numbers,
        longest=run["max_length"],
        version=__version__,
    )
    examples = rows.map(encode, batched=True, remove_columns=rows.column_names, features=CLASSIFIED, desc="Tokenizing")
    if not len(examples):
        raise mistake(flag, f"all texts in the column {run['dataset_text_field']!r} are empty", "texts to classify")
    return examples


# --- Checks and figures ----------------------------------------------------------------------------------------------


def _require_column(rows: Dataset, column: str, flag: str) -> None:
    if column not in rows.column_names:
        raise mistake(flag, f"there is no column {column!r}; {_has_columns(rows)}", f"--{flag} with one of them")


def _require_text(rows: Dataset, column: str, wanted: str) -> None:
    if column not in rows.column_names:
        raise mistake(
            "dataset_text_field",
            f"there is no column {column!r}; {_has_columns(rows)}",
            f"--dataset_text_field with one of them; understood are {wanted}",
        )
    kind = getattr(rows.features[column], "dtype", "lists")
    if kind not in (*TEXT_TYPES, "null"):
        held = "no text in some rows, or none at all" if kind == "lists" else f"{kind}, not text"
        raise mistake("dataset_text_field", f"the column {column!r} holds {held}", "a text in every row")


def _has_columns(rows: Dataset) -> str:
    return "the data has " + ", ".join(rows.column_names)


def _require_known_tokens(rows: Dataset, tokenizer) -> None:
    column = rows.data.column("input_ids")
    tokens = pyarrow.compute.list_flatten(column)
    largest, smallest = pyarrow.compute.max(tokens).as_py(), pyarrow.compute.min(tokens).as_py()
    if smallest is not None and smallest < 0:
        raise mistake("dataset_name", f"has the token id {smallest}", "token ids from 0; -100 belongs into labels")
    if largest is not None and largest >= len(tokenizer):
        raise mistake(
            "dataset_name",
            f"has the token id {largest}, and the tokenizer knows {len(tokenizer)}: it was tokenized for another model",
            "data tokenized with this model's tokenizer, or texts",
        )


def _require_chat_template(tokenizer, run: Mapping[str, Any]) -> None:
    if not tokenizer.chat_template:
        raise mistake(
            "model_name_or_path",
            f"the tokenizer of {run['model_name_or_path']} has no chat template, and the data is chats",
            "a model for chats (their names often end in -Instruct), or data with a text column",
        )


def _require_offsets(tokenizer, flag: str) -> None:
    if not tokenizer.is_fast:
        raise mistake(
            flag, "needs a fast tokenizer, to know which characters a token holds", "a model that has a tokenizer.json"
        )


def _lengths(examples: Dataset) -> np.ndarray:
    chunks = examples.with_format("arrow")[:]["input_ids"].chunks
    return np.concatenate([chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks])


def _describe(run: Mapping[str, Any], lengths: np.ndarray, left_out: int) -> str:
    name = run["dataset_name"] or "stdlib source"
    if run["packing"] and run["task"] == "causal_lm":
        text = f"{name}, {len(lengths):,} sequences of {run['max_length']:,} tokens"
    else:
        text = f"{name}, {len(lengths):,} examples of {lengths.mean():,.0f} tokens, the longest {lengths.max():,}"
    return text + (f", {left_out:,} left out: nothing to learn in them" if left_out else "")
