"""Formats of public data sets: what of their rows a model reads, and what of that it learns."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.data.chats import encode_chats
from launch.data.demo import CHAT_TEMPLATE, demo_tokenizer
from launch.data.load import load_data
from tests.support.rows import decoded, jsonl, learned, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")

# As models write tools and calls: the tools first, each call and each result between tags.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city today",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}

CALLED = '<call>get_weather {"city": "Rome"}</call><|im_end|>'
WHOLE_CALL = (
    f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n"
    "<|im_start|>user\nHow warm is it in Rome?<|im_end|>\n"
    f"<|im_start|>assistant\n{CALLED}\n"
    '<|im_start|>tool\n{"celsius": 31}<|im_end|>\n'
    "<|im_start|>assistant\nIt is 31 °C.<|im_end|>\n"
)
GREETING = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho wrote Emma?<|im_end|>\n"
    "<|im_start|>assistant\nJane Austen.<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n"
    "<|im_start|>assistant\n1815.<|im_end|>\n"
)

SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Who wrote Emma?"},
    {"from": "gpt", "value": "Jane Austen."},
    {"from": "human", "value": "When?"},
    {"from": "gpt", "value": "1815."},
]
SHAREGPT_TOOLS = [
    {"from": "human", "value": "How warm is it in Rome?"},
    {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Rome"}}'},
    {"from": "observation", "value": '{"celsius": 31}'},
    {"from": "gpt", "value": "It is 31 °C."},
]
OPENAI_TOOLS = [
    {"role": "user", "content": "How warm is it in Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": '{"celsius": 31}'},
    {"role": "assistant", "content": "It is 31 °C."},
]
NAMES = {"human": "user", "gpt": "assistant"}
LMSYS = [{"role": NAMES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in SHAREGPT]
SPOKEN = "Jane Austen.<|im_end|>1815.<|im_end|>"
SAID_OF_TOOLS = f"{CALLED}It is 31 °C.<|im_end|>"

# Rows, everything that the model reads, what of it is learned of the assistant alone
CHATS = {
    "ShareGPT": ({"id": "x_0", "conversations": SHAREGPT}, GREETING, SPOKEN),
    "ShareGPT, a column for the system": (
        {"system": "Be brief.", "conversations": SHAREGPT[1:]}, GREETING, SPOKEN,
    ),
    "ShareGPT, role and content": (
        {"conversations": [{"role": turn["from"], "content": turn["value"]} for turn in SHAREGPT]}, GREETING, SPOKEN,
    ),
    "LMSYS": ({"conversation_id": "a", "conversation": LMSYS, "turn": 2}, GREETING, SPOKEN),
    "ShareGPT, tools as JSON": (
        {"conversations": SHAREGPT_TOOLS, "tools": json.dumps([WEATHER])}, WHOLE_CALL, SAID_OF_TOOLS,
    ),
    "messages, tools as a list": ({"messages": OPENAI_TOOLS, "tools": [TOOL]}, WHOLE_CALL, SAID_OF_TOOLS),
    "messages, tools as JSON": ({"messages": OPENAI_TOOLS, "tools": json.dumps([TOOL])}, WHOLE_CALL, SAID_OF_TOOLS),
    "messages, each tool as JSON": ({"messages": OPENAI_TOOLS, "tools": [json.dumps(TOOL)]}, WHOLE_CALL, SAID_OF_TOOLS),
}  # fmt: skip


@pytest.fixture
def tool_tokenizer():
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_read_through_the_template_and_the_assistant_is_learned(name, tmp_path, tool_tokenizer):
    row, whole, spoken = CHATS[name]
    for assistant_only, wanted in ((False, whole), (True, spoken)):
        run = run_with(dataset_name=jsonl(tmp_path, [row]), assistant_only_loss=assistant_only)
        ready = load_data(run, tool_tokenizer).train[0]
        assert (tool_tokenizer.decode(ready["input_ids"]), learned(tool_tokenizer, ready)) == (whole, wanted)


def test_a_template_that_marks_the_assistant_marks_its_calls(tmp_path, tool_tokenizer):
    head, turn, tail = TOOL_TEMPLATE.partition("{{ '<|im_start|>' + message.role + '\n' + message.content }}")
    body, end, rest = tail.partition("{% endfor %}{{ '<|im_end|>\n' }}")
    marked = (
        "{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}{% generation %}"
        "{{ message.content }}" + body + "{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    )
    tool_tokenizer.chat_template = head + marked + rest
    run = run_with(dataset_name=jsonl(tmp_path, [CHATS["messages, tools as a list"][0]]), assistant_only_loss=True)
    row = load_data(run, tool_tokenizer).train[0]
    assert turn and end and learned(tool_tokenizer, row) == SAID_OF_TOOLS
    assert tool_tokenizer.decode(row["input_ids"]) == WHOLE_CALL


def test_two_calls_at_once_are_two_calls(tmp_path, tool_tokenizer):
    calls = [{"name": "get_weather", "arguments": {"city": city}} for city in ("Rome", "Oslo")]
    chat = [SHAREGPT_TOOLS[0], {"from": "function_call", "value": json.dumps(calls)}]
    run = run_with(dataset_name=jsonl(tmp_path, [{"conversations": chat}]), assistant_only_loss=True)
    expected = "".join(f'<call>get_weather {{"city": "{city}"}}</call>' for city in ("Rome", "Oslo"))
    assert learned(tool_tokenizer, load_data(run, tool_tokenizer).train[0]) == f"{expected}<|im_end|>"


def test_parquet_fills_in_keys_that_the_template_does_not_see(tmp_path, tool_tokenizer):
    """Arrow gives every message and every tool the keys of all others, with None."""
    other = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    call = {"id": "2", "type": "function", "function": {"name": "now", "arguments": {"zone": "CET"}}}
    first = [OPENAI_TOOLS[0], {**OPENAI_TOOLS[1], "tool_calls": [{**CALL, "function": {**CALL["function"]}}]}]
    first[1]["tool_calls"][0]["function"]["arguments"] = {"city": "Rome"}
    rows = [
        {"messages": [*first, *OPENAI_TOOLS[2:]], "tools": [TOOL]},
        {"messages": [OPENAI_TOOLS[0], {"role": "assistant", "tool_calls": [call]}], "tools": [other]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    data = load_data(run_with(dataset_name=str(tmp_path / "data.parquet")), tool_tokenizer)
    assert decoded(tool_tokenizer, data.train)[0] == WHOLE_CALL
    assert "null" not in decoded(tool_tokenizer, data.train)[1]


def test_a_template_that_takes_arguments_as_text_gets_them_so(tool_tokenizer):
    """DeepSeek's does: it adds them to a text."""
    tool_tokenizer.chat_template = TOOL_TEMPLATE.replace("arguments | tojson", "arguments")
    rows = {"messages": [OPENAI_TOOLS], "tools": [[TOOL]]}
    ids, _ = encode_chats(rows, tool_tokenizer, "messages", assistant_only=False)
    assert tool_tokenizer.decode(ids[0]) == WHOLE_CALL


