"""Chats to tokens: rendered by the tokenizer's own template, and which part of them is learned."""

from __future__ import annotations

import copy
import json
import re
from itertools import groupby

from jinja2 import TemplateError

from launch.data.batches import IGNORED
from launch.data.formats import (
    Messages,
    Rows,
    Tools,
    chats_of,
    is_learned,
)
from recipes.errors import UserError, mistake, one_line

Spans = list[tuple[int, int]]  # of characters


def encode_chats(
    rows: Rows, tokenizer, column: str, filled: bool, assistant_only: bool, completion_only: bool = False
) -> dict[str, list]:
    """A chat ends as its template ends it. A second EOS is not appended.

    Messages that are not to be learned are read, and have no labels: see `is_learned`, and with
    `completion_only` those of the prompt. `column` and `filled`: see `chats_of`.
    """
    chats = list(chats_of(rows, column, filled))
    texts = [_render_whole(chat, tools, tokenizer) if chat else "" for chat, tools, _ in chats]
    if not texts:
        return {"input_ids": [], "labels": []}
    if (
        not assistant_only
        and not completion_only
        and all(is_learned(message) for chat, *_ in chats for message in chat)
    ):
        ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return {"input_ids": ids, "labels": ids}
    if assistant_only and column != "completion" and _marks_assistant(tokenizer):
        both = [
            _encode_marked(chat, tools, text, tokenizer) if chat else ([], [])
            for (chat, tools, _), text in zip(chats, texts, strict=True)
        ]
        return {"input_ids": [ids for ids, _ in both], "labels": [labels for _, labels in both]}
    spans: list[Spans] = []
    for (chat, tools, start), text in zip(chats, texts, strict=True):
        first = start if completion_only else 0
        border = _end_of(chat, first - 1, tools, text, tokenizer) if completion_only and chat else 0
        if assistant_only:
            spans.append([span for span in assistant_spans(chat, tools, text, tokenizer) if span[0] >= border])
        else:
            spans.append(_all_but_muted(chat, tools, text, tokenizer, first, border))
    return _encode_spans(texts, spans, tokenizer)


# --- Which part of a chat is learned -------------------------------------------------------------


def assistant_spans(chat: Messages, tools: Tools | None, text: str, tokenizer) -> Spans:
    """Character ranges of the assistant's messages in `text`, its calls of tools among them.

    Found by rendering the chat up to each of the assistant's messages, and including it.
    """
    spans = []
    for number, message in enumerate(chat):
        if message.get("role") != "assistant" or not is_learned(message):
            continue
        start = _shared_start(chat[:number], tools, text, tokenizer)
        # The line break after a message is not part of it.
        rendered = _render(chat[: number + 1], tools, tokenizer).rstrip()
        if not text.startswith(rendered):
            raise _rewrites()
        spans.append((start, len(rendered)))
    return spans


def _all_but_muted(chat: Messages, tools: Tools | None, text: str, tokenizer, since: int = 0, border: int = 0) -> Spans:
    """What lies between the messages that are not to be learned, from the message `since`, which
    begins at the character `border`.
    """
    spans, start = [], border
    for learned, places in groupby(range(since, len(chat)), lambda number: is_learned(chat[number])):
        stop = _end_of(chat, [*places][-1], tools, text, tokenizer)
        if learned:
            spans.append((start, stop))
        start = stop
    return spans


def _end_of(chat: Messages, number: int, tools: Tools | None, text: str, tokenizer) -> int:
    """The place of the character at which the next message begins, or of an answer its words.

    Many templates write the last answer in another way than those before it. Then it is where the
    words of the next message begin: a text with others is the same up to there.
    """
    if not chat[number + 1 :]:
        return len(text)
    opening, following = chat[: number + 1], chat[number + 1]
    is_answered = following.get("role") == "assistant"
    if opening and text.startswith(rendered := _render(opening, tools, tokenizer, add_generation_prompt=is_answered)):
        return len(rendered)
    other = _render([*opening, {**following, "content": "\0"}, *chat[number + 2 :]], tools, tokenizer)
    both = enumerate(zip(text, other, strict=False))
    shared = next((place for place, (one, two) in both if one != two), len(text))
    if shared == len(text):
        what = f"the tokenizer's chat template leaves out a message of the {following.get('role')}"
        raise mistake("dataset_name", what, "chats whose messages the template writes")
    return shared


