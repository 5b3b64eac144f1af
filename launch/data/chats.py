"""Render chats of the usual formats with the tokenizer's chat template, and find the text to learn.

trl's `maybe_convert_to_chatml` is not used: it renames the keys of ShareGPT, but leaves roles that
templates do not know (`human`, `gpt`, `function_call`), and does not read tools written as JSON.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Any

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from recipes.errors import UserError, mistake, one_line

Messages = list[dict[str, Any]]
Spans = list[tuple[int, int]]  # begin and end of each piece, in characters

# The usual roles, ShareGPT's, and LLaMA-Factory's for tool calls and tool results.
ROLES = {
    "user": "user", "assistant": "assistant", "system": "system", "developer": "developer", "tool": "tool",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "function_call": "assistant", "observation": "tool", "function_response": "tool", "function": "tool",
}  # fmt: skip
_REASONING = ("reasoning_content", "reasoning", "thinking")
_ANSWERS = ("content", "tool_calls", *_REASONING)  # the fields that an answer may fill
_MESSAGES = 'write a list of {"role": ..., "content": ...} in every row'


@dataclass
class Chat:
    """A chat rendered by its template."""

    text: str
    learned: Spans | None  # the characters to learn; None for all of them
    empty: int  # number of empty answers


def read_chat(
    row: Mapping[str, Any], column: str, tokenizer, assistant_only: bool, completion_only: bool
) -> Chat | None:
    """Return a row's chat; None without messages, or if each answer is empty or has `weight` 0.
    Raises `UserError` for a chat that cannot be read or rendered.

    `column` names the column of a whole chat, or is "completion", which continues the messages in
    "prompt". The model reads, but does not learn, empty answers and messages of `weight` 0; with
    `completion_only`, also the prompt; with `assistant_only`, also the words of all other roles.
    """
    said = _messages_of(row[column], tokenizer)
    answers = [message for message in said if message["role"] == "assistant"]
    if not said or (answers and not any(map(_teaches, answers))):
        return None
    chat = [*(_messages_of(row["prompt"], tokenizer) if column == "completion" else []), *said]
    if row.get("system") and isinstance(row["system"], str) and chat[0]["role"] != "system":
        chat = [{"role": "system", "content": row["system"]}, *chat]
    tools = _without_none(_functions(row.get("tools"), "the column tools")) or None
    template = _Template(tokenizer, chat, tools)
    first = len(chat) - len(said) if completion_only else 0
    teaches = [number >= first and _teaches(message) for number, message in enumerate(chat)]
    learned = None if all(teaches) else template.spans(teaches)
    if assistant_only and (marked := template.marked()) is not None:
        learned = [one for one in marked if learned is None or any(a <= one[0] < b for a, b in learned)]
    elif assistant_only:
        answered = [one and message["role"] == "assistant" for one, message in zip(teaches, chat, strict=True)]
        learned = template.answers(answered)
    empty = sum(message.get("weight") != 0 and not _teaches(message) for message in answers)
    return _ended(Chat(template.text, learned, empty), chat[-1], teaches[-1], tokenizer.eos_token or "")


def _ended(chat: Chat, last: dict[str, Any], is_learned: bool, eos: str) -> Chat:
    """Append EOS if the template writes nothing after the last answer, as GLM-4's does: otherwise
    the model would never learn to stop.
    """
    content = last["content"].rpartition("</think>")[2].strip() if last["role"] == "assistant" else ""
    if not content or not chat.text.rstrip().endswith(content):
        return chat
    end = [(len(chat.text), len(chat.text) + len(eos))] if is_learned and chat.learned else []
    return Chat(chat.text + eos, None if chat.learned is None else [*chat.learned, *end], chat.empty)


# --- Messages of any format ----------------------------------------------------------------------


def _teaches(message: dict[str, Any]) -> bool:
    """True if the model may learn a message. A `weight` of 0 excludes the message, as for OpenAI
    and axolotl. An empty answer is excluded, because it would teach the model to stop at once.
    """
    if message.get("weight") == 0:
        return False
    return message["role"] != "assistant" or any(str(message.get(name) or "").strip() for name in _ANSWERS)


def _messages_of(turns: Any, tokenizer) -> Messages:
    turns = turns or []
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise mistake("dataset_name", f"has a chat that is not a list of messages: {_short(turns)}", _MESSAGES)
    return [_message(turn, tokenizer) for turn in turns]


def _message(turn: dict[str, Any], tokenizer) -> dict[str, Any]:
    """Return a turn as a message with role and content. Null content becomes an empty text, because
    some templates would write "None", and others would fail.
    """
    message = _without_none(turn)
    if "from" in message:
        message = {"role": turn["from"], "content": message.get("value", ""), "weight": turn.get("weight")}
    speaker = message.get("role")
    role = ROLES.get(speaker, speaker) if isinstance(speaker, str) else None
    if role is None or (role not in ROLES.values() and role not in str(tokenizer.chat_template)):
        what = f"has a message with the role {speaker!r}, which is unknown: {_short(turn)}"
        raise mistake("dataset_name", what, "use user, assistant, system or tool")
    message["role"] = role
    if speaker == "function_call":
        message |= {"content": "", "tool_calls": message.get("content")}
    if calls := message.get("tool_calls") or message.pop("function_call", None):  # OpenAI's older name
        message["tool_calls"] = [_with_arguments(call) for call in _functions(calls, "a tool call")]
    if "content" not in turn and not message.keys() & {*_ANSWERS}:
        raise mistake("dataset_name", f"has a message without content: {_short(turn)}", _MESSAGES)
    content = message.setdefault("content", "")
    if role != "tool":  # many templates leave out a list of parts, or write it as Python
        parts = content if isinstance(content, list) else [content]
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise mistake("dataset_name", f"has a message whose content is not text: {_short(turn)}", _MESSAGES)
        message["content"] = "".join(texts)
    return message


def _with_arguments(call: dict) -> dict:
    """Return the call with its arguments as a dict: nearly all templates write a dict as JSON."""
    function = call["function"]
    arguments, *more = _objects(function.get("arguments"), "the field `arguments` of a tool call") or [{}]
    if more:
        raise mistake("dataset_name", "a tool call has several objects as arguments", "write one object")
    return {**call, "function": {**function, "arguments": arguments}}


def _functions(value: Any, what: str) -> list[dict]:
    """Return tools or tool calls in the form that transformers passes to a template."""
    found = _objects(value, what)
    return [one if isinstance(one.get("function"), dict) else {"type": "function", "function": one} for one in found]


def _objects(value: Any, what: str) -> list[dict]:
    """Return the objects in a value: one object or a list, perhaps written as JSON."""
    if isinstance(value, str):
        value = _decoded(value or "[]")
    found = [_decoded(one) for one in (value if isinstance(value, list) else [value] if value else [])]
    if not all(isinstance(one, dict) for one in found):
        raise mistake("dataset_name", f"{what} is not a JSON object: {_short(value)}", "write JSON in every row")
    return found


def _decoded(value: Any) -> Any:
    """Decode a text of JSON. Return any other text or value unchanged."""
    with contextlib.suppress(ValueError, TypeError):
        return json.loads(value)
    return value


def _without_none(value: Any) -> Any:
    """Drop keys with the value None, because Arrow gives each message the keys of all messages."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _short(value: Any) -> str:
    return one_line(str(value)[:100])


