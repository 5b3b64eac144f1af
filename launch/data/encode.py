"""From rows to tokens and labels: the columns tell how to tokenize them, and what is learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import compress

import pyarrow.compute
from datasets import Dataset, DatasetInfo, Features

from launch.data.batches import IGNORED
from launch.data.chats import encode_chats, require_offsets
from launch.data.formats import (
    ALPACA,
    COMPLETIONS,
    FORMATS,
    Format,
    Rows,
    alpaca_chats,
    by_format,
    for_another_objective,
    formats_of,
    stanford_texts,
)
from recipes.errors import UserError, mistake
from recipes.run import Settings

Encoder = Callable[[Rows], dict[str, list]]
TEXT_TYPES = ("string", "large_string")  # CSV and Parquet files load as the second


# --- Which encoding ------------------------------------------------------------------------------


def formats(run: Settings, columns: list[str]) -> list[Format]:
    """The formats that the rows of a table may have. Those of a classifier's have one."""
    text = run["dataset_text_field"]
    return [(text,)] if run["task"] == "sequence_classification" else formats_of(columns, text)


def encode_rows(rows: pyarrow.Table, features: Features, run: Settings, tokenizer) -> dict[str, list]:
    """The tokens and labels of each row, read in its own format: none for a row without any."""
    known = formats(run, rows.column_names)
    groups = by_format(rows, known[:1]) if known[1:] else []
    if not known[1:] or (groups and len(groups[0][0]) == len(rows)):
        return _encode_alike(rows, features, run, tokenizer)
    encoded: dict[str, list] = {name: [[]] * len(rows) for name in ("input_ids", "labels")}
    for places, columns in by_format(rows, known):
        try:
            found = _encode_alike(rows.take(places).select(columns), features, run, tokenizer)
        except UserError as error:
            some = f", in {len(places):,} of {len(rows):,} rows read together: each is read in its own format"
            raise UserError(*(replace(one, what=one.what + some) for one in error.problems)) from None
        for name, values in found.items():
            for place, value in zip(places, values, strict=True):
                encoded[name][place] = value
    return encoded


def _encode_alike(rows: pyarrow.Table, features: Features, run: Settings, tokenizer) -> dict[str, list]:
    few = in_library(rows, features)
    return encoder(run, tokenizer, few)(few[:])


def in_library(rows: pyarrow.Table, features: Features) -> Dataset:
    info = DatasetInfo(features=Features({name: features[name] for name in rows.column_names}))
    return Dataset(rows, info, fingerprint="a few rows")  # or it computes one


def encoder(run: Settings, tokenizer, rows: Dataset) -> Encoder:
    """How to tokenize this data, recognised by its columns."""
    columns = rows.column_names
    if run["task"] == "sequence_classification":
        return _of_labelled(run, tokenizer, rows)
    if not (known := formats(run, columns)) and (other := for_another_objective(columns)):
        raise other
    if not known or known[0] == (run["dataset_text_field"],):
        return _of_texts(run, tokenizer, rows)
    if known[0] == COMPLETIONS:
        return _of_completions(run, tokenizer, rows)
    if known[0] == ALPACA:
        return _of_alpaca(run, tokenizer, rows)
    if known[0] != ("input_ids",):
        return _of_chats(run, tokenizer, rows, known[0][0])
    for name in ("input_ids", "labels", "attention_mask"):
        if name in columns:
            _require_numbers(rows, name, len(tokenizer))
    return encode_tokenized


def _of_chats(run: Settings, tokenizer, rows: Dataset, column: str) -> Encoder:
    """`column` holds whole chats, or is "completion"."""
    columns = ("prompt", "completion") if column == "completion" else (column,)
    for name in columns:
        _require_messages(rows, name)
    if run["assistant_only_loss"]:
        require_offsets(tokenizer, "assistant_only_loss")
    elif run["completion_only_loss"] and column != "completion":
        raise _no_completions(rows, "data with both columns; for chats --assistant_only_loss without it")
    return _chat_encoder(run, tokenizer, column, filled=any(_may_be_filled(rows, name) for name in columns))


def _chat_encoder(run: Settings, tokenizer, column: str, filled: bool) -> Encoder:
    if not tokenizer.chat_template:
        raise mistake(
            "model_name_or_path",
            f"the tokenizer of {run['model_name_or_path']} has no chat template, and the data is chats",
            "a model for chats (their names often end in -Instruct), or data with a text column",
        )
    only = column == "completion" and run["completion_only_loss"] is not False
    chosen = {"assistant_only": run["assistant_only_loss"], "completion_only": only}
    return partial(encode_chats, tokenizer=tokenizer, column=column, filled=filled, **chosen)


