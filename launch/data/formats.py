"""The formats that public data sets have, recognised by their columns, as the messages of a chat
or as prompt and completion.

trl's `maybe_convert_to_chatml` renames the keys of ShareGPT and leaves its roles, so a template
meets `human`, `gpt` and `function_call`. It does not know Alpaca, nor tools written as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from recipes.errors import UserError, mistake

Rows = Mapping[str, list]
Format = tuple[str, ...]  # the columns that it must have
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]

CHATS = ("messages", "conversations", "conversation")  # OpenAI and TRL; ShareGPT; LMSYS and WildChat
ALPACA = ("instruction", "output")  # and perhaps `input`, `history`, `system` and `tools`
COMPLETIONS = ("prompt", "completion")
CONTEXT = ("system", "history", "tools")  # columns that stand beside a conversation
ANSWERS = ("content", "tool_calls", "reasoning_content", "reasoning", "thinking")  # what a message may say
FORMATS = "messages, conversations, prompt and completion, instruction and output, input_ids or a text column"

# ShareGPT's names, LLaMA-Factory's for calls of tools and what they return, and the usual ones.
ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "function_call": "assistant", "observation": "tool", "function_response": "tool",
    "function": "tool",
    "user": "user", "assistant": "assistant", "system": "system", "developer": "developer", "tool": "tool",
}  # fmt: skip

# https://github.com/tatsu-lab/stanford_alpaca, train.py: for models without a chat template
STANFORD = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{context}### Response:"
)
PAIRED = ", paired with an input that provides further context"


# --- Which format --------------------------------------------------------------------------------


def formats_of(columns: Collection[str], text_field: str) -> list[Format]:
    """The formats that rows with these columns may have: each row has the first with a value in it.

    Texts come last, unless another column than the default was named: that one was asked for.
    """
    known = [("input_ids",), *((name,) for name in CHATS), COMPLETIONS, ALPACA]
    others = [columns_of_one for columns_of_one in known if text_field not in columns_of_one]
    ordered = [*others, (text_field,)] if text_field == "text" else [(text_field,), *others]
    return [found for found in ordered if set(found) <= set(columns)]


def by_format(rows: pa.Table, formats: Sequence[Format]) -> list[tuple[np.ndarray, list[str]]]:
    """Of each format the places of its rows, and their columns without those of other formats.

    A row that has a value in none is nowhere.
    """
    found, left = [], np.ones(len(rows), bool)
    for one in formats:
        is_one = left & reduce(np.logical_or, (rows[name].is_valid().to_numpy() for name in one))
        left &= ~is_one
        others = set(chain(*formats)) - set(one)
        if is_one.any():
            found.append((np.flatnonzero(is_one), [name for name in rows.column_names if name not in others]))
    return found


def for_another_objective(columns: Collection[str]) -> UserError | None:
    """What is wrong with data for other objectives than the next token. None for any other."""
    if {"chosen", "rejected"} <= set(columns):
        return mistake(
            "dataset_name",
            "has preference pairs (chosen, rejected), and train.py does not compare answers",
            "TRL's DPOTrainer, with args = fast(args_class=DPOConfig, ...) from `from recipes import fast`",
        )
    if "prompt" in columns:
        return mistake(
            "dataset_name",
            "has a prompt and no completion: there is no answer to learn",
            "data with a column completion; or TRL's GRPOTrainer, which learns from answers of the model's own",
        )
    return None


def described(columns: Collection[str], template: str | None, text_field: str, is_joined: bool) -> str:
    """What a person should know of how the columns were read. Empty if nothing was changed.

    `is_joined`: the examples are joined and cut.
    """
    formats = formats_of(columns, text_field)
    notes = []
    if formats[1:]:
        listed = ", ".join(" and ".join(one) for one in formats)
        notes.append(f"each row is read by the first of these that it has: {listed}")
    if ALPACA in formats:
        read_as = "through the chat template" if template else "as Stanford's text: the model has no chat template"
        notes.append(f"instruction and output {read_as}")
    spoken = [one for one in formats if one in (COMPLETIONS, ALPACA) or (one[0] in CHATS and one != (text_field,))]
    context = [name for name in CONTEXT if name in columns] if spoken else []
    if "tools" in context and template and "tools" not in template:
        notes.append("the column tools is not used: the chat template has no place for it")
        context.remove("tools")
    if COMPLETIONS in formats and (beside := [name for name in context if name != "history"]):
        notes.append(f"{' and '.join(beside)} beside a prompt that is a text: not used, only beside messages")
    if ALPACA in formats and not template and context:
        notes.append(f"not used without a chat template: {', '.join(context)}")
    if "history" in context and spoken != [ALPACA]:
        notes.append("the column history is used only beside instruction and output")
    if is_joined and spoken:
        notes.append("sequences begin in the middle of examples: --packing_strategy bfd keeps them whole")
    return "".join(f"; {note}" for note in notes)


# --- Chats ---------------------------------------------------------------------------------------


def chats_of(rows: Rows, column: str, filled: bool) -> Iterator[tuple[Messages, Tools | None, int]]:
    """The chat of each row as templates take it, its tools, and the number of its first message
    that lies in `column`. It is empty if there is no answer to learn in it.

    `column` holds whole chats, or is "completion", which follows a prompt of messages. `filled`:
    keys that a message does not have may be there, with None (as in Parquet).
    """
    nothing = [None] * len(rows[column])
    prompts = rows["prompt"] if column == "completion" else nothing
    context = (rows.get("tools", nothing), rows.get("system", nothing))
    for opening, turns, tools, system in zip(prompts, rows[column], *context, strict=True):
        said = messages_of(turns or [], filled)
        if not said or not has_answer(said):
            yield [], None, 0
            continue
        chat = with_system([*messages_of(opening or [], filled), *said], system)
        yield chat, tool_schemas(tools), len(chat) - len(said)


def messages_of(turns: Any, filled: bool = False) -> Messages:
    """A chat with role and content, from messages of any format.

    A content of null is an empty text: some templates would write "None", and others refuse it.
    """
    if not isinstance(turns, list):
        what = f"has a chat that is not a list of messages: {_short(turns)}"
        raise mistake("dataset_name", what, 'lists of {"role": ..., "content": ...} in every row')
    return [_message(turn, filled) for turn in turns]


def is_learned(message: dict[str, Any]) -> bool:
    """Whether a message is one to learn from. A `weight` of 0 says that it is not, as for OpenAI
    and axolotl, and an answer that says nothing would teach the model to stop at once.
    """
    if message.get("weight") == 0:
        return False
    if message.get("role") != "assistant" or "content" not in message:  # the template knows what is missing
        return True
    return any(message.get(name) for name in ANSWERS)


def has_answer(chat: Messages) -> bool:
    """Whether any of the assistant's messages can be learned, if there are some."""
    answers = [message for message in chat if message.get("role") == "assistant"]
    return not answers or any(map(is_learned, answers))


