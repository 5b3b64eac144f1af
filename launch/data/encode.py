"""From rows to tokens and labels. The columns of public data sets tell the format of each row:
texts, prompts and completions, chats, Alpaca, or token ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain, compress

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset, DatasetInfo, Features

from launch.data.batches import IGNORED
from launch.data.chats import Encoded, Rows, encode_chats
from recipes.errors import UserError, mistake
from recipes.run import Settings

Format = tuple[str, ...]  # the columns that it must have

IDS = ("input_ids",)
CHATS = (("messages",), ("conversations",), ("conversation",))  # OpenAI and TRL; ShareGPT; LMSYS and WildChat
COMPLETIONS = ("prompt", "completion")
ALPACA = ("instruction", "output")  # and perhaps `input`, `system` and `tools`
TEXT_TYPES = ("string", "large_string")  # CSV and Parquet files load as the second

_FORMATS = "messages, conversations, prompt and completion, instruction and output, input_ids or a text column"
_TOKEN_IDS = "the ids of the model's own tokenizer, whole numbers; or texts, which are tokenized here"

# https://github.com/tatsu-lab/stanford_alpaca, train.py: for models without a chat template
_STANFORD = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{context}### Response:"
)
_PAIRED = ", paired with an input that provides further context"


# --- Which format --------------------------------------------------------------------------------


def formats(run: Settings, columns: Collection[str]) -> list[Format]:
    """The formats that rows with these columns may have: each row has the first with a value in it.

    Texts come last, unless another column than the default was named: that one was asked for.
    """
    text = run["dataset_text_field"]
    if run["task"] == "sequence_classification":
        return [(text,)]
    others = [one for one in (IDS, *CHATS, COMPLETIONS, ALPACA) if text not in one]
    ordered = [*others, (text,)] if text == "text" else [(text,), *others]
    return [found for found in ordered if set(found) <= set(columns)]


def is_text(run: Settings, rows: Dataset) -> bool:
    """True if the tokenizer takes the rows as they are: no template is rendered."""
    known = formats(run, rows.column_names)
    return known == [(run["dataset_text_field"],)] or (known == [COMPLETIONS] and _holds_texts(rows, "prompt"))


def described(run: Settings, columns: Collection[str], template: str | None) -> str:
    """Notes for a person on how the columns were read. Empty if nothing was changed."""
    known = formats(run, columns)
    chats = [one for one in known if one in CHATS and one != (run["dataset_text_field"],)]
    instructs = ALPACA in known
    notes = []
    if known[1:]:
        listed = ", ".join(" and ".join(one) for one in known)
        notes.append(f"each row is read by the first of these that it has: {listed}")
    if instructs:
        read_as = "through the chat template" if template else "as Stanford's text: the model has no chat template"
        notes.append(f"instruction and output {read_as}")
    if chats or instructs or COMPLETIONS in known:
        used = {
            "system": template and (chats or instructs),
            "tools": template and "tools" in template,
            "history": False,
        }
        if unused := [name for name, is_used in used.items() if name in columns and not is_used]:
            notes.append(f"not used: {', '.join(unused)}")
        if run["packing"] and run["packing_strategy"] == "wrapped":
            notes.append("sequences begin in the middle of examples: --packing_strategy bfd keeps them whole")
    return "".join(f"; {note}" for note in notes)


def in_library(rows: pyarrow.Table, features: Features) -> Dataset:
    info = DatasetInfo(features=Features({name: features[name] for name in rows.column_names}))
    return Dataset(rows, info, fingerprint="a few rows")  # or it computes one


def encode_rows(rows: pyarrow.Table, features: Features, run: Settings, tokenizer) -> Encoded:
    """The tokens and labels of each row, read in its own format: none for a row without any."""
    known = formats(run, rows.column_names)
    groups = _by_format(rows, known) if known[1:] else []
    if not known[1:] or (groups and len(groups[0][0]) == len(rows)):
        return _encode_alike(in_library(rows, features), known[:1], run, tokenizer)
    ids: list[list[int]] = [[]] * len(rows)
    labels = list(ids)
    for places, one in groups:
        left_out = set(chain(*known)) - set(one)
        columns = [name for name in rows.column_names if name not in left_out]
        try:
            few = in_library(rows.take(places).select(columns), features)
            encoded = _encode_alike(few, [one], run, tokenizer)
        except UserError as error:
            some = f", in {len(places):,} of {len(rows):,} rows read together: each is read in its own format"
            raise UserError(*(replace(one, what=one.what + some) for one in error.problems)) from None
        for place, own_ids, own_labels in zip(places, *encoded, strict=True):
            ids[place], labels[place] = own_ids, own_labels
    return ids, labels


def _by_format(rows: pyarrow.Table, known: Sequence[Format]) -> list[tuple[np.ndarray, Format]]:
    """Of each format the places of its rows. A row that has a value in none is nowhere."""
    found, left = [], np.ones(len(rows), bool)
    for one in known:
        is_one = left & reduce(np.logical_or, (rows[name].is_valid().to_numpy() for name in one))
        left &= ~is_one
        if is_one.any():
            found.append((np.flatnonzero(is_one), one))
    return found


def _encode_alike(rows: Dataset, known: Sequence[Format], run: Settings, tokenizer) -> Encoded:
    """The tokens and labels of rows that have one format, or none: then they lack a text column."""
    one = known[0] if known else (run["dataset_text_field"],)
    if run["task"] == "sequence_classification":
        require_text(rows, one[0], "a text column")
        require_column(rows, run["dataset_label_field"], "dataset_label_field")
        # The tokenizer itself cuts a long text, so that its closing token stays.
        return _encode_texts(rows[one[0]], tokenizer, truncation=True, max_length=run["max_length"])
    if not known:
        _refuse_other_objectives(rows.column_names)
    if one == IDS:
        _require_ids(rows, len(tokenizer))
        return _encode_tokenized(rows[:])
    completion_only = run["completion_only_loss"] is not False
    if one == ALPACA:
        for column in {"instruction", "input", "output"} & set(rows.column_names):
            require_text(rows, column, flag="dataset_name")
        if tokenizer.chat_template:
            chats = _alpaca_chats(rows[:])
            return encode_chats(chats, tokenizer, "completion", run["assistant_only_loss"], completion_only)
    column = "completion" if one == COMPLETIONS else one[0]
    is_chat = one in CHATS and one != (run["dataset_text_field"],)
    if is_chat or (one == COMPLETIONS and not _holds_texts(rows, "prompt")):
        return _encode_chats(rows, column, run, tokenizer, completion_only)
    if run["assistant_only_loss"]:
        raise _unsuited(rows, "assistant_only_loss", "chats", "data with a column messages, or leave it out")
    if one == ALPACA:
        return _encode_completions(_stanford_texts(rows[:]), tokenizer, completion_only)
    if one == COMPLETIONS:
        require_text(rows, "completion", flag="dataset_name")
        return _encode_completions(rows[:], tokenizer, completion_only)
    if run["completion_only_loss"]:
        raise _no_completions(rows, "data with both columns, or leave it out")
    require_text(rows, column, _FORMATS)
    ids, _ = _encode_texts(rows[column], tokenizer)
    # Every text ends with EOS, so that the model learns to stop.
    ids = [_ended(row, tokenizer) if row else [] for row in ids]
    return ids, ids


def _encode_chats(rows: Dataset, column: str, run: Settings, tokenizer, completion_only: bool) -> Encoded:
    """`column` holds whole chats, or is "completion"."""
    follows = column == "completion"
    for name in ("prompt", column) if follows else (column,):
        _require_messages(rows, name)
    if run["completion_only_loss"] and not follows and not run["assistant_only_loss"]:
        raise _no_completions(rows, "data with both columns; for chats --assistant_only_loss without it")
    if not tokenizer.chat_template:
        what = f"the tokenizer of {run['model_name_or_path']} has no chat template, and the data is chats"
        fix = "a model for chats (their names often end in -Instruct), or data with a text column"
        raise mistake("model_name_or_path", what, fix)
    return encode_chats(rows[:], tokenizer, column, run["assistant_only_loss"], follows and completion_only)


# --- One format each -----------------------------------------------------------------------------


def _encode_texts(texts: Sequence[str | None], tokenizer, **options) -> Encoded:
    """An empty text has no tokens."""
    ids = _tokenize(tokenizer, texts, **options)
    ids = [row if text else [] for text, row in zip(texts, ids, strict=True)]
    return ids, ids


def _encode_completions(rows: Rows, tokenizer, completion_only: bool) -> Encoded:
    """Prompt and completion are tokenized separately, as at inference: no token spans both.

    Without a completion there is nothing to learn: the model would learn to stop at once.
    """
    ids: list[list[int]] = []
    labels: list[list[int]] = []
    completions = _tokenize(tokenizer, rows["completion"], add_special_tokens=False)
    for prompt, completion in zip(_tokenize(tokenizer, rows["prompt"]), completions, strict=True):
        if prompt and prompt[-1] == tokenizer.eos_token_id:
            prompt = prompt[:-1]  # some tokenizers append EOS to every text
        ended = _ended(completion, tokenizer)
        ids.append(prompt + ended if completion else [])
        labels.append(([IGNORED] * len(prompt) if completion_only else prompt) + ended if completion else [])
    return ids, labels


def _encode_tokenized(rows: Rows) -> Encoded:
    """Token ids are taken as they are, without the padding that the attention mask marks."""
    found: Encoded = ([], [])
    nothing = [None] * len(rows["input_ids"])
    columns = (rows["input_ids"], rows.get("labels", nothing), rows.get("attention_mask", nothing))
    for ids, labels, mask in zip(*columns, strict=True):
        ids = ids or []
        labels = (labels or []) if "labels" in rows else ids
        mask = [1] * len(ids) if mask is None else mask
        if not len(ids) == len(labels) == len(mask):
            what = f"has {len(ids)} input_ids, {len(labels)} labels and {len(mask)} values in attention_mask in a row"
            raise mistake("dataset_name", what, "one for every token; the label is -100 where nothing is to learn")
        for kept, values in zip(found, (ids, labels), strict=True):
            kept.append(list(compress(values, mask)))
    return found


def _alpaca_chats(rows: Rows) -> Rows:
    """Prompts and completions of messages."""
    given = rows.get("input", [None] * len(rows["output"]))
    tasks = ["\n\n".join(filter(None, both)) for both in zip(rows["instruction"], given, strict=True)]
    context = {name: rows[name] for name in ("system", "tools") if name in rows}
    prompts = [[{"role": "user", "content": task}] for task in tasks]
    return {"prompt": prompts, "completion": [[{"role": "assistant", "content": a}] for a in rows["output"]], **context}


def _stanford_texts(rows: Rows) -> Rows:
    """Prompts and completions of texts."""
    prompts = []
    for task, given in zip(rows["instruction"], rows.get("input", [None] * len(rows["output"])), strict=True):
        context = f"### Input:\n{given}\n\n" if given else ""
        prompts.append(_STANFORD.format(paired=_PAIRED if given else "", instruction=task or "", context=context))
    return {"prompt": prompts, "completion": rows["output"]}


def _tokenize(tokenizer, texts: Sequence[str | None], **options) -> list[list[int]]:
    given = [text or "" for text in texts]
    return tokenizer(given, return_attention_mask=False, verbose=False, **options)["input_ids"] if given else []


def _ended(ids: list[int], tokenizer) -> list[int]:
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


# --- What is refused -----------------------------------------------------------------------------


def _refuse_other_objectives(columns: Collection[str]) -> None:
    if {"chosen", "rejected"} <= set(columns):
        what = "has preference pairs (chosen, rejected), and train.py does not compare answers"
        fix = "TRL's DPOTrainer, with args = fast(args_class=DPOConfig, ...) from `from recipes import fast`"
        raise mistake("dataset_name", what, fix)
    if "prompt" in columns:
        what = "has a prompt and no completion: there is no answer to learn"
        fix = "data with a column completion; or TRL's GRPOTrainer, which learns from answers of the model's own"
        raise mistake("dataset_name", what, fix)


def _unsuited(rows: Dataset, flag: str, needed: str, fix: str) -> UserError:
    return mistake(flag, f"needs {needed}; {_columns_of(rows)}", fix)


def _no_completions(rows: Dataset, fix: str) -> UserError:
    return _unsuited(rows, "completion_only_loss", "the columns prompt and completion", fix)


def require_column(rows: Dataset, column: str, flag: str, fix: str = "") -> None:
    if column not in rows.column_names:
        what = f"there is no column {column!r}; {_columns_of(rows)}"
        raise mistake(flag, what, fix or f"--{flag} with one of them")


def require_text(rows: Dataset, column: str, wanted: str = "", flag: str = "dataset_text_field") -> None:
    texts = ", ".join(name for name in rows.column_names if _holds_texts(rows, name))
    named = f"--{flag} with one of {texts}; or " if texts and flag == "dataset_text_field" else ""
    require_column(rows, column, flag, f"{named}data with {wanted}")
    if not _holds_texts(rows, column):
        kind = getattr(rows.features[column], "dtype", "lists")
        held = "no text in some rows, or none at all" if kind in ("lists", "json") else f"{kind}, not text"
        raise mistake(flag, f"the column {column!r} holds {held}", "a text in every row")


def _holds_texts(rows: Dataset, column: str) -> bool:
    return getattr(rows.features[column], "dtype", None) in (*TEXT_TYPES, "null")


def _columns_of(rows: Dataset) -> str:
    return "the data has " + ", ".join(rows.column_names)


def _require_messages(rows: Dataset, column: str) -> None:
    """Raises `UserError` unless the rows of a column can be lists of messages."""
    kind = rows.data.column(column).type
    types = pyarrow.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    item = kind.value_type if is_list else kind
    # An extension type is JSON: other keys in each message. `_messages_of` refuses what is wrong.
    fits = isinstance(item, pyarrow.BaseExtensionType) or types.is_null(item)
    if not fits and not (is_list and types.is_struct(item)):
        held = "texts" if _holds_texts(rows, column) else kind
        what = f"the column {column!r} holds {held}, not lists of messages"
        raise mistake("dataset_name", what, 'lists of {"role": ..., "content": ...} in every row')


def _require_ids(rows: Dataset, vocabulary: int) -> None:
    """Raises `UserError` unless the columns hold lists of integers that a model can read."""
    for name in {"input_ids", "labels", "attention_mask"} & set(rows.column_names):
        column, types = rows.data.column(name), pyarrow.types
        if types.is_null(column.type):  # no row has any
            continue
        try:
            tokens = pyarrow.compute.list_flatten(column)
            if tokens.null_count or types.is_string(tokens.type):
                raise TypeError
            limits = pyarrow.compute.min_max(tokens.cast(pyarrow.int64())).as_py()
        except (pyarrow.ArrowException, TypeError):
            what = f"the column {name!r} holds {column.type}, not lists of whole numbers, or null in them"
            raise mistake("dataset_name", what, _TOKEN_IDS) from None
        smallest, largest = limits["min"], limits["max"]
        if name == "attention_mask" or smallest is None:
            continue
        if smallest < 0 and (name, smallest) != ("labels", IGNORED):
            what = f"has the token id {smallest} in {name}"
            raise mistake("dataset_name", what, "token ids from 0; -100 only in labels")
        if largest >= vocabulary:
            what = f"has the token id {largest}, and the tokenizer knows {vocabulary}"
            raise mistake("dataset_name", f"{what}: it was tokenized for another model", _TOKEN_IDS)