def _of_completions(run: Settings, tokenizer, rows: Dataset) -> Encoder:
    if not _holds_texts(rows, "prompt"):
        return _of_chats(run, tokenizer, rows, "completion")
    _refuse_assistant_only(run, rows)
    require_text(rows, "completion", flag="dataset_name")
    return partial(encode_completions, tokenizer=tokenizer, completion_only=run["completion_only_loss"] is not False)


def _of_alpaca(run: Settings, tokenizer, rows: Dataset) -> Encoder:
    for column in {"instruction", "input", "output"} & set(rows.column_names):
        require_text(rows, column, flag="dataset_name")
    only = run["completion_only_loss"] is not False
    if tokenizer.chat_template:
        encode = _chat_encoder(run, tokenizer, "completion", filled=False)
        return lambda rows: encode(alpaca_chats(rows, only))
    _refuse_assistant_only(run, rows)
    return lambda rows: encode_completions(stanford_texts(rows), tokenizer, only)


def _of_texts(run: Settings, tokenizer, rows: Dataset) -> Encoder:
    _refuse_assistant_only(run, rows)
    if run["completion_only_loss"]:
        raise _no_completions(rows, "data with both columns, or leave it out")
    require_text(rows, run["dataset_text_field"], FORMATS)
    return partial(encode_texts, tokenizer=tokenizer, column=run["dataset_text_field"])


def _of_labelled(run: Settings, tokenizer, rows: Dataset) -> Encoder:
    require_text(rows, run["dataset_text_field"], "a text column")
    require_column(rows, run["dataset_label_field"], "dataset_label_field")
    column, longest = run["dataset_text_field"], run["max_length"]
    return partial(encode_whole_texts, tokenizer=tokenizer, column=column, longest=longest)


def _refuse_assistant_only(run: Settings, rows: Dataset) -> None:
    if run["assistant_only_loss"]:
        raise mistake(
            "assistant_only_loss", f"needs chats; {columns_of(rows)}", "data with a column messages, or leave it out"
        )


def _no_completions(rows: Dataset, fix: str) -> UserError:
    return mistake("completion_only_loss", f"needs the columns prompt and completion; {columns_of(rows)}", fix)


def require_column(rows: Dataset, column: str, flag: str) -> None:
    if column not in rows.column_names:
        raise mistake(flag, f"there is no column {column!r}; {columns_of(rows)}", f"--{flag} with one of them")


def require_text(rows: Dataset, column: str, wanted: str = "", flag: str = "dataset_text_field") -> None:
    if column not in rows.column_names:
        texts = [name for name in rows.column_names if _holds_texts(rows, name)]
        named = f"--{flag} with one of {', '.join(texts)}; or " if texts and flag == "dataset_text_field" else ""
        raise mistake(flag, f"there is no column {column!r}; {columns_of(rows)}", f"{named}data with {wanted}")
    if not _holds_texts(rows, column):
        kind = getattr(rows.features[column], "dtype", "lists")
        held = "no text in some rows, or none at all" if kind in ("lists", "json") else f"{kind}, not text"
        raise mistake(flag, f"the column {column!r} holds {held}", "a text in every row")


def _holds_texts(rows: Dataset, column: str) -> bool:
    return getattr(rows.features[column], "dtype", None) in (*TEXT_TYPES, "null")


def columns_of(rows: Dataset) -> str:
    return "the data has " + ", ".join(rows.column_names)


def _require_messages(rows: Dataset, column: str) -> None:
    """Raises `UserError` unless the rows of a column can be lists of messages."""
    kind = rows.data.column(column).type
    item = kind.value_type if _is_list(kind) else kind
    # An extension type is JSON: other keys in each message. `_render` refuses what is wrong in it.
    fits = isinstance(item, pyarrow.BaseExtensionType) or pyarrow.types.is_null(item)
    if not fits and not (_is_list(kind) and pyarrow.types.is_struct(item)):
        held = "texts" if _holds_texts(rows, column) else kind
        what = f"the column {column!r} holds {held}, not lists of messages"
        raise mistake("dataset_name", what, 'lists of {"role": ..., "content": ...} in every row')


_TOKEN_IDS = "the ids of the model's own tokenizer, whole numbers; or texts, which are tokenized here"


def _may_be_filled(rows: Dataset, column: str) -> bool:
    """Whether messages may have keys with None that nobody wrote: Arrow gives all the same keys.

    `datasets` reads .jsonl with other keys in each message as JSON, which has only what was there.
    """
    return "Json" not in repr(rows.features[column])