def with_system(chat: Messages, system: Any) -> Messages:
    """The chat behind what the column `system` says, unless it has a system message of its own."""
    has_one = isinstance(chat[0], dict) and chat[0].get("role") == "system"
    if has_one or not system or not isinstance(system, str):
        return chat
    return [{"role": "system", "content": system}, *chat]


def tool_schemas(tools: Any) -> Tools | None:
    """Tools as transformers describes them to a template; None if there are none."""
    if isinstance(tools, str):
        tools = _parsed(tools, "the column tools") if tools.strip() else None
    if not tools:
        return None
    listed = [_parsed(tool, "a tool") if isinstance(tool, str) else tool for tool in _as_list(tools)]
    if not all(isinstance(tool, dict) for tool in listed):
        raise mistake("dataset_name", f"has tools that are not objects: {_short(tools)}", "a JSON schema for each tool")
    # A null in a schema means that the key is not there, and Parquet fills them in.
    return [_function(_without_none(tool)) for tool in listed]


def _message(turn: Any, filled: bool) -> dict[str, Any]:
    if not isinstance(turn, dict):
        # A template takes a list of lists for several chats.
        what = f"has a chat with something that is not a message: {_short(turn)}"
        raise mistake("dataset_name", what, 'messages such as {"role": "user", "content": "..."}')
    has_content = "content" in turn or "from" in turn
    turn = _without_none(turn) if filled else turn
    if (speaker := turn.get("from")) is not None:
        if not isinstance(speaker, str) or speaker not in ROLES:
            what = f"has a message from {speaker!r}, which is not a known role"
            raise mistake("dataset_name", what, "one of " + ", ".join(ROLES))
        turn = {"role": speaker, "content": turn.get("value"), "weight": turn.get("weight")}
    role = turn.get("role")
    message = {**turn, "role": ROLES.get(role, role)} if isinstance(role, str) else dict(turn)
    if role == "function_call":
        calls = _tool_calls(turn.get("content"))
        return {"role": "assistant", "content": "", "tool_calls": calls, "weight": turn.get("weight")}
    if calls := message.get("tool_calls") or message.pop("function_call", None):  # OpenAI's older name
        message["tool_calls"] = _tool_calls(calls)
        has_content = True  # templates add texts to it
    if has_content and message.get("content") is None:
        message["content"] = ""
    return message