# --- Prompt and completion -----------------------------------------------------------------------

ALPACA = [
    {"instruction": "Translate to French.", "input": "Good morning", "output": "Bonjour"},
    {"instruction": "Name a prime number.", "input": "", "output": "7"},
    {"instruction": "Say nothing.", "input": "", "output": ""},
]
ANSWERS = ["Bonjour<|im_end|>\n", "7<|im_end|>\n"]


def test_alpaca_is_a_chat_whose_answer_is_learned(tmp_path, tokenizer):
    data = load_data(run_with(dataset_name=jsonl(tmp_path, ALPACA)), tokenizer)
    assert decoded(tokenizer, data.train) == [
        "<|im_start|>user\nTranslate to French.\n\nGood morning<|im_end|>\n<|im_start|>assistant\nBonjour<|im_end|>\n",
        "<|im_start|>user\nName a prime number.<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n",
    ]
    assert [learned(tokenizer, row) for row in data.train] == ANSWERS
    assert "1 left out" in data.description and "instruction and output through the chat template" in data.description


def test_alpaca_without_a_chat_template_is_stanfords_text(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = None
    data = load_data(run_with(dataset_name=jsonl(tmp_path, ALPACA)), tokenizer)
    opening = "Below is an instruction that describes a task"
    assert decoded(tokenizer, data.train) == [
        f"{opening}, paired with an input that provides further context. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nTranslate to French.\n\n### Input:\nGood morning\n\n"
        "### Response:Bonjour<|endoftext|>",
        f"{opening}. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nName a prime number.\n\n### Response:7<|endoftext|>",
    ]
    assert [learned(tokenizer, row) for row in data.train] == ["Bonjour<|endoftext|>", "7<|endoftext|>"]


@pytest.mark.parametrize("chosen", [{"completion_only_loss": False}, {"assistant_only_loss": True}], ids=str)
def test_what_of_alpaca_is_learned_can_be_chosen(chosen, tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, ALPACA[:1]), **chosen)
    row = load_data(run, tokenizer).train[0]
    expected = "Bonjour<|im_end|>" if "assistant_only_loss" in chosen else tokenizer.decode(row["input_ids"])
    assert learned(tokenizer, row) == expected


