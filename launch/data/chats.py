"""Chats as text: messages of any public format, rendered by the tokenizer's chat template, and the
part of the text that is learned.

trl's `maybe_convert_to_chatml` renames the keys of ShareGPT and leaves its roles, so a template
meets `human`, `gpt` and `function_call`. Nor does that function know tools written as JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from recipes.errors import mistake, one_line

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
_MESSAGES = 'lists of {"role": ..., "content": ...} in every row'


@dataclass
class Chat:
    """A chat as its template writes it, and the characters to learn (None for all)."""

    text: str
    learned: Spans | None


def read_chat(
    row: Mapping[str, Any], column: str, tokenizer, assistant_only: bool, completion_only: bool
) -> Chat | None:
    """The chat of a row, None if there is no answer to learn in it.

    `column` holds a whole chat, or is "completion", which follows a prompt of messages. Messages
    that `_teaches` rejects, and with `completion_only` those of the prompt, are only context.
    """
    said = _messages_of(row[column], tokenizer)
    answers = [message for message in said if message["role"] == "assistant"]
    if not said or (answers and not any(map(_teaches, answers))):
        return None
    chat = [*(_messages_of(row["prompt"], tokenizer) if column == "completion" else []), *said]
    if row.get("system") and isinstance(row["system"], str) and chat[0]["role"] != "system":
        chat = [{"role": "system", "content": row["system"]}, *chat]
    tools = [_without_none(tool) for tool in _functions(row.get("tools"), "the column tools")] or None
    template = _Template(tokenizer, chat, tools)
    first = len(chat) - len(said) if completion_only else 0
    teaches = [number >= first and _teaches(message) for number, message in enumerate(chat)]
    learned = None if all(teaches) else template.spans(teaches)
    if assistant_only and (marked := template.marked()) is not None:
        learned = [one for one in marked if learned is None or any(a <= one[0] < b for a, b in learned)]
    elif assistant_only:
        answered = [one and message["role"] == "assistant" for one, message in zip(teaches, chat, strict=True)]
        learned = template.answers(answered)
    return Chat(template.text, learned)


# --- Messages of any format ----------------------------------------------------------------------


def _teaches(message: dict[str, Any]) -> bool:
    """True for a message to learn from. A `weight` of 0 says that it is not, as for OpenAI and
    axolotl, and an answer that says nothing would teach the model to stop at once.
    """
    if message.get("weight") == 0:
        return False
    return message["role"] != "assistant" or any(message.get(name) for name in _ANSWERS)


def _messages_of(turns: Any, tokenizer) -> Messages:
    turns = turns or []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise mistake("dataset_name", f"has a chat that is not a list of messages: {_short(turns)}", _MESSAGES)
    return [_message(turn, tokenizer) for turn in turns]


def _message(turn: dict[str, Any], tokenizer) -> dict[str, Any]:
    """A message with role and content. A content of null is an empty text: some templates would
    write "None", and others refuse it.
    """
    message = _without_none(turn)
    if "from" in message:
        message = {"role": turn["from"], "content": message.get("value", ""), "weight": turn.get("weight")}
    speaker = message.get("role")
    role = ROLES.get(speaker, speaker) if isinstance(speaker, str) else None
    if role is None or (role not in ROLES.values() and role not in str(tokenizer.chat_template)):
        what = f"has a message with the role {speaker!r}, which the chat template does not know: {_short(turn)}"
        raise mistake("dataset_name", what, "one of " + ", ".join(ROLES))
    message["role"] = role
    if speaker == "function_call":
        message |= {"content": "", "tool_calls": message.get("content")}
    if calls := message.get("tool_calls") or message.pop("function_call", None):  # OpenAI's older name
        message["tool_calls"] = [_with_arguments(call) for call in _functions(calls, "a tool call")]
    if "content" not in turn and not message.keys() & {*_ANSWERS}:
        raise mistake("dataset_name", f"has a message without content: {_short(turn)}", _MESSAGES)
    message.setdefault("content", "")
    return message


def _with_arguments(call: dict) -> dict:
    """A call with its arguments as an object: nearly all templates write that as JSON."""
    function = call["function"]
    (arguments,) = _objects(function.get("arguments"), "the arguments of a tool call") or [{}]
    return {**call, "function": {**function, "arguments": arguments}}


def _functions(value: Any, what: str) -> list[dict]:
    """Tools or calls, as transformers describes them to a template."""
    found = _objects(value, what)
    return [one if isinstance(one.get("function"), dict) else {"type": "function", "function": one} for one in found]


def _objects(value: Any, what: str) -> list[dict]:
    """One object or several, perhaps written as JSON."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value or "[]")
    found = value if isinstance(value, list) else [value] if value else []
    if not all(isinstance(one, dict) for one in found):
        raise mistake("dataset_name", f"{what} is not a JSON object: {_short(value)}", "JSON in every row")
    return found