def _tool_calls(calls: Any) -> list[dict]:
    """Calls with their arguments as an object: nearly all templates write that as JSON."""
    calls = _as_list(_parsed(calls, "a tool call") if isinstance(calls, str) else calls)
    if not all(isinstance(call, dict) for call in calls):
        what = f"has a tool call that is not an object: {_short(calls)}"
        raise mistake("dataset_name", what, '{"name": ..., "arguments": {...}}')
    return [{**call, "function": _with_parsed_arguments(call["function"])} for call in map(_function, calls)]


def _with_parsed_arguments(function: dict) -> dict:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, "the arguments of a tool call") if arguments.strip() else {}
    return {**function, "arguments": arguments if arguments is not None else {}}


def _function(tool: dict) -> dict:
    return tool if isinstance(tool.get("function"), dict) else {"type": "function", "function": tool}


# --- Prompt and completion -----------------------------------------------------------------------


def alpaca_chats(rows: Rows, completion_only: bool) -> dict[str, list]:
    """Prompts and completions of messages. The answers of `history` are learned too, as
    LLaMA-Factory does, and its questions only with all of the prompt.
    """
    nothing = [None] * len(rows["output"])
    columns = (rows["instruction"], rows.get("input", nothing), rows["output"], rows.get("history", nothing))
    chats = []
    for task, given, answer, history in zip(*columns, strict=True):
        rounds = [*_pairs(history), ("\n\n".join(filter(None, (task, given))), answer)]
        speakers = ({"role": "user", "weight": int(not completion_only)}, {"role": "assistant"})
        chats.append([{**speakers[n], "content": words} for both in rounds for n, words in enumerate(both)])
    context = {name: rows[name] for name in ("system", "tools") if name in rows}
    return {"prompt": [chat[:1] for chat in chats], "completion": [chat[1:] for chat in chats], **context}


def stanford_texts(rows: Rows) -> dict[str, list]:
    """Prompts and completions of texts."""
    prompts = []
    for task, given in zip(rows["instruction"], rows.get("input", [None] * len(rows["output"])), strict=True):
        context = f"### Input:\n{given}\n\n" if given else ""
        prompts.append(STANFORD.format(paired=PAIRED if given else "", instruction=task or "", context=context))
    return {"prompt": prompts, "completion": rows["output"]}


def _pairs(history: Any) -> Any:
    pairs = history or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        what = f"has a history that is not a list of pairs: {_short(history)}"
        raise mistake("dataset_name", what, "[[instruction, answer], ...] in every row, or another name for it")
    return pairs


# --- Small steps ---------------------------------------------------------------------------------


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise mistake("dataset_name", f"{what} is not JSON: {_short(text)}", "JSON in every row") from None


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 100 else text[:97] + "..."