def test_alpaca_that_holds_its_text_too_is_still_alpaca_unless_another_column_is_named(tmp_path, tokenizer):
    rows = [{**ALPACA[0], "text": "whole", "body": "another"}]
    file = jsonl(tmp_path, rows)
    assert "Bonjour" in learned(tokenizer, load_data(run_with(dataset_name=file), tokenizer).train[0])
    named = load_data(run_with(dataset_name=file, dataset_text_field="body"), tokenizer)
    assert decoded(tokenizer, named.train) == ["another<|endoftext|>"]


def test_tools_and_a_system_message_beside_a_prompt_or_an_instruction(tmp_path, tool_tokenizer):
    rows = [
        {"prompt": OPENAI_TOOLS[:1], "completion": OPENAI_TOOLS[1:], "tools": [TOOL]},
        {"prompt": LMSYS[1:2], "completion": LMSYS[2:3], "system": "Be brief."},
        {"instruction": "a", "output": "A", "tools": [TOOL]},
    ]
    row, greeting, alpaca = load_data(run_with(dataset_name=jsonl(tmp_path, rows)), tool_tokenizer).train
    assert GREETING.startswith(tool_tokenizer.decode(greeting["input_ids"]))
    assert "get_weather" in tool_tokenizer.decode(alpaca["input_ids"])
    assert tool_tokenizer.decode(row["input_ids"]) == WHOLE_CALL
    assert learned(tool_tokenizer, row) == WHOLE_CALL[WHOLE_CALL.index(CALLED) :]
    run = run_with(dataset_name=jsonl(tmp_path, rows), assistant_only_loss=True)
    assert learned(tool_tokenizer, load_data(run, tool_tokenizer).train[0]) == SAID_OF_TOOLS


def said(*turns):
    """A chat in which the user and the assistant take turns, between the tags."""
    names = ("user", "assistant")
    return "".join(f"<|im_start|>{names[n % 2]}\n{words}<|im_end|>\n" for n, words in enumerate(turns))


UNUSED = {
    "not used: history": {"messages": LMSYS, "history": [["a", "A"]]},
    "not used: system": {"instruction": "a", "output": "A", "system": "Be brief."},
    "not used: tools": {"messages": LMSYS, "tools": "[]"},
}


@pytest.mark.parametrize("note", UNUSED)
def test_what_stands_beside_a_conversation_and_is_not_used_is_told(note, tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = None if "system" in note else CHAT_TEMPLATE
    assert note in load_data(run_with(dataset_name=jsonl(tmp_path, [UNUSED[note]])), tokenizer).description


# --- Several formats in one file -----------------------------------------------------------------

MIXED = [
    ({"text": "plain"}, "plain<|endoftext|>"),
    ({"messages": LMSYS[1:3]}, said("Who wrote Emma?", "Jane Austen.")),
    ({"messages": [OPENAI_TOOLS[0], {"role": "assistant", "tool_calls": [CALL]}]},
     said("How warm is it in Rome?", CALLED.removesuffix("<|im_end|>"))),
    ({"conversations": SHAREGPT, "id": "x"}, GREETING),
    ({"prompt": "2+2=", "completion": " 4"}, " 4<|endoftext|>"),
    ({"prompt": "2+2=", "completion": None}, ""),
    ({"instruction": "c", "output": "C"}, "C<|im_end|>\n"),
    ({"input_ids": [5, 6], "labels": [-100, 6]}, "'"),
    ({"id": "nothing"}, ""),
    ({"text": ""}, ""),
]  # fmt: skip


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(st.integers(0, len(MIXED) - 1), max_size=40), parquet=st.booleans())
def test_each_row_is_read_in_its_own_format(drawn, parquet, tmp_path_factory, tool_tokenizer):
    """As if it were alone, whatever stands beside it."""
    folder = tmp_path_factory.mktemp("mixed")
    rows, wanted = zip(*(MIXED[number] for number in [0, *drawn]), strict=True)
    file = jsonl(folder, rows)
    if parquet:
        file = str(folder / "data.parquet")
        filled = [dict.fromkeys(name for row in rows for name in row) | row for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(filled), file)
    data = load_data(run_with(dataset_name=file), tool_tokenizer)
    assert [learned(tool_tokenizer, row) for row in data.train] == [text for text in wanted if text]


