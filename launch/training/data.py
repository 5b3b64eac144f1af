"""Data for a run: read, tokenized by its columns, and checked before a single step is taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers import DataCollatorWithFlattening

from launch.training.batches import Example, Pad, pack, stack
from launch.training.encode import (
    TEXT_TYPES,
    columns_of,
    encode_and_cut,
    encode_classified,
    encoder,
    require_column,
    require_text,
)
from launch.training.sources import not_utf8, read_splits, unread_files
from recipes import __version__
from recipes.errors import UserError, mistake
from recipes.run import RunSpec, Settings

TOKENIZED = Features({"input_ids": List(Value("int32")), "labels": List(Value("int32"))})
CLASSIFIED = Features({"input_ids": List(Value("int32")), "labels": Value("int64")})


@dataclass
class Data:
    """What Trainer needs, and a description for a person.

    `labels` are class names, None for language models. `commit` is the Hub's, of data from there;
    None if unknown.
    """

    train: Dataset
    eval: Dataset | None
    collator: Callable[[list[Example]], dict[str, torch.Tensor]]
    description: str
    labels: list[str] | None
    commit: str | None = None

    def steps(self, run: RunSpec) -> int:
        """Optimizer steps of the whole run, at least: a last batch that is not full may count."""
        if run["max_steps"] > 0:
            return run["max_steps"]
        return max(1, int(len(self.train) // run.batch.total * run["num_train_epochs"]))


def load_data(run: Settings, tokenizer, classes: Sequence[str] = ()) -> Data:
    """The run's data, ready to train on. Raises `UserError` for anything the user can correct.

    `classes` are the names that the model was trained to tell apart, in its order.
    """
    # The demonstration's data is in memory, so no cache is shared.
    with _local_main_first() if run["dataset_name"] else nullcontext():
        try:
            train, evaluation = read_splits(run)
            if run["task"] == "sequence_classification":
                data = _classification(run, tokenizer, train, evaluation, classes)
            else:
                data = _causal_lm(run, tokenizer, train, evaluation)
        except UnicodeDecodeError as error:  # pyarrow's JSON reader does not look at bytes: only a use of the text does
            raise not_utf8(run["dataset_name"], error) from None
    data.description += unread_files(run, train)
    return replace(data, commit=hub_commit(train))


def hub_commit(rows: Dataset) -> str | None:
    """The commit of data from the Hub. `datasets` names a folder of its cache after it
    (load.py, `HubDatasetModuleFactory`: the builder's hash). None for any other data.
    """
    names = (part for file in rows.cache_files for part in Path(file["filename"]).parts)
    return next((name for name in names if re.fullmatch(r"[0-9a-f]{40}", name)), None)


def repeated_longest(rows: Dataset, count: int) -> Dataset:
    """The longest example of the data, `count` times: it takes the most memory."""
    return rows.select([int(_lengths(rows).argmax())] * count)


def compute_accuracy(prediction) -> dict[str, float]:
    """For `Trainer(compute_metrics=...)`. If a model returns more than logits, they come first.

    With `--eval_do_concat_batches false` both are lists, of an entry for each batch.
    """
    separate = isinstance(prediction.predictions, list)
    given = prediction.predictions if separate else [prediction.predictions]
    labels = prediction.label_ids if separate else [prediction.label_ids]
    logits = [batch[0] if isinstance(batch, tuple) else batch for batch in given]
    return {"accuracy": float((np.argmax(np.concatenate(logits), axis=-1) == np.concatenate(labels)).mean())}


@contextmanager
def _local_main_first() -> Iterator[None]:
    """The first rank of each node fills the cache, then the others read it.

    They are released if it fails, too.
    """
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


# --- Language models -----------------------------------------------------------------------------


def _causal_lm(run: Settings, tokenizer, train: Dataset, evaluation: Dataset | None) -> Data:
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


def _collator(run: Settings, tokenizer) -> Callable:
    if run["packing"]:
        return stack
    if run["padding_free"]:
        return DataCollatorWithFlattening()
    return _padding(run, tokenizer)


def _padding(run: Settings, tokenizer) -> Pad:
    # Padding is masked, so any token works.
    return Pad(tokenizer.pad_token_id or 0, run["max_length"])


def _token_rows(run: Settings, tokenizer, rows: Dataset, flag: str) -> tuple[Dataset, int]:
    """Rows of `input_ids` and `labels`, and how many examples were left out: they have no label."""
    encode = encoder(run, tokenizer, rows)
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


def _packed(run: Settings, examples: Dataset, flag: str) -> Dataset:
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


def _nothing_to_learn(run: Settings, flag: str) -> UserError:
    return mistake(
        flag,
        f"no example has anything to learn within {run['max_length']:,} tokens: "
        "all labels are masked, and the loss would be nan",
        "texts, completions or assistant messages that are not empty, or a larger --max_length",
    )


# --- Classification ------------------------------------------------------------------------------


def _classification(
    run: Settings, tokenizer, train: Dataset, evaluation: Dataset | None, classes: Sequence[str]
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
    """The names in the order of a model that was trained on the same classes, or else as given."""
    order = [name.lower() for name in classes]
    if len(names) != len(order) or {name.lower() for name in names} != set(order):
        return names
    return sorted(names, key=lambda name: order.index(name.lower()))


def _class_names(rows: Dataset, field: str) -> list[str]:
    """Names of the classes by number.

    Numbers stay as they are; texts are numbered in alphabetical order.
    """
    require_column(rows, field, "dataset_label_field")
    if isinstance(rows.features[field], ClassLabel):
        return list(rows.features[field].names)
    if not isinstance(rows.features[field], Value):
        raise _no_class(field, "lists, or numbers and texts mixed")
    values = rows.unique(field)
    if all(isinstance(value, str) for value in values):
        names = sorted(values)
    elif all(isinstance(value, int) and value >= 0 for value in values):
        if max(values) >= 10 * len(values):
            raise mistake(
                "dataset_label_field",
                f"the numbers in {field!r} go up to {max(values)}, and there are {len(values)} of them",
                "classes numbered from 0 without gaps, or as texts",
            )
        names = [str(number) for number in range(max(values) + 1)]
    else:
        raise _no_class(field, ", ".join(repr(value) for value in values[:5]))
    if len(names) < 2:
        raise mistake("dataset_label_field", f"all rows have the label {names[0]!r}", "data with two classes or more")
    return names


def _no_class(field: str, held: str) -> UserError:
    return mistake(
        "dataset_label_field",
        f"the column {field!r} holds {held}: a class is a text or an integer from 0",
        "a label for every row, as a text or an integer from 0",
    )


def _classified_rows(run: Settings, tokenizer, rows: Dataset, numbers: Mapping[str | int, int], flag: str) -> Dataset:
    require_text(rows, run["dataset_text_field"], "a text column")
    field = run["dataset_label_field"]
    if field not in rows.column_names:
        raise mistake(flag, f"has no column {field!r}; {columns_of(rows)}", "rows with labels")
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


# --- Figures -------------------------------------------------------------------------------------


def _lengths(examples: Dataset) -> np.ndarray:
    chunks = examples.with_format("arrow")[:]["input_ids"].chunks
    return np.concatenate([chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks])


def _describe(run: Settings, lengths: np.ndarray, left_out: int) -> str:
    name = run["dataset_name"] or "stdlib source"
    if run["packing"] and run["task"] == "causal_lm":
        text = f"{name}, {len(lengths):,} sequences of {run['max_length']:,} tokens"
    else:
        text = f"{name}, {len(lengths):,} examples of {lengths.mean():,.0f} tokens, the longest {lengths.max():,}"
    return text + (f", {left_out:,} left out: nothing to learn in them" if left_out else "")
