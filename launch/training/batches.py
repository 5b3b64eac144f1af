"""From columns to batches: examples become tokens and labels, then packed rows or padded batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jinja2 import TemplateError

from recipes.errors import UserError, mistake

if TYPE_CHECKING:  # RecipeTrainer needs neither: it also trains where they are not installed
    import pyarrow as pa
    from datasets import Dataset

IGNORED = -100  # the label that cross-entropy skips
MULTIPLE = 8  # tensor cores want lengths divisible by 8

Rows = Mapping[str, list]
Encoder = Callable[[Rows], dict[str, list]]


# --- Examples to tokens ----------------------------------------------------------------------------------------------


def encode_and_cut(rows: Rows, encode: Encoder, longest: int | None, version: str) -> dict[str, list]:
    """`version` of this package is not read: being an argument, it is part of the key under which results are cached,
    so that no release is handed what an earlier one tokenized."""
    encoded = encode(rows)
    pairs = [
        (ids[:longest], labels[:longest]) for ids, labels in zip(encoded["input_ids"], encoded["labels"], strict=True)
    ]
    # A micro-batch without any label gives a loss of nan. The first label is never used: nothing predicts it.
    pairs = [pair for pair in pairs if any(label != IGNORED for label in pair[1][1:])]
    return {"input_ids": [ids for ids, _ in pairs], "labels": [labels for _, labels in pairs]}


def encode_tokenized(rows: Rows) -> dict[str, list]:
    """Token ids are taken as they are, without the padding that their attention mask shows."""
    ids, labels = rows["input_ids"], rows["labels"] if "labels" in rows else rows["input_ids"]
    for row, targets in zip(ids, labels, strict=True):
        if len(row) != len(targets):
            what = f"has {len(row)} input_ids and {len(targets)} labels in one example"
            raise mistake("dataset_name", what, "one label for every token, -100 where there is nothing to learn")
    if "attention_mask" in rows:
        ids = [_where(mask, row) for mask, row in zip(rows["attention_mask"], ids, strict=True)]
        labels = [_where(mask, row) for mask, row in zip(rows["attention_mask"], labels, strict=True)]
    return {"input_ids": ids, "labels": labels}


def encode_texts(rows: Rows, tokenizer, column: str) -> dict[str, list]:
    """Every text ends with EOS, so that the model learns to stop; empty texts teach nothing."""
    ids = _tokenize(tokenizer, [text for text in rows[column] if text])
    ids = [_ended(row, tokenizer) for row in ids]
    return {"input_ids": ids, "labels": ids}


def encode_completions(rows: Rows, tokenizer, completion_only: bool) -> dict[str, list]:
    """Prompt and completion are tokenized apart, as at inference: no token spans the border."""
    encoded: dict[str, list] = {"input_ids": [], "labels": []}
    prompts = _tokenize(tokenizer, [text or "" for text in rows["prompt"]])
    completions = _tokenize(tokenizer, [text or "" for text in rows["completion"]], add_special_tokens=False)
    for prompt, completion in zip(prompts, completions, strict=True):
        if prompt and prompt[-1] == tokenizer.eos_token_id:
            prompt = prompt[:-1]  # some tokenizers end every text, and this one goes on
        completion = _ended(completion, tokenizer)
        encoded["input_ids"].append(prompt + completion)
        encoded["labels"].append((_ignored(prompt) if completion_only else prompt) + completion)
    return encoded


def encode_chats(rows: Rows, tokenizer, assistant_only: bool) -> dict[str, list]:
    """A chat ends as its template ends it: an EOS of ours could be one too many."""
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
        text = _render([*prompt, *completion], tokenizer)
        border = _shared_start(prompt, text, tokenizer, "dataset_name") if completion_only else 0
        texts.append(text)
        spans.append([(border, len(text))])
    return _encode_spans(texts, spans, tokenizer)


def assistant_spans(chat: list[dict], text: str, tokenizer) -> list[tuple[int, int]]:
    """Where the assistant speaks in `text`, found by rendering the chat up to and after each of its messages."""
    spans = []
    for number, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        start = _shared_start(chat[:number], text, tokenizer, "assistant_only_loss")
        said = _render(chat[: number + 1], tokenizer).rstrip()  # the line break after a turn is nobody's word
        if not text.startswith(said):
            raise _rewrites("assistant_only_loss")
        spans.append((start, len(said)))
    return spans


def _shared_start(opening: list[dict], text: str, tokenizer, flag: str) -> int:
    """Length of the opening of a chat, up to where the assistant begins to answer."""
    if not opening:
        raise mistake(
            flag,
            "a chat begins with the assistant, and the tokenizer's chat template does not mark its words",
            "chats that begin with the user, or a template with {% generation %} ... {% endgeneration %}",
        )
    rendered = _render(opening, tokenizer, add_generation_prompt=True)
    if not text.startswith(rendered):
        raise _rewrites(flag)
    return len(rendered)


def _rewrites(flag: str) -> UserError:
    return mistake(
        flag,
        "the tokenizer's chat template rewrites earlier messages, so the assistant's words cannot be told apart",
        "a chat template that marks them with {% generation %} ... {% endgeneration %}",
    )


def _encode_marked(chat: list[dict], tokenizer) -> dict[str, list]:
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    ids = encoded["input_ids"]
    labels = [token if spoken else IGNORED for token, spoken in zip(ids, encoded["assistant_masks"], strict=True)]
    return {"input_ids": [ids], "labels": [labels]}


def _encode_spans(texts: list[str], spans: list[list[tuple[int, int]]], tokenizer) -> dict[str, list]:
    """Labels only for the tokens that hold characters of a span."""
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
    except (TemplateError, TypeError, KeyError) as error:
        raise mistake(
            "dataset_name",
            f"the tokenizer's chat template refuses a chat of the data: {' '.join(str(error).split())[:200]}",
            'messages such as {"role": "user", "content": "..."}, in an order that the template allows',
        ) from None


def _marks_assistant(tokenizer) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


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


def encode_classified(
    rows: Rows, tokenizer, columns: tuple[str, str], numbers: Mapping[Any, int], longest: int, version: str
) -> dict[str, list]:
    """The tokenizer itself cuts long texts, so that its closing token stays. `version`: see `encode_and_cut`."""
    pairs = [(text, numbers[label]) for text, label in zip(rows[columns[0]], rows[columns[1]], strict=True) if text]
    ids = _tokenize(tokenizer, [text for text, _ in pairs], truncation=True, max_length=longest)
    return {"input_ids": ids, "labels": [label for _, label in pairs]}


# --- Tokens to rows and batches --------------------------------------------------------------------------------------


def pack(examples: Dataset, length: int) -> Dataset:
    """Rows of exactly `length` tokens, cut from the examples joined end to end; what is left over is dropped.

    So are rows without a single label: a micro-batch of them would have a loss of nan.
    """
    return examples.with_format("arrow").map(_Packer(length), batched=True, desc="Packing").with_format("torch")


class _Packer:
    """Cuts one batch of examples after another, and keeps what does not fill a row for the next batch."""

    def __init__(self, length: int):
        self.length = length
        self.rest = {name: np.empty(0, dtype=np.int32) for name in ("input_ids", "labels")}

    def __call__(self, examples: pa.Table) -> pa.Table:
        import pyarrow as pa

        rows = {name: self._cut(name, examples[name]) for name in self.rest}
        teaches = (rows["labels"][:, 1:] != IGNORED).any(axis=1)  # nothing predicts the first label
        return pa.table({name: _list_array(cut[teaches]) for name, cut in rows.items()})

    def _cut(self, name: str, column: pa.ChunkedArray) -> np.ndarray:
        tokens = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks]
        stream = np.concatenate([self.rest[name], *tokens])
        end = len(stream) // self.length * self.length
        self.rest[name] = stream[end:]
        return stream[:end].reshape(-1, self.length)


def _list_array(rows: np.ndarray) -> pa.ListArray:
    import pyarrow as pa

    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(rows.ravel(), type=pa.int32()))


def stack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Packed rows have one length and nothing to mask."""
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ("input_ids", "labels")}


@dataclass(frozen=True)
class Pad:
    """Pads on the right. A row's labels are one per token, or one class for the whole row."""

    pad_token_id: int
    longest: int  # where the model may end: no batch is padded beyond it

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        length = max(len(row["input_ids"]) for row in rows)
        width = min(-(-length // MULTIPLE) * MULTIPLE, self.longest)
        batch = {
            "input_ids": _padded([row["input_ids"] for row in rows], width, self.pad_token_id),
            "attention_mask": _padded([[1] * len(row["input_ids"]) for row in rows], width, 0),
        }
        labels = [row["labels"] for row in rows]
        per_token = isinstance(labels[0], list)
        batch["labels"] = _padded(labels, width, IGNORED) if per_token else torch.tensor(labels)
        return batch


def _padded(rows: list[list[int]], width: int, filler: int) -> torch.Tensor:
    return torch.tensor([row + [filler] * (width - len(row)) for row in rows])