def test_chats_have_no_completion(tmp_path, tokenizer):
    found = problem(run_with(dataset_name=jsonl(tmp_path, [{"messages": LMSYS}]), completion_only_loss=True), tokenizer)
    assert found.subject == "completion_only_loss" and "--assistant_only_loss" in found.fix


@pytest.mark.parametrize(
    ("flag", "other"), [("assistant_only_loss", {"messages": LMSYS}), ("completion_only_loss", MIXED[4][0])]
)
def test_what_is_only_for_one_format_is_refused_for_the_others(flag, other, tmp_path, tokenizer):
    found = problem(run_with(dataset_name=jsonl(tmp_path, [*texts("a", "b"), other]), **{flag: True}), tokenizer)
    assert found.subject == flag and "the data has text, in 2 of 3 rows" in found.what


def test_the_order_of_the_formats_is_told_and_a_named_column_comes_first(tmp_path, tokenizer):
    file = jsonl(tmp_path, [{"messages": LMSYS, "body": "both"}, {"messages": LMSYS[:3], "body": None}])
    data = load_data(run_with(dataset_name=file, dataset_text_field="body"), tokenizer)
    assert decoded(tokenizer, data.train)[0] == "both<|endoftext|>" and "Emma" in decoded(tokenizer, data.train)[1]
    assert data.description.endswith("each row is read by the first of these that it has: body, messages")


# --- What is refused -----------------------------------------------------------------------------

PAIRS = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
WRONG = {
    "preference pairs": (PAIRS, "preference pairs", "DPOTrainer"),
    "preference pairs of chats": ({"chosen": LMSYS, "rejected": LMSYS}, "preference pairs", "DPOTrainer"),
    "prompts": ({"prompt": "2+2=", "ground_truth": "4"}, "a prompt and no completion", "completion"),
    "an unknown role": ({"conversations": [{"from": "narrator", "value": "x"}]}, "from 'narrator'", "human, gpt"),
    "a call that is not JSON": (
        {"conversations": [{"from": "function_call", "value": "get_weather()"}]}, "a tool call is not JSON", "JSON",
    ),
    "tools that are not JSON": ({"messages": OPENAI_TOOLS, "tools": "get_weather"}, "tools is not JSON", "JSON"),
    "chats written as text": ({"conversations": "Hello"}, "not lists of messages", "role"),
    "an answer that is a number": ({"instruction": "2+2", "output": 4}, "int64, not text", "a text"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_learned_is_refused_in_one_line(name, tmp_path, tool_tokenizer):
    row, what, fix = WRONG[name]
    found = problem(run_with(dataset_name=jsonl(tmp_path, [row])), tool_tokenizer)
    assert found.subject == "dataset_name" and what in found.what and fix in found.fix
    assert "dataset_text_field" not in str(found) and "\n" not in str(found)


def test_preference_data_that_holds_chats_too_is_learned_as_chats(tmp_path, tokenizer):
    rows = [{**PAIRS, "messages": LMSYS}]
    assert len(load_data(run_with(dataset_name=jsonl(tmp_path, rows)), tokenizer).train) == 1


def test_a_template_without_tool_calls_would_leave_them_out(tmp_path, tokenizer):
    """It would train on an empty message, as Phi-3's and Qwen2.5-VL's templates do."""
    found = problem(run_with(dataset_name=jsonl(tmp_path, [{"messages": OPENAI_TOOLS}])), tokenizer)
    assert "leaves out that the assistant calls get_weather" in found.what
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_the_fix_for_a_missing_text_column_names_only_columns_with_texts(tmp_path, tokenizer):
    rows = [{"body": "a", "title": "b", "pages": 3, "tags": ["x"]}]
    found = problem(run_with(dataset_name=jsonl(tmp_path, rows)), tokenizer)
    assert found.fix.startswith("--dataset_text_field with one of body, title; or data with messages, conversations")
    nothing = problem(run_with(dataset_name=jsonl(tmp_path, [{"pages": 3}], "numbers.jsonl")), tokenizer)
    assert "--dataset_text_field" not in nothing.fix
