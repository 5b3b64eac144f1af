"""From rows to tokens and labels: the columns tell how to tokenize them, and what is learned."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pyarrow.compute
from datasets import Dataset
from jinja2 import TemplateError

from launch.training.batches import IGNORED
from recipes.errors import UserError, mistake
from recipes.run import Settings

Rows = Mapping[str, list]
Encoder = Callable[[Rows], dict[str, list]]
TEXT_TYPES = ("string", "large_string")  # CSV and Parquet files load as the second


# --- Which encoding ------------------------------------------------------------------------------


def encoder(run: Settings, tokenizer, rows: Dataset) -> Encoder:
    """How to tokenize this data, recognised by its columns."""
    columns = set(rows.column_names)
    if "input_ids" in columns:
        for name in ("input_ids", "labels", "attention_mask"):
            if name in columns:
                _require_numbers(rows, name, len(tokenizer))
        return encode_tokenized
    if "messages" in columns:
        _require_messages(rows, "messages")
        _require_chat_template(tokenizer, run)
        if run["assistant_only_loss"]:
            _require_offsets(tokenizer, "assistant_only_loss")
        return partial(encode_chats, tokenizer=tokenizer, assistant_only=run["assistant_only_loss"])
    if run["assistant_only_loss"]:
        raise mistake(
            "assistant_only_loss", f"needs chats; {columns_of(rows)}", "data with a column messages, or leave it out"
        )
    if {"prompt", "completion"} <= columns:
        completion_only = run["completion_only_loss"] is not False
        if _holds_texts(rows, "prompt"):
            require_text(rows, "completion", flag="dataset_name")
            return partial(encode_completions, tokenizer=tokenizer, completion_only=completion_only)
        _require_messages(rows, "prompt")
        _require_messages(rows, "completion")
        _require_chat_template(tokenizer, run)
        _require_offsets(tokenizer, "dataset_name")
        return partial(encode_chat_completions, tokenizer=tokenizer, completion_only=completion_only)
    if run["completion_only_loss"]:
        raise mistake(
            "completion_only_loss",
            f"needs the columns prompt and completion; {columns_of(rows)}",
            "data with both columns, or leave it out",
        )
    require_text(rows, run["dataset_text_field"], "messages, prompt and completion, input_ids or a text column")
    return partial(encode_texts, tokenizer=tokenizer, column=run["dataset_text_field"])


def require_column(rows: Dataset, column: str, flag: str) -> None:
    if column not in rows.column_names:
        raise mistake(flag, f"there is no column {column!r}; {columns_of(rows)}", f"--{flag} with one of them")


def require_text(rows: Dataset, column: str, wanted: str = "", flag: str = "dataset_text_field") -> None:
    if column not in rows.column_names:
        raise mistake(
            flag,
            f"there is no column {column!r}; {columns_of(rows)}",
            f"--{flag} with one of them; understood are {wanted}",
        )
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
    fits = isinstance(item, pyarrow.ExtensionType) or pyarrow.types.is_null(item)
    if not fits and not (_is_list(kind) and pyarrow.types.is_struct(item)):
        held = "texts" if _holds_texts(rows, column) else kind
        what = f"the column {column!r} holds {held}, not lists of messages"
        raise mistake("dataset_name", what, 'lists of {"role": ..., "content": ...} in every row')


_TOKEN_IDS = "the ids of the model's own tokenizer, whole numbers; or texts, which are tokenized here"


def _is_list(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_number(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)


def _all_whole(numbers: pyarrow.ChunkedArray) -> bool:
    compute = pyarrow.compute
    return compute.all(compute.equal(numbers, compute.floor(numbers))).as_py() in (True, None)


def _require_numbers(rows: Dataset, name: str, vocabulary: int) -> None:
    """Raises `UserError` unless a column holds lists of integers that a model can read.

    Those of `labels` may be -100, those of `attention_mask` are not looked at.
    """
    column = rows.data.column(name)
    kind = column.type
    if pyarrow.types.is_null(kind):  # no row has any
        return
    if not _is_list(kind) or not _is_number(kind.value_type):
        raise mistake("dataset_name", f"the column {name!r} holds {kind}, not lists of whole numbers", _TOKEN_IDS)
    tokens = pyarrow.compute.list_flatten(column)
    if tokens.null_count:
        raise mistake("dataset_name", f"the column {name!r} holds lists with null in them", _TOKEN_IDS)
    if name == "attention_mask":
        return
    limits = pyarrow.compute.min_max(tokens).as_py()
    smallest, largest = limits["min"], limits["max"]
    if smallest is not None and smallest < 0 and not (name == "labels" and smallest == IGNORED):
        raise mistake("dataset_name", f"has the token id {smallest} in {name}", "token ids from 0; -100 only in labels")
    if pyarrow.types.is_floating(kind.value_type) and not _all_whole(tokens):
        raise mistake("dataset_name", f"the column {name!r} holds numbers that are not whole", _TOKEN_IDS)
    if largest is not None and largest >= vocabulary:
        raise mistake(
            "dataset_name",
            f"has the token id {largest}, and the tokenizer knows {vocabulary}: it was tokenized for another model",
            "data tokenized with this model's tokenizer, or texts",
        )


def _require_chat_template(tokenizer, run: Settings) -> None:
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


# --- Examples to tokens --------------------------------------------------------------------------


def encode_and_cut(rows: Rows, encode: Encoder, longest: int | None, version: str) -> dict[str, list]:
    """Token ids and labels of a batch of rows, cut to `longest` tokens (None: not cut).

    `version` of this package is not used here. As an argument it is part of the cache key, so
    that no release reads what an earlier one tokenized.
    """
    encoded = encode(rows)
    pairs = [
        (ids[:longest], labels[:longest]) for ids, labels in zip(encoded["input_ids"], encoded["labels"], strict=True)
    ]
    # A micro-batch without any label has a loss of nan. The first label does not count, because
    # no token predicts it.
    pairs = [pair for pair in pairs if any(label != IGNORED for label in pair[1][1:])]
    return {"input_ids": [ids for ids, _ in pairs], "labels": [labels for _, labels in pairs]}


def encode_tokenized(rows: Rows) -> dict[str, list]:
    """Token ids are taken as they are, without the padding that the attention mask marks.

    A row without any is left out, as an empty text is.
    """
    encoded: dict[str, list] = {"input_ids": [], "labels": []}
    nothing = [None] * len(rows["input_ids"])
    columns = (rows["input_ids"], rows.get("labels", nothing), rows.get("attention_mask", nothing))
    for ids, labels, mask in zip(*columns, strict=True):
        ids = ids or []
        labels = (labels or []) if "labels" in rows else ids
        for name, values in (("labels", labels), ("values in attention_mask", ids if mask is None else mask)):
            if len(values) != len(ids):
                what = f"has {len(ids)} input_ids and {len(values)} {name} in one example"
                raise mistake(
                    "dataset_name", what, "one for every token; the label is -100 where there is nothing to learn"
                )
        encoded["input_ids"].append(_where(mask, ids) if mask else ids)
        encoded["labels"].append(_where(mask, labels) if mask else labels)
    return encoded


def encode_texts(rows: Rows, tokenizer, column: str) -> dict[str, list]:
    """Every text ends with EOS, so that the model learns to stop. Empty texts are left out."""
    ids = _tokenize(tokenizer, [text for text in rows[column] if text])
    ids = [_ended(row, tokenizer) for row in ids]
    return {"input_ids": ids, "labels": ids}


def encode_completions(rows: Rows, tokenizer, completion_only: bool) -> dict[str, list]:
    """Prompt and completion are tokenized separately, as at inference: no token spans both."""
    encoded: dict[str, list] = {"input_ids": [], "labels": []}
    prompts = _tokenize(tokenizer, [text or "" for text in rows["prompt"]])
    completions = _tokenize(tokenizer, [text or "" for text in rows["completion"]], add_special_tokens=False)
    for prompt, completion in zip(prompts, completions, strict=True):
        if prompt and prompt[-1] == tokenizer.eos_token_id:
            prompt = prompt[:-1]  # some tokenizers append EOS to every text
        completion = _ended(completion, tokenizer)
        encoded["input_ids"].append(prompt + completion)
        encoded["labels"].append((_ignored(prompt) if completion_only else prompt) + completion)
    return encoded


def encode_chats(rows: Rows, tokenizer, assistant_only: bool) -> dict[str, list]:
    """A chat ends as its template ends it. A second EOS is not appended."""
    chats = [messages for messages in rows["messages"] if messages]
    texts = [_render(chat, tokenizer) for chat in chats]
    if not assistant_only:
        ids = _tokenize(tokenizer, texts, add_special_tokens=False)
        return {"input_ids": ids, "labels": ids}
    if _marks_assistant(tokenizer):
        return _merged(_encode_marked(chat, tokenizer) for chat in chats)
    spans = [assistant_spans(chat, text, tokenizer) for chat, text in zip(chats, texts, strict=True)]
    return _encode_spans(texts, spans, tokenizer)


def encode_chat_completions(rows: Rows, tokenizer, completion_only: bool) -> dict[str, list]:
    texts, spans = [], []
    for prompt, completion in zip(rows["prompt"], rows["completion"], strict=True):
        chat = _joined(prompt or [], completion or [])
        if not chat:
            continue
        text = _render(chat, tokenizer)
        border = _shared_start(prompt, text, tokenizer, "dataset_name") if completion_only else 0
        texts.append(text)
        spans.append([(border, len(text))])
    return _encode_spans(texts, spans, tokenizer)


def encode_classified(
    rows: Rows, tokenizer, columns: tuple[str, str], numbers: Mapping[str | int, int], longest: int, version: str
) -> dict[str, list]:
    """The tokenizer itself cuts long texts, so that its closing token stays.

    `version`: see `encode_and_cut`.
    """
    pairs = [(text, numbers[label]) for text, label in zip(rows[columns[0]], rows[columns[1]], strict=True) if text]
    ids = _tokenize(tokenizer, [text for text, _ in pairs], truncation=True, max_length=longest)
    return {"input_ids": ids, "labels": [label for _, label in pairs]}


# --- Which part of a chat is learned -------------------------------------------------------------


def assistant_spans(chat: list[dict], text: str, tokenizer) -> list[tuple[int, int]]:
    """Character ranges of the assistant's messages in `text`.

    Found by rendering the chat up to each of the assistant's messages, and including it.
    """
    spans = []
    for number, message in enumerate(chat):
        if message.get("role") != "assistant":
            continue
        start = _shared_start(chat[:number], text, tokenizer, "assistant_only_loss")
        # The line break after a message is not part of it.
        rendered = _render(chat[: number + 1], tokenizer).rstrip()
        if not text.startswith(rendered):
            raise _rewrites("assistant_only_loss")
        spans.append((start, len(rendered)))
    return spans


def _shared_start(opening: list[dict], text: str, tokenizer, flag: str) -> int:
    """Length in characters of the start of a chat, up to where the assistant begins to answer."""
    if not opening:
        raise mistake(
            flag,
            "a chat begins with the assistant, and the tokenizer's chat template does not mark its messages",
            "chats that begin with the user, or a template with {% generation %} ... {% endgeneration %}",
        )
    rendered = _render(opening, tokenizer, add_generation_prompt=True)
    if not text.startswith(rendered):
        raise _rewrites(flag)
    return len(rendered)


def _rewrites(flag: str) -> UserError:
    return mistake(
        flag,
        "the tokenizer's chat template rewrites earlier messages, so the assistant's messages cannot be found",
        "a chat template that marks them with {% generation %} ... {% endgeneration %}",
    )


def _encode_marked(chat: list[dict], tokenizer) -> dict[str, list]:
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    ids = encoded["input_ids"]
    labels = [token if spoken else IGNORED for token, spoken in zip(ids, encoded["assistant_masks"], strict=True)]
    return {"input_ids": [ids], "labels": [labels]}


def _encode_spans(texts: list[str], spans: list[list[tuple[int, int]]], tokenizer) -> dict[str, list]:
    """Labels only for tokens that contain characters of a span."""
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    labels = [
        [
            token if any(start < stop and end > begin for begin, stop in wanted) else IGNORED
            for token, (start, end) in zip(ids, offsets, strict=True)
        ]
        for ids, offsets, wanted in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
    ]
    return {"input_ids": encoded["input_ids"], "labels": labels}


def _render(chat: list[dict], tokenizer, **options) -> str:
    try:
        return tokenizer.apply_chat_template(chat, tokenize=False, **options)
    except (
        TemplateError,
        TypeError,
        KeyError,
        ValueError,
        AttributeError,
    ) as error:  # the template's code may raise any
        raise mistake(
            "dataset_name",
            f"the tokenizer's chat template refuses a chat of the data: {' '.join(str(error).split())[:200]}",
            'messages such as {"role": "user", "content": "..."}, in an order that the template allows',
        ) from None


def _joined(prompt: object, completion: object) -> list[dict]:
    if not isinstance(prompt, list) or not isinstance(completion, list):
        what = "a row of prompt and completion holds no lists of messages"
        raise mistake("dataset_name", what, 'lists of {"role": ..., "content": ...} in every row')
    return [*prompt, *completion]


def _marks_assistant(tokenizer) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


# --- Small steps ---------------------------------------------------------------------------------


def _merged(encoded: Iterable[dict[str, list]]) -> dict[str, list]:
    parts = list(encoded)
    return {name: [row for part in parts for row in part[name]] for name in ("input_ids", "labels")}


def _tokenize(tokenizer, texts: list[str], **options) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(texts, return_attention_mask=False, verbose=False, **options)["input_ids"]


def _ended(ids: list[int], tokenizer) -> list[int]:
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _ignored(ids: list[int]) -> list[int]:
    return [IGNORED] * len(ids)


def _where(mask: list[int], values: list[int]) -> list[int]:
    return [value for seen, value in zip(mask, values, strict=True) if seen]