def _is_list(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _require_numbers(rows: Dataset, name: str, vocabulary: int) -> None:
    """Raises `UserError` unless a column holds lists of integers that a model can read.

    Those of `labels` may be -100, those of `attention_mask` are not looked at.
    """
    column = rows.data.column(name)
    if pyarrow.types.is_null(column.type):  # no row has any
        return
    try:
        tokens = pyarrow.compute.list_flatten(column)
        if pyarrow.types.is_string(tokens.type):
            raise TypeError("texts")
        limits = pyarrow.compute.min_max(tokens.cast(pyarrow.int64())).as_py()
    except (pyarrow.ArrowException, TypeError):
        what = f"the column {name!r} holds {column.type}, not lists of whole numbers"
        raise mistake("dataset_name", what, _TOKEN_IDS) from None
    if tokens.null_count:
        raise mistake("dataset_name", f"the column {name!r} holds lists with null in them", _TOKEN_IDS)
    smallest, largest = limits["min"], limits["max"]
    if name == "attention_mask" or smallest is None:
        return
    if smallest < 0 and not (name == "labels" and smallest == IGNORED):
        raise mistake("dataset_name", f"has the token id {smallest} in {name}", "token ids from 0; -100 only in labels")
    if largest >= vocabulary:
        raise mistake(
            "dataset_name",
            f"has the token id {largest}, and the tokenizer knows {vocabulary}: it was tokenized for another model",
            "data tokenized with this model's tokenizer, or texts",
        )


# --- Examples to tokens, a row for each row -------------------------------------------------------


def encode_tokenized(rows: Rows) -> dict[str, list]:
    """Token ids are taken as they are, without the padding that the attention mask marks."""
    encoded: dict[str, list] = {"input_ids": [], "labels": []}
    nothing = [None] * len(rows["input_ids"])
    columns = (rows["input_ids"], rows.get("labels", nothing), rows.get("attention_mask", nothing))
    for ids, labels, mask in zip(*columns, strict=True):
        ids = ids or []
        labels = (labels or []) if "labels" in rows else ids
        mask = [1] * len(ids) if mask is None else mask
        for name, values in (("labels", labels), ("values in attention_mask", mask)):
            if len(values) != len(ids):
                what = f"has {len(ids)} input_ids and {len(values)} {name} in one example"
                fix = "one for every token; the label is -100 where there is nothing to learn"
                raise mistake("dataset_name", what, fix)
        encoded["input_ids"].append(list(compress(ids, mask)))
        encoded["labels"].append(list(compress(labels, mask)))
    return encoded


def encode_texts(rows: Rows, tokenizer, column: str) -> dict[str, list]:
    """Every text ends with EOS, so that the model learns to stop. An empty one has no tokens."""
    texts = rows[column]
    ids = _tokenize(tokenizer, [text or "" for text in texts])
    ids = [_ended(row, tokenizer) if text else [] for text, row in zip(texts, ids, strict=True)]
    return {"input_ids": ids, "labels": ids}


def encode_whole_texts(rows: Rows, tokenizer, column: str, longest: int) -> dict[str, list]:
    """For a classifier: the tokenizer itself cuts a long text, so that its closing token stays."""
    texts = rows[column]
    ids = _tokenize(tokenizer, [text or "" for text in texts], truncation=True, max_length=longest)
    return {"input_ids": [row if text else [] for text, row in zip(texts, ids, strict=True)]}


def encode_completions(rows: Rows, tokenizer, completion_only: bool) -> dict[str, list]:
    """Prompt and completion are tokenized separately, as at inference: no token spans both.

    Without a completion there is nothing to learn: the model would learn to stop at once.
    """
    encoded: dict[str, list] = {"input_ids": [], "labels": []}
    prompts = _tokenize(tokenizer, [text or "" for text in rows["prompt"]])
    completions = _tokenize(tokenizer, [text or "" for text in rows["completion"]], add_special_tokens=False)
    for prompt, completion in zip(prompts, completions, strict=True):
        if not completion:
            encoded["input_ids"].append([])
            encoded["labels"].append([])
            continue
        if prompt and prompt[-1] == tokenizer.eos_token_id:
            prompt = prompt[:-1]  # some tokenizers append EOS to every text
        completion = _ended(completion, tokenizer)
        encoded["input_ids"].append(prompt + completion)
        encoded["labels"].append(([IGNORED] * len(prompt) if completion_only else prompt) + completion)
    return encoded


# --- Small steps ---------------------------------------------------------------------------------


def _tokenize(tokenizer, texts: list[str], **options) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(texts, return_attention_mask=False, verbose=False, **options)["input_ids"]


def _ended(ids: list[int], tokenizer) -> list[int]:
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