# --- The template --------------------------------------------------------------------------------


class _Template:
    """A chat, and the text that the tokenizer's chat template renders from it."""

    def __init__(self, tokenizer, chat: Messages, tools: list[dict] | None):
        self.tokenizer, self.chat, self.tools = tokenizer, chat, tools
        self.source = tokenizer.get_chat_template(tools=tools)
        self.text = self.render(chat)
        names = [call["function"].get("name") for message in chat for call in message.get("tool_calls") or []]
        # Templates without tool support leave tool calls out silently.
        if names and ("tool_calls" not in self.source or not all(str(name) in self.text for name in names)):
            what = f"the tokenizer's chat template leaves out the assistant's call of {names[0]}"
            fix = "use a model whose chat template writes tool calls, or chats without tool calls"
            raise mistake("dataset_name", what, fix)
        self._require_whole()

    def _require_whole(self) -> None:
        """Raise `UserError` if the template leaves out a message or the last answer's reasoning.

        R1's template leaves out all reasoning; Qwen 3's, only the reasoning of earlier answers.
        """
        written = "".join(self.text.split())
        for number, message in enumerate(self.chat):
            content, role = message["content"], message["role"]
            is_answer = role == "assistant" and number == len(self.chat) - 1
            rest = content.rpartition("</think>")[2] if is_answer else ""
            if role == "tool" or (role == "assistant" and not is_answer):
                continue
            thoughts = [name for name in _REASONING if message.get(name)] if is_answer and _teaches(message) else []
            for name, less in (("content", rest), *((name, None) for name in thoughts)):
                if message[name] == less or "".join(str(message[name]).split()) in written:
                    continue
                without = [*self.chat[:number], _without_none({**message, name: less}), *self.chat[number + 1 :]]
                if self.text == self.render(without):
                    part = "the reasoning of an answer" if rest or thoughts else f"a message of the {role}"
                    fix = "save the model with a chat_template.jinja that writes the whole chat, or leave that part out"
                    raise mistake("dataset_name", f"the tokenizer's chat template leaves out {part}", fix)

    def render(self, chat: Messages, **options) -> str:
        try:
            return self.tokenizer.apply_chat_template(chat, tools=self.tools, tokenize=False, **options)
        except (TemplateError, TypeError, LookupError, ValueError, AttributeError) as error:  # a template is a program
            what = f"the tokenizer's chat template refuses a chat: {one_line(error)}; the chat is {str(chat)[:200]}"
            fix = "write the template's roles in its order; without a system role, put that text into a user message"
            raise mistake("dataset_name", what, fix) from None

    def marked(self) -> Spans | None:
        """Return the spans in the template's {% generation %} blocks; None without such blocks."""
        if not re.search(r"\{%-?\s*generation\s*-?%\}", self.source):
            return None
        options = dict(tools=self.tools, chat_template=self.source, return_assistant_tokens_mask=True)
        _, (spans,) = render_jinja_template([self.chat], **options, **self.tokenizer.special_tokens_map)
        return spans

    def spans(self, teaches: Sequence[bool]) -> Spans:
        """Return the spans of the messages to learn, including the template's text around them."""
        found, count = [], len(self.chat)
        for learned, group in groupby(range(count), teaches.__getitem__):
            first, *rest = group
            if learned:
                end = [first, *rest][-1] + 1
                found.append((self._begin(first), self._begin(end) if end < count else len(self.text)))
        return found

    def answers(self, teaches: Sequence[bool]) -> Spans:
        """Return the spans of the answers to learn, without the line break after an answer."""
        found = []
        for number in compress(range(len(self.chat)), teaches):
            rendered = self.render(self.chat[: number + 1])
            shorter = rendered.rstrip().removesuffix(self.tokenizer.eos_token or "")
            if not self.text.startswith(rendered) and shorter[-1:].isspace():
                rendered = shorter  # Phi-3's template ends a chat by EOS, after the line break of the answer
            end = len(rendered.rstrip()) if self.text.startswith(rendered) else self._end(number)
            found.append((self._begin(number), end))
        return found

    def _end(self, number: int) -> int:
        """Return the index in `text` where an answer ends, for a template that writes the last
        answer differently, as Qwen 3's does. A mark replaces the answer. Behind the mark, the chat
        has all later text or, without later messages, the token that closes the answer.
        """
        chat = [*self.chat[:number], {**self.chat[number], "content": "\0"}]
        after = closing = ""
        with contextlib.suppress(UserError):  # a template may refuse this content
            after = self.render([*chat, *self.chat[number + 1 :]]).partition("\0")[2]
            closing = self.render(chat).partition("\0")[2].rstrip()
        end = len(self.text) - len(after)
        if not (after and closing and self.text.endswith(after) and after.startswith(closing)):
            what = "the chat template rewrites earlier messages, so the assistant's words cannot be found"
            fix = "use a chat template that marks these words with {% generation %} ... {% endgeneration %}"
            raise mistake("assistant_only_loss", what, fix)
        return end + len(closing)

    def _begin(self, number: int) -> int:
        """Return where a message begins in `text`. An answer begins after the generation prompt.

        Some templates write earlier messages differently if no message follows them. For these
        templates, find the first character that changes with the message's content.
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
            raise mistake("dataset_name", what, "use chats without such messages")
        pairs = enumerate(zip(self.text, other, strict=False))
        return next((place for place, (one, two) in pairs if one != two), len(self.text))
