"""Chats to tokens: messages of any public format, rendered by the tokenizer's own template, and
which part of them is learned.

trl's `maybe_convert_to_chatml` renames the keys of ShareGPT and leaves its roles, so a template
meets `human`, `gpt` and `function_call`. It does not know tools written as JSON.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from launch.data.batches import IGNORED
from recipes.errors import UserError, mistake, one_line

Rows = Mapping[str, list]
Encoded = tuple[list[list[int]], list[list[int]]]  # the input_ids and labels of each row
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]
Spans = list[tuple[int, int]]  # of characters

# ShareGPT's names, LLaMA-Factory's for calls of tools and what they return, and the usual ones.
ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "function_call": "assistant", "observation": "tool", "function_response": "tool", "function": "tool",
    "user": "user", "assistant": "assistant", "system": "system", "developer": "developer", "tool": "tool",
}  # fmt: skip
_ANSWERS = ("content", "tool_calls", "reasoning_content", "reasoning", "thinking")  # what a message may say


def encode_chats(rows: Rows, tokenizer, column: str, assistant_only: bool, completion_only: bool = False) -> Encoded:
    """The tokens of chats, which end as their template ends them: a second EOS is not appended.

    `column` holds whole chats, or is "completion", which follows a prompt of messages. Messages
    that are not to be learned are read, and have no labels: see `_is_learned`, and with
    `completion_only` those of the prompt.
    """
    chats = list(_chats_of(rows, column))
    texts = [_render_whole(chat, tools, tokenizer) if chat else "" for chat, tools, _ in chats]
    if not texts:
        return [], []
    if not assistant_only and not completion_only and all(_is_learned(one) for chat, *_ in chats for one in chat):
        ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return ids, ids
    if not tokenizer.is_fast:
        what = "the tokenizer does not say which characters a token holds, so parts of a chat cannot be masked"
        raise mistake("model_name_or_path", what, "a model that has a tokenizer.json")
    if assistant_only and column != "completion" and _marks_assistant(tokenizer):
        both = [_encode_marked(*of_one, tokenizer) for of_one in zip(chats, texts, strict=True)]
        return [ids for ids, _ in both], [labels for _, labels in both]
    spans: list[Spans] = []
    for (chat, tools, start), text in zip(chats, texts, strict=True):
        first = start if completion_only else 0
        border = _end_of(chat, first - 1, tools, text, tokenizer) if completion_only and chat else 0
        if assistant_only:
            spans.append([span for span in _assistant_spans(chat, tools, text, tokenizer) if span[0] >= border])
        else:
            spans.append(_all_but_muted(chat, tools, text, tokenizer, first, border))
    return _encode_spans(texts, spans, tokenizer)


# --- Messages of any format ----------------------------------------------------------------------


def _chats_of(rows: Rows, column: str) -> Iterator[tuple[Messages, Tools | None, int]]:
    """The chat of each row as templates take it, its tools, and the number of its first message
    that lies in `column`. It is empty if there is no answer to learn in it.
    """
    nothing = [None] * len(rows[column])
    prompts = rows["prompt"] if column == "completion" else nothing
    context = (rows.get("tools", nothing), rows.get("system", nothing))
    for opening, turns, tools, system in zip(prompts, rows[column], *context, strict=True):
        said = _messages_of(turns)
        answers = [message for message in said if message.get("role") == "assistant"]
        if not said or (answers and not any(map(_is_learned, answers))):
            yield [], None, 0
            continue
        chat = [*_messages_of(opening), *said]
        if system and isinstance(system, str) and chat[0].get("role") != "system":
            chat = [{"role": "system", "content": system}, *chat]
        yield chat, _tool_schemas(tools), len(chat) - len(said)


def _is_learned(message: dict[str, Any]) -> bool:
    """True for a message to learn from. A `weight` of 0 says that it is not, as for OpenAI and
    axolotl, and an answer that says nothing would teach the model to stop at once.
    """
    if message.get("weight") == 0:
        return False
    if message.get("role") != "assistant" or "content" not in message:  # the template knows what is missing
        return True
    return any(message.get(name) for name in _ANSWERS)


def _messages_of(turns: Any) -> Messages:
    """Messages with role and content. A content of null is an empty text: some templates would
    write "None", and others refuse it.
    """
    turns = turns or []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        what = f"has a chat that is not a list of messages: {_short(turns)}"
        raise mistake("dataset_name", what, 'lists of {"role": ..., "content": ...} in every row')
    return list(map(_message, turns))


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    has_content = "content" in turn or "from" in turn
    turn = _without_none(turn)
    if (speaker := turn.get("from")) is not None:
        if speaker not in ROLES:
            what = f"has a message from {speaker!r}, which is not a known role"
            raise mistake("dataset_name", what, "one of " + ", ".join(ROLES))
        turn = {"role": speaker, "content": turn.get("value"), "weight": turn.get("weight")}
    role = turn.get("role")
    message = {**turn, "role": ROLES.get(role, role)} if isinstance(role, str) else dict(turn)
    if role == "function_call":
        message |= {"content": "", "tool_calls": turn.get("content")}
    if calls := message.get("tool_calls") or message.pop("function_call", None):  # OpenAI's older name
        message["tool_calls"] = _tool_calls(calls)
        has_content = True  # templates add texts to it
    if has_content and message.get("content") is None:
        message["content"] = ""
    return message


def _tool_schemas(tools: Any) -> Tools | None:
    """Tools as transformers describes them to a template; None if there are none."""
    # A null in a schema means that the key is not there, and Parquet fills them in.
    return [_function(_without_none(tool)) for tool in _objects(tools, "the column tools")] or None


def _tool_calls(calls: Any) -> list[dict]:
    """Calls with their arguments as an object: nearly all templates write that as JSON."""
    found = [copy.deepcopy(_function(call)) for call in _objects(calls, "a tool call")]
    for call in found:
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _parsed(arguments, "the arguments of a tool call")
        call["function"]["arguments"] = arguments
    return found


def _objects(value: Any, what: str) -> list[dict]:
    """One object or several, each or all of them perhaps written as JSON."""
    value = _parsed(value, what) if isinstance(value, str) and value.strip() else value or []
    listed = [
        _parsed(one, what) if isinstance(one, str) else one for one in (value if isinstance(value, list) else [value])
    ]
    if not all(isinstance(one, dict) for one in listed):
        raise mistake("dataset_name", f"{what} is not an object: {_short(value)}", "a JSON object for each")
    return listed


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise mistake("dataset_name", f"{what} is not JSON: {_short(text)}", "JSON in every row") from None


def _function(tool: dict) -> dict:
    return tool if isinstance(tool.get("function"), dict) else {"type": "function", "function": tool}


def _without_none(value: Any) -> Any:
    """The value without keys that nobody wrote: Arrow gives each message the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _short(value: Any) -> str:
    return one_line(str(value)[:100])


