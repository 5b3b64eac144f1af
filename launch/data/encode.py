"""Encode rows as tokens and labels. A row's columns set its format: text, prompt and completion,
chat, Alpaca, or token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, cycle, zip_longest
from typing import Any

import numpy as np
import pyarrow
from datasets import Dataset, DatasetInfo, Features

from launch.data.chats import Chat, read_chat
from launch.data.columns import ALPACA, CHATS, COMPLETIONS, IDS, LEARNED_ONLY, Format, formats
from recipes.errors import UserError, mistake, one_line
from recipes.run import Settings

IGNORED = -100  # the label that cross-entropy skips
# A row's input_ids and labels; if both are one object, all tokens are learned. A chat adds the
# number of its empty answers.
Tokens = tuple[list[int], list[int]] | tuple[list[int], list[int], int]

_BESIDE = ("input", "history", "system", "tools", "labels", "attention_mask")


@dataclass
class Text:
    """A prompt and its completion. A plain text is a prompt without completion, learned in full."""

    prompt: str
    completion: str
    learns_prompt: bool


# --- Encoding ------------------------------------------------------------------------------------


def encode_rows(
    rows: pyarrow.Table, features: Features, run: Settings, tokenizer, embeddings: int, first: int | None = None
) -> list[Tokens]:
    """Return the tokens and labels of each row; empty lists where text or answer is missing.

    If `first`, the index of the first row in its split, is given, a `UserError` names the bad row.
    `embeddings` is the number of the tokenizer's tokens that have an embedding in the model.
    """
    known = formats(run, features)
    names = {*chain(*known), *_BESIDE} & {*features}
    info = DatasetInfo(features=Features({name: features[name] for name in names}))
    columns = Dataset(rows.select(list(names)), info, fingerprint="a few rows")[:]  # a Dataset decodes JSON columns
    found: list[Any] = []
    for number in range(len(rows)):
        row = {name: values[number] for name, values in columns.items()}
        own = next((one for one in known if row[one[-1]] is not None), None)
        try:
            found.append(own and _read(row, own, run, tokenizer))
        except UserError as error:
            where = "" if first is None else f"row {first + number + 1:,}: "
            raise UserError(*(replace(one, what=where + one.what) for one in error.problems)) from None
    tokens: list[Tokens] = [one if isinstance(one, tuple) else ([], []) for one in found]
    for kind, encode in ((Text, _encode_texts), (Chat, _encode_chats)):
        places = [place for place, one in enumerate(found) if isinstance(one, kind)]
        for place, pair in zip(places, encode([found[place] for place in places], run, tokenizer), strict=True):
            tokens[place] = pair
    checked = tokens if embeddings < len(tokenizer) else []
    largest = max([tokenizer.pad_token_id or 0, *(max(one[0], default=0) for one in checked)])
    if largest >= embeddings:
        what = f"the data needs the token {tokenizer.decode(largest)}, but the model has only {embeddings:,} embeddings"
        fix = "call model.resize_token_embeddings(len(tokenizer)), and save model and tokenizer into a new folder"
        fix += "; LoRA does not train embeddings: first train that model without --use_peft" * run["use_peft"]
        raise mistake("model_name_or_path", what, fix)
    return tokens


def _read(row: Mapping[str, Any], own: Format, run: Settings, tokenizer) -> Text | Chat | Tokens | None:
    """Read a row in format `own`; None for an empty text, completion or chat (see `read_chat`)."""
    is_text = own == (run["dataset_text_field"],)
    if own == IDS and not is_text:
        return _token_ids(row, len(tokenizer))
    if own == ALPACA:
        row, own = _completion_of_alpaca(row, tokenizer.chat_template), COMPLETIONS
    completes, only = own == COMPLETIONS, run["completion_only_loss"]
    if not is_text and (own in CHATS or any(isinstance(row[name], list) for name in COMPLETIONS)):
        if only and not completes and not run["assistant_only_loss"]:
            fix = "use data with both columns; for chats, --assistant_only_loss instead"
            raise mistake("completion_only_loss", "the row has no prompt and completion", fix)
        if not tokenizer.chat_template:
            what = f"the row is a chat, and the tokenizer of {run['model_name_or_path']} has no chat template"
            fix = "use a chat model (names often end in -Instruct), or a copy of this model with a chat_template.jinja"
            raise mistake("model_name_or_path", what, fix)
        return read_chat(row, own[-1], tokenizer, run["assistant_only_loss"], completes and only is not False)
    for flag, needed in LEARNED_ONLY.items():
        if run[flag] and not (completes and flag.startswith("completion")):
            raise mistake(flag, f"the row has no {needed}", f"use data with {needed}, or --{flag} false")
    if is_text:
        text = _text(row, own[0], "dataset_text_field")
        return Text(text, "", learns_prompt=True) if text else None
    prompt, completion = (_text(row, name, "dataset_name") for name in COMPLETIONS)
    # A row without a completion is left out, because it would teach the model to stop at once.
    return Text(prompt, completion, learns_prompt=only is False) if completion else None


def _text(row: Mapping[str, Any], column: str, subject: str) -> str:
    value = row.get(column)
    if not isinstance(value, str | None):
        what = f"holds {one_line(repr(value)[:100])}, which is not text, in the column {column!r}"
        fix = "put text in this column in every row; if a .csv holds numbers there, run "
        raise mistake(subject, what, f"{fix}pandas.read_csv(FILE, dtype=str).to_parquet(NEW_FILE)")
    return value or ""


# --- One format each -----------------------------------------------------------------------------


def _encode_texts(texts: Sequence[Text], run: Settings, tokenizer) -> list[Tokens]:
    """Tokenize prompt and completion apart, as generation does, so that no token spans both. EOS
    ends each example, so that the model learns to stop; a classifier's texts get no EOS.
    """

    def tokenize(words: list[str], **options) -> list[list[int]]:
        return tokenizer(words, return_attention_mask=False, verbose=False, **options)["input_ids"] if words else []

    prompts = [text.prompt for text in texts]
    if run["task"] == "sequence_classification":
        # The tokenizer itself truncates a long text, so that the closing token stays.
        return [(ids, ids) for ids in tokenize(prompts, truncation=True, max_length=run["max_length"])]
    found: list[Tokens] = []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # Some tokenizers (Llama 2's) add a space before a text, but not after a line break. If one of
    # them keeps line breaks (XGLM's does not), add one before a completion, and cut it off later.
    line, letter, both = tokenize(["\n", "a", "\na"], add_special_tokens=False)
    lead = line if both[: len(line)] == line and both not in (letter, [*line, *letter]) else []
    written = ["\n" * bool(lead) + text.completion for text in texts]
    completions = [ids[len(lead) :] for ids in tokenize(written, add_special_tokens=False)]
    begin = [tokenizer.bos_token_id]
    for text, prompt, completion in zip(texts, tokenize(prompts), completions, strict=True):
        before = prompt[:-1] if prompt[-1:] == end else prompt  # some tokenizers append EOS to every text
        before = before[1:] if before[:2] == begin * 2 else before  # BOS twice: the text has its own BOS
        after = completion if completion[-1:] == end else [*completion, *end]
        ids = [*before, *after]
        found.append((ids, ids if text.learns_prompt else [IGNORED] * len(before) + after))
    return found


def _encode_chats(chats: Sequence[Chat], run: Settings, tokenizer) -> list[Tokens]:
    """Tokenize chats. No EOS is appended, because the template writes the end of a chat. A token is
    learned if it holds a character to learn.
    """
    if not chats:
        return []
    masks = any(chat.learned is not None for chat in chats)
    if masks and not tokenizer.is_fast:
        what = "the tokenizer does not report which characters a token holds, so parts of a chat cannot be masked"
        raise mistake("model_name_or_path", what, "use a model that has a tokenizer.json")
    options = dict(add_special_tokens=False, return_attention_mask=False, verbose=False)
    encoded = tokenizer([chat.text for chat in chats], return_offsets_mapping=masks, **options)
    found: list[Tokens] = []
    for number, (chat, ids) in enumerate(zip(chats, encoded["input_ids"], strict=True)):
        labels = ids
        if chat.learned is not None:
            starts, ends = np.array(encoded["offset_mapping"][number]).reshape(-1, 2).T
            holds = [(starts < stop) & (ends > begin) for begin, stop in chat.learned]
            labels = np.where(np.any([np.zeros(len(ids), bool), *holds], axis=0), ids, IGNORED).tolist()
        found.append((ids, labels, chat.empty))
    return found


def _token_ids(row: Mapping[str, Any], vocabulary: int) -> Tokens:
    """Return the row's own token ids and labels, without tokens whose attention_mask is 0."""
    ids, labels = row["input_ids"], row["labels"] if "labels" in row else row["input_ids"]
    mask = row.get("attention_mask") or [1] * len(ids if isinstance(ids, list) else ())
    if not all(isinstance(one, list) for one in (ids, labels, mask)) or len(mask) != len(ids):
        what = "has input_ids, labels or attention_mask that are not lists of equal length"
        raise mistake("dataset_name", what, "make the lists of each row equally long")
    if not all(type(one) is int and 0 <= one < vocabulary for one in ids):
        what = f"has token ids that the tokenizer does not know: its vocabulary has {vocabulary:,} tokens"
        raise mistake("dataset_name", what, "use ids of the model's own tokenizer, or a column of texts")
    if any(one not in (own, IGNORED) for own, one in zip_longest(ids, labels)):
        fix = f"set each label to the token at its position, or to {IGNORED} to ignore it: the model shifts the labels"
        raise mistake("dataset_name", "has labels that differ from its input_ids", fix)
    return list(compress(ids, mask)), list(compress(labels, mask))


def _completion_of_alpaca(row: Mapping[str, Any], template: str | None) -> dict[str, Any]:
    """Convert a row to prompt and completion: messages if there is a chat template, else texts. The
    prompt begins with the pairs [question, answer] in `history`, a column of LLaMA-Factory's.
    """
    task, given, answer = (_text(row, name, "dataset_name") for name in ("instruction", "input", "output"))
    earlier = row["history"] if isinstance(row.get("history"), list) else []
    if not all(isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in earlier):
        what = f"has a history that is not a list of pairs of texts: {one_line(repr(earlier)[:100])}"
        raise mistake("dataset_name", what, 'write [["question", "answer"], ...] in every row, or [] without history')
    said = [*chain(*earlier), "\n\n".join(filter(None, (task, given))), answer]
    if not template:
        return {"prompt": "".join(f"{text}\n\n" for text in said[:-1]), "completion": answer}
    chat = [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), said, strict=False)]
    return {**row, "prompt": chat[:-1], "completion": chat[-1:]}