def _shared_start(opening: Messages, tools: Tools | None, text: str, tokenizer) -> int:
    """Length in characters of the start of a chat, up to where the assistant begins to answer."""
    if not opening:
        raise mistake(
            "assistant_only_loss",
            "a chat begins with the assistant, and the tokenizer's chat template does not mark its messages",
            "chats that begin with the user, or a template with {% generation %} ... {% endgeneration %}",
        )
    rendered = _render(opening, tools, tokenizer, add_generation_prompt=True)
    if not text.startswith(rendered):
        raise _rewrites()
    return len(rendered)


def _rewrites() -> UserError:
    return mistake(
        "assistant_only_loss",
        "the tokenizer's chat template rewrites earlier messages, so the assistant's messages cannot be found",
        "a chat template that marks them with {% generation %} ... {% endgeneration %}",
    )


def _encode_marked(chat: Messages, tools: Tools | None, text: str, tokenizer) -> tuple[list[int], list[int]]:
    """The input_ids and labels of a chat whose template marks the words of the assistant."""
    encoded = _apply(chat, tools, tokenizer, return_dict=True, return_assistant_tokens_mask=True)
    ids = learned = encoded["input_ids"]
    if not all(map(is_learned, chat)):
        learned = _encode_spans([text], [_all_but_muted(chat, tools, text, tokenizer)], tokenizer)["labels"][0]
    labels = [token if spoken else IGNORED for token, spoken in zip(learned, encoded["assistant_masks"], strict=True)]
    return ids, labels


def _encode_spans(texts: list[str], spans: list[Spans], tokenizer) -> dict[str, list]:
    """Labels only for tokens that contain characters of a span."""
    require_offsets(tokenizer, "dataset_name")
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    labels = [
        [
            token if any(start < stop and end > begin for begin, stop in wanted) else IGNORED
            for token, (start, end) in zip(ids, offsets, strict=True)
        ]
        for ids, offsets, wanted in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
    ]
    return {"input_ids": encoded["input_ids"], "labels": labels}


def require_offsets(tokenizer, flag: str) -> None:
    if not tokenizer.is_fast:
        raise mistake(
            flag, "needs a fast tokenizer, to know which characters a token holds", "a model that has a tokenizer.json"
        )


def _marks_assistant(tokenizer) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


# --- The template --------------------------------------------------------------------------------


def _render_whole(chat: Messages, tools: Tools | None, tokenizer) -> str:
    """The text of a chat. Templates that know no tools leave calls out without a word."""
    text = _render(chat, tools, tokenizer)
    names = [call["function"].get("name") for call in _calls(chat)]
    template = tokenizer.get_chat_template(tools=tools)
    if names and ("tool_calls" not in template or not all(str(name) in text for name in names)):
        raise mistake(
            "dataset_name",
            f"the tokenizer's chat template leaves out that the assistant calls {names[0]}",
            "a model whose chat template writes tool calls, or chats without them",
        )
    return text


def _render(chat: Messages, tools: Tools | None, tokenizer, **options) -> str:
    return _apply(chat, tools, tokenizer, tokenize=False, **options)


def _apply(chat: Messages, tools: Tools | None, tokenizer, **options):
    try:
        return tokenizer.apply_chat_template(chat, tools=tools, **options)
    # The template's code may raise any of these.
    except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
        if isinstance(error, TypeError) and any(
            isinstance(call["function"]["arguments"], dict) for call in _calls(chat)
        ):
            # DeepSeek's template adds the arguments to a text.
            return _apply(_with_written_arguments(chat), tools, tokenizer, **options)
        raise mistake(
            "dataset_name",
            f"the tokenizer's chat template refuses a chat of the data: {one_line(error)}; it is {str(chat)[:200]}",
            'messages such as {"role": "user", "content": "..."}, in an order that the template allows',
        ) from None


def _calls(chat: Messages) -> list[dict]:
    return [call for message in chat if isinstance(message, dict) for call in message.get("tool_calls") or []]


def _with_written_arguments(chat: Messages) -> Messages:
    chat = copy.deepcopy(chat)
    for call in _calls(chat):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return chat