# --- Which part of a chat is learned -------------------------------------------------------------


def _assistant_spans(chat: Messages, tools: Tools | None, text: str, tokenizer) -> Spans:
    """Character ranges of the assistant's messages in `text`, its calls of tools among them.

    Found by rendering the chat up to each of the assistant's messages, and including it.
    """
    spans = []
    for number, message in enumerate(chat):
        if message.get("role") != "assistant" or not _is_learned(message):
            continue
        if not number:
            what = "a chat begins with the assistant, and the tokenizer's chat template does not mark its messages"
            raise _unmarked(what, "chats that begin with the user, or ")
        before = _render(chat[:number], tools, tokenizer, add_generation_prompt=True)
        rendered = _render(chat[: number + 1], tools, tokenizer).rstrip()  # the line break behind is not part of it
        if not (text.startswith(before) and text.startswith(rendered)):
            what = "the tokenizer's chat template rewrites earlier messages, so the assistant's cannot be found"
            raise _unmarked(what)
        spans.append((len(before), len(rendered)))
    return spans


def _unmarked(what: str, other: str = "") -> UserError:
    fix = f"{other}a chat template that marks them with {{% generation %}} ... {{% endgeneration %}}"
    return mistake("assistant_only_loss", what, fix)


def _all_but_muted(chat: Messages, tools: Tools | None, text: str, tokenizer, since: int, border: int) -> Spans:
    """The characters between the messages that are not to be learned, from the message `since`,
    which begins at the character `border`.
    """
    spans, start = [], border
    for learned, places in groupby(range(since, len(chat)), lambda number: _is_learned(chat[number])):
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
    shared = next((place for place, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), len(text))
    if shared == len(text):
        what = f"the tokenizer's chat template leaves out a message of the {following.get('role')}"
        raise mistake("dataset_name", what, "chats whose messages the template writes")
    return shared


def _encode_marked(of_one: tuple[Messages, Tools | None, int], text: str, tokenizer) -> tuple[list[int], list[int]]:
    """The input_ids and labels of a chat whose template marks the words of the assistant."""
    chat, tools, _ = of_one
    if not chat:
        return [], []
    encoded = _apply(chat, tools, tokenizer, return_dict=True, return_assistant_tokens_mask=True)
    ids = learned = encoded["input_ids"]
    if not all(map(_is_learned, chat)):
        _, (learned,) = _encode_spans([text], [_all_but_muted(chat, tools, text, tokenizer, 0, 0)], tokenizer)
    return ids, [
        token if spoken else IGNORED for token, spoken in zip(learned, encoded["assistant_masks"], strict=True)
    ]


def _encode_spans(texts: list[str], spans: list[Spans], tokenizer) -> Encoded:
    """Labels only for tokens that contain characters of a span."""
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    labels = [
        [
            token if any(start < stop and end > begin for begin, stop in wanted) else IGNORED
            for token, (start, end) in zip(ids, offsets, strict=True)
        ]
        for ids, offsets, wanted in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
    ]
    return encoded["input_ids"], labels


def _marks_assistant(tokenizer) -> bool:
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


# --- The template --------------------------------------------------------------------------------


def _render_whole(chat: Messages, tools: Tools | None, tokenizer) -> str:
    """The text of a chat. Templates that know no tools leave calls out without a word."""
    text = _render(chat, tools, tokenizer)
    names = [call["function"].get("name") for call in _calls(chat)]
    template = tokenizer.get_chat_template(tools=tools)
    if names and ("tool_calls" not in template or not all(str(name) in text for name in names)):
        what = f"the tokenizer's chat template leaves out that the assistant calls {names[0]}"
        raise mistake("dataset_name", what, "a model whose chat template writes tool calls, or chats without them")
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
            chat = copy.deepcopy(chat)  # DeepSeek's template adds the arguments to a text
            for call in _calls(chat):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            return _apply(chat, tools, tokenizer, **options)
        what = f"the tokenizer's chat template refuses a chat of the data: {one_line(error)}; it is {str(chat)[:200]}"
        fix = 'messages such as {"role": "user", "content": "..."}, in an order that the template allows'
        raise mistake("dataset_name", what, fix) from None


def _calls(chat: Messages) -> list[dict]:
    return [call for message in chat for call in message.get("tool_calls") or []]