def _without_none(value: Any) -> Any:
    """The value without keys that nobody wrote: Arrow gives each message the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _short(value: Any) -> str:
    return one_line(str(value)[:100])


# --- The template --------------------------------------------------------------------------------


class _Template:
    """A chat, and the text that the tokenizer's template makes of it."""

    def __init__(self, tokenizer, chat: Messages, tools: Tools | None):
        self.tokenizer, self.chat, self.tools = tokenizer, chat, tools
        self.source = tokenizer.get_chat_template(tools=tools)
        self.text = self.render(chat)
        names = [call["function"].get("name") for message in chat for call in message.get("tool_calls") or []]
        # Templates that know no tools leave calls out without a word.
        if names and ("tool_calls" not in self.source or not all(str(name) in self.text for name in names)):
            what = f"the tokenizer's chat template leaves out that the assistant calls {names[0]}"
            fix = "a model whose chat template writes tool calls, or chats without them"
            raise mistake("dataset_name", what, fix)

    def render(self, chat: Messages, **options) -> str:
        try:
            return self.tokenizer.apply_chat_template(chat, tools=self.tools, tokenize=False, **options)
        except (TemplateError, TypeError, LookupError, ValueError, AttributeError) as error:  # it is a program
            what = f"the tokenizer's chat template refuses a chat: {one_line(error)}; it is {str(chat)[:200]}"
            fix = 'messages such as {"role": "user", "content": "..."}, in an order that the template allows'
            raise mistake("dataset_name", what, fix) from None

    def marked(self) -> Spans | None:
        """The characters that the template marks as the assistant's; None if it marks none."""
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self.source):
            return None
        options = dict(tools=self.tools, chat_template=self.source, return_assistant_tokens_mask=True)
        _, (spans,) = render_jinja_template([self.chat], **options, **self.tokenizer.special_tokens_map)
        return spans

    def spans(self, teaches: Sequence[bool]) -> Spans:
        """The characters of the messages that teach, with what the template writes around them."""
        found, count = [], len(self.chat)
        for learned, group in groupby(range(count), teaches.__getitem__):
            first, *rest = group
            if learned:
                end = [first, *rest][-1] + 1
                found.append((self._begin(first), self._begin(end) if end < count else len(self.text)))
        return found

    def answers(self, teaches: Sequence[bool]) -> Spans:
        """The characters of the messages that teach, without the line break behind."""
        found = []
        for number in compress(range(len(self.chat)), teaches):
            rendered = self.render(self.chat[: number + 1])
            if not self.text.startswith(rendered):
                what = "the tokenizer's chat template rewrites earlier messages, so the assistant's cannot be found"
                fix = "a chat template that marks them with {% generation %} ... {% endgeneration %}"
                raise mistake("assistant_only_loss", what, fix)
            found.append((self._begin(number), len(rendered.rstrip())))
        return found

    def _begin(self, number: int) -> int:
        """The place of the character at which a message begins, or of an answer its words.

        Some templates write what comes before in another way if it is the end. Then it is where a
        text with other words in the message begins to differ.
        """
        message = self.chat[number]
        is_answer = message["role"] == "assistant"
        if number or not is_answer:
            opening = self.render(self.chat[:number], add_generation_prompt=is_answer) if number else ""
            if self.text.startswith(opening):
                return len(opening)
        other = self.render([*self.chat[:number], {**message, "content": "\0"}, *self.chat[number + 1 :]])
        if other == self.text:
            what = f"the tokenizer's chat template leaves out a message of the {message['role']}"
            raise mistake("dataset_name", what, "chats whose messages the template writes")
        pairs = enumerate(zip(self.text, other, strict=False))
        return next((place for place, (one, two) in pairs if one != two), len(self.text))
