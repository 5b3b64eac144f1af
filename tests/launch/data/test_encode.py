"""Tokens and labels of every format of public data sets: what of a row a model reads, and what of
that it learns.
"""

import json

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from launch.data.demo import demo_tokenizer
from launch.data.load import load_data
from tests.support.models import chat_tokenizer
from tests.support.rows import answer, decoded, jsonl, learned, problem, run_with, texts, user

pytestmark = pytest.mark.usefixtures("own_cache")

CHAT_TEMPLATE = chat_tokenizer().chat_template
UNMARKED = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As of Qwen3 and others: of all answers the last one alone is preceded by a thought.
OF_ANSWERS = "{% if message['role'] == 'assistant' %}"
THINKING = UNMARKED.replace(OF_ANSWERS, OF_ANSWERS + "{{ '<think></think>' if loop.last else '' }}")
# As models write tools and calls: the tools first, each call and each result between tags.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chatting(template):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def said(*turns):
    """A chat in which the user and the assistant take turns, as the template writes it."""
    names = ("user", "assistant")
    return "".join(f"<|im_start|>{names[n % 2]}\n{words}<|im_end|>\n" for n, words in enumerate(turns))


CHAT = [user("Hello"), answer("Hi!"), user("Bye"), answer("See you")]
SPOKEN = "Hi!<|im_end|>See you<|im_end|>"
TURNS = [("system", "Be brief."), ("human", "Hello"), ("gpt", "Hi!"), ("human", "Bye"), ("gpt", "See you")]
SHAREGPT = [{"from": who, "value": words} for who, words in TURNS]
NAMED = [{"role": who, "content": words} for who, words in TURNS]
WHOLE = said("Hello", "Hi!", "Bye", "See you")
BRIEF = f"<|im_start|>system\nBe brief.<|im_end|>\n{WHOLE}"

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city today",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": WEATHER}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
CALLS = [
    user("How warm is it in Rome?"),
    answer(None, tool_calls=[CALL]),
    {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": '{"celsius": 31}'},
    answer("It is 31 °C."),
]
SHAREGPT_CALLS = [
    {"from": "human", "value": "How warm is it in Rome?"},
    {"from": "function_call", "value": '{"name": "get_weather", "arguments": {"city": "Rome"}}'},
    {"from": "observation", "value": '{"celsius": 31}'},
    {"from": "gpt", "value": "It is 31 °C."},
]
CALLED = '<call>get_weather {"city": "Rome"}</call><|im_end|>'
WHOLE_CALL = (
    f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n"
    "<|im_start|>user\nHow warm is it in Rome?<|im_end|>\n"
    f"<|im_start|>assistant\n{CALLED}\n"
    '<|im_start|>tool\n{"celsius": 31}<|im_end|>\n'
    "<|im_start|>assistant\nIt is 31 °C.<|im_end|>\n"
)
SAID_OF_CALLS = f"{CALLED}It is 31 °C.<|im_end|>"


# --- Chats ---------------------------------------------------------------------------------------

# Rows, everything that the model reads, what of it is learned of the assistant alone
CHATS = {
    "messages": ({"messages": CHAT}, WHOLE, SPOKEN),
    "wide characters": ({"messages": [user("naïve 漢"), answer("é😀")]}, said("naïve 漢", "é😀"), "é😀<|im_end|>"),
    "a system message of null": (  # some templates would write "None"
        {"messages": [{"role": "system", "content": None}, *CHAT]}, BRIEF.replace("Be brief.", ""), SPOKEN,
    ),
    "parts": ({"messages": [user([{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]), *CHAT[1:]]},
        WHOLE, SPOKEN),
    "ShareGPT": ({"id": "x_0", "conversations": SHAREGPT}, BRIEF, SPOKEN),
    "ShareGPT, a column for the system": ({"system": "Be brief.", "conversations": SHAREGPT[1:]}, BRIEF, SPOKEN),
    "ShareGPT, role and content": ({"conversations": NAMED}, BRIEF, SPOKEN),
    "LMSYS": ({"conversation_id": "a", "conversation": NAMED, "turn": 2}, BRIEF, SPOKEN),
    "ShareGPT, tools as JSON": (
        {"conversations": SHAREGPT_CALLS, "tools": json.dumps([WEATHER])}, WHOLE_CALL, SAID_OF_CALLS,
    ),
    "tools as a list": ({"messages": CALLS, "tools": [TOOL]}, WHOLE_CALL, SAID_OF_CALLS),
    "tools as JSON": ({"messages": CALLS, "tools": json.dumps([TOOL])}, WHOLE_CALL, SAID_OF_CALLS),
    "tools as a list of JSON": ({"messages": CALLS, "tools": [json.dumps(TOOL)]}, WHOLE_CALL, SAID_OF_CALLS),
    "the assistant first": ({"messages": CHAT[1:]}, WHOLE.removeprefix(said("Hello")), SPOKEN),
    "a role of the template": ({"messages": [{"role": "ipython", "content": "x"}, *CHAT]},
        "<|im_start|>ipython\nx<|im_end|>\n" + WHOLE, SPOKEN),
}  # fmt: skip


@pytest.mark.parametrize(("row", "whole", "spoken"), CHATS.values(), ids=CHATS)
def test_chats_use_the_chat_template_and_assistant_only_loss_masks_all_but_the_assistant(row, whole, spoken, tmp_path):
    tokenizer = chatting("{# ipython #}" + TOOLS)
    for assistant_only, wanted in ((False, whole), (True, spoken)):
        run = run_with(dataset_name=jsonl(tmp_path, [row]), assistant_only_loss=assistant_only)
        ready = load_data(run, tokenizer).train[0]
        assert (tokenizer.decode(ready["input_ids"]), learned(tokenizer, ready)) == (whole, wanted)


def test_null_keys_that_parquet_fills_in_do_not_reach_the_chat_template(tmp_path):
    """Arrow gives every message and every tool the keys of all others, with None."""
    other = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    calls = [{**CALL, "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}]
    late = {"id": "2", "type": "function", "function": {"name": "now", "arguments": {"zone": "CET"}}}
    rows = [
        {"messages": [CALLS[0], answer(None, tool_calls=calls), *CALLS[2:]], "tools": [TOOL]},
        {"messages": [CALLS[0], answer(None, tool_calls=[late])], "tools": [other]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    data = load_data(run_with(dataset_name=str(tmp_path / "data.parquet")), chatting(TOOLS))
    first, second = decoded(demo_tokenizer(), data.train)
    assert first == WHOLE_CALL and "null" not in second


BARE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
TEMPLATES = {
    "Qwen 3: a thought before the last answer": (THINKING, "Hi!<|im_end|><think></think>See you<|im_end|>"),
    "Phi-3: EOS after the chat, not after each answer": (
        UNMARKED + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}", f"{SPOKEN}\n<|endoftext|>",
    ),
    # Without the EOS that is added here, the model would never stop.
    "GLM-4: nothing after an answer": (
        BARE + "{% if add_generation_prompt %}<assistant>{% endif %}", "Hi!See you<|endoftext|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_assistant_only_loss_learns_each_answer_as_the_template_writes_it_and_eos_at_the_end(name, tmp_path):
    template, wanted = TEMPLATES[name]
    run = run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT}]), assistant_only_loss=True)
    assert learned(demo_tokenizer(), load_data(run, chatting(template)).train[0]) == wanted


def test_assistant_only_loss_is_refused_if_the_template_ends_the_last_answer_unlike_the_others(tmp_path):
    """As that of gpt-oss: the end of the earlier answers is then unknown."""
    run = run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT}]), assistant_only_loss=True)
    template = THINKING.replace("'<|im_end|>'", "('<|return|>' if loop.last else '<|end|>')")
    assert problem(run, chatting(template)).subject == "assistant_only_loss"


EACH = "{%% for message in messages %%}%s{%% endfor %%}"
NO_SYSTEM = EACH % "{% if message['role'] != 'system' %}{{ message['content'] }}<|im_end|>{% endif %}"
NO_REASONING = EACH % "{{ message['content'].split('</think>')[-1] }}<|im_end|>"  # as DeepSeek-R1's
THOUGHT = [user("2+2?"), answer("<think>Even.</think>4")]


@pytest.mark.parametrize(
    ("template", "chat", "what"),
    [
        (None, CHAT, "has no chat template"),
        (CHAT_TEMPLATE, CALLS, "leaves out the assistant's call of get_weather"),  # as Phi-3's and Qwen2.5-VL's
        (NO_SYSTEM, [{"role": "system", "content": "Be brief."}, *THOUGHT], "leaves out a message of the system"),
        (NO_REASONING, THOUGHT, "leaves out the reasoning of an answer"),
        (CHAT_TEMPLATE, [CHAT[0], answer("4", reasoning_content="Even.")], "leaves out the reasoning of an answer"),
    ],
)
def test_a_chat_is_refused_if_its_template_is_missing_or_omits_a_part_of_it(template, chat, what, tmp_path):
    """Without a call, it would train on an empty message."""
    run = run_with(dataset_name=jsonl(tmp_path, [{"messages": chat}]))
    assert what in problem(run, chatting(template)).what


@pytest.mark.parametrize(
    "last",
    [
        answer("4", reasoning_content="Even.", weight=0),
        answer("4", reasoning_content="", thinking=False),
        answer("4", reasoning=[]),
    ],
)
def test_a_chat_is_legal_if_its_template_leaves_out_only_reasoning_that_is_empty_or_not_learned(last, tmp_path):
    run = run_with(dataset_name=jsonl(tmp_path, [{"messages": [*CHAT[:2], CHAT[2], last]}]), assistant_only_loss=True)
    assert "Hi!" in learned(demo_tokenizer(), load_data(run, chatting(CHAT_TEMPLATE)).train[0])


# --- Messages that are not learned ---------------------------------------------------------------

TO_ANSWER, BETWEEN = (f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n" for words in ("Hello", "Bye"))
LAST = "See you<|im_end|>\n"
MUTED = {
    "an answer of null": answer(None),
    "an empty answer": answer(""),
    "an answer of spaces": answer(" "),
    "a weight of 0": answer("Hi!", weight=0),
    "a weight of 0 in ShareGPT": {"from": "gpt", "value": "Hi!", "weight": 0},
}


@pytest.mark.parametrize("name", MUTED)
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("kind", ["conversations", "completion"])
def test_an_assistant_message_that_is_empty_or_has_weight_0_is_masked_in_the_labels(name, template, kind, tmp_path):
    tokenizer, chat = chatting(template), [CHAT[0], MUTED[name], *CHAT[2:]]
    row = {"conversations": chat} if kind == "conversations" else {"prompt": chat[:1], "completion": chat[1:]}
    file = jsonl(tmp_path, [row])
    ready = load_data(run_with(dataset_name=file), tokenizer).train[0]
    words = "Hi!" if "weight" in name else " " * ("spaces" in name)
    assert tokenizer.decode(ready["input_ids"]) == f"{TO_ANSWER}{words}<|im_end|>\n{BETWEEN}{LAST}"
    assert learned(tokenizer, ready) == (TO_ANSWER if kind == "conversations" else "") + BETWEEN + LAST
    run = run_with(dataset_name=file, assistant_only_loss=True)
    assert learned(tokenizer, load_data(run, tokenizer).train[0]) == "See you<|im_end|>"


def test_a_user_message_with_weight_0_is_masked_in_the_labels(tmp_path, tokenizer):
    chat = [{**message, "weight": number % 2} for number, message in enumerate(CHAT)]
    data = load_data(run_with(dataset_name=jsonl(tmp_path, [{"messages": chat}])), tokenizer)
    assert learned(tokenizer, data.train[0]) == "Hi!<|im_end|>\nSee you<|im_end|>\n"


def test_weight_0_masks_an_answer_even_if_the_template_writes_the_last_answer_differently(tmp_path):
    chat = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    (row,) = load_data(run_with(dataset_name=jsonl(tmp_path, [{"messages": chat}])), chatting(THINKING)).train
    wanted = f"{TO_ANSWER}Bye<|im_end|>\n<|im_start|>assistant\n<think></think>{LAST}"
    assert learned(demo_tokenizer(), row) == wanted


# Rows without an answer, and one that has it
NO_ANSWER = {
    "a completion": (
        [{"prompt": "q", "completion": words} for words in (None, "")], {"prompt": "q", "completion": "a"},
    ),
    "a completion of messages": (
        [{"prompt": CHAT[:1], "completion": words} for words in (None, [answer(None)])],
        {"prompt": CHAT[:1], "completion": CHAT[1:2]},
    ),
    "a chat": (
        [{"messages": [CHAT[0], MUTED[name]]} for name in ("an answer of null", "a weight of 0")], {"messages": CHAT},
    ),
    "Alpaca": ([{"instruction": "q", "output": words} for words in (None, "")], {"instruction": "q", "output": "a"}),
    "texts": ([{"text": None}, {"text": ""}], {"text": "a"}),
}  # fmt: skip
OF_CHATS = [(name, {"assistant_only_loss": True}) for name in ("a chat", "a completion of messages", "Alpaca")]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [*((name, {}) for name in NO_ANSWER), ("a completion", {"completion_only_loss": False}), *OF_CHATS],
)
def test_rows_without_an_answer_or_text_are_left_out_and_counted(name, chosen, tmp_path, tokenizer):
    """However many such rows are tokenized together."""
    without, row = NO_ANSWER[name]
    data = load_data(run_with(dataset_name=jsonl(tmp_path, [*without * 150, row]), **chosen), tokenizer)
    assert len(data.train) == 1
    assert "300 rows left out (first: row 1): the text or answer is missing" in data.description


def test_empty_answers_between_others_are_counted_and_not_learned(tmp_path, tokenizer):
    chat = [{"role": "assistant", "content": " "}, *CHAT, {"role": "assistant", "content": "", "weight": 0}]
    data = load_data(run_with(dataset_name=jsonl(tmp_path, [{"messages": chat}, {"messages": CHAT}] * 3)), tokenizer)
    assert data.description.endswith(", 3 empty answers not learned")


# --- Texts, prompts and completions ---------------------------------------------------------------

ALPACA = {"instruction": "Translate to French.", "input": "Good morning", "output": "Bonjour"}
TASK = {"instruction": "Name a prime number.", "input": "", "output": "7"}
# Rows, settings, everything that the model reads, what of it is learned
LEARNED = {
    "a text": ({"text": "a b"}, {}, "a b<|endoftext|>", "a b<|endoftext|>"),
    "a text that is cut": ({"text": "abcdef"}, {"max_length": 4}, "abcd", "abcd"),
    "a completion": ({"prompt": "2+2=", "completion": " 4"}, {}, "2+2= 4<|endoftext|>", " 4<|endoftext|>"),
    "a prompt too": (
        {"prompt": "2+2=", "completion": " 4"}, {"completion_only_loss": False}, "2+2= 4<|endoftext|>",
        "2+2= 4<|endoftext|>",
    ),
    "a completion of messages": (
        {"prompt": CHAT[:3], "completion": CHAT[3:]}, {}, WHOLE, LAST,
    ),
    "Alpaca": (ALPACA, {}, said("Translate to French.\n\nGood morning", "Bonjour"), "Bonjour<|im_end|>\n"),
    "Alpaca without an input": (TASK, {}, said("Name a prime number.", "7"), "7<|im_end|>\n"),
    "Alpaca with a history": (
        TASK | {"history": [["hi", "ho"]]}, {}, said("hi", "ho") + said("Name a prime number.", "7"), "7<|im_end|>\n",
    ),
    "Alpaca with a text too": ({**TASK, "text": "whole"}, {}, said("Name a prime number.", "7"), "7<|im_end|>\n"),
    "Alpaca without a chat template": (
        ALPACA, {"model_name_or_path": None},
        "Translate to French.\n\nGood morning\n\nBonjour<|endoftext|>", "Bonjour<|endoftext|>",
    ),
    "a history without a chat template": (
        TASK | {"history": [["hi", "ho"]]}, {"model_name_or_path": None},
        "hi\n\nho\n\nName a prime number.\n\n7<|endoftext|>", "7<|endoftext|>",
    ),
    "token ids": ({"input_ids": [5, 6, 7]}, {}, "&'(", "&'("),
    "token ids with labels": ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {}, "&'(", "'("),
    "token ids with padding": ({"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0]}, {}, "&'(", "&'("),
}  # fmt: skip


@pytest.mark.parametrize(("row", "chosen", "whole", "wanted"), LEARNED.values(), ids=LEARNED)
def test_texts_completions_alpaca_rows_and_token_ids_become_input_ids_and_labels(row, chosen, whole, wanted, tmp_path):
    tokenizer = chatting(None if "model_name_or_path" in chosen else CHAT_TEMPLATE)
    (ready,) = load_data(run_with(dataset_name=jsonl(tmp_path, [row]), **chosen), tokenizer).train
    assert (tokenizer.decode(ready["input_ids"]), learned(tokenizer, ready)) == (whole, wanted)


def test_the_tools_and_system_columns_of_prompt_and_instruction_rows_are_read(tmp_path):
    rows = [
        {"prompt": CALLS[:1], "completion": CALLS[1:], "tools": [TOOL]},
        {"prompt": CHAT[:1], "completion": CHAT[1:2], "system": "Be brief."},
        {"instruction": "a", "output": "A", "tools": [TOOL]},
    ]
    tokenizer = chatting(TOOLS)
    row, greeting, alpaca = load_data(run_with(dataset_name=jsonl(tmp_path, rows)), tokenizer).train
    assert BRIEF.startswith(tokenizer.decode(greeting["input_ids"]))
    assert "get_weather" in tokenizer.decode(alpaca["input_ids"])
    assert tokenizer.decode(row["input_ids"]) == WHOLE_CALL
    assert learned(tokenizer, row) == WHOLE_CALL[WHOLE_CALL.index(CALLED) :]


def test_data_is_refused_if_every_prompt_fills_max_length(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, [{"prompt": "too long", "completion": "x"}]), max_length=8)
    assert "all labels are masked" in problem(run, tokenizer).what


def test_llamas_tokenizer_adds_no_space_to_a_completion_and_no_second_bos_to_a_text_that_has_one(tmp_path):
    characters = "<s> </s> \u2581 \n d e f ( x ) a".split(" ")
    llama = Tokenizer(models.BPE({one: number for number, one in enumerate(characters)}, []))
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    llama.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llama, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    rows = [{"prompt": "def f", "completion": "(x)"}, {"prompt": "<s>def f", "completion": " (x)"}]
    found = load_data(run_with(dataset_name=jsonl(tmp_path, rows)), tokenizer).train
    written = ["".join(tokenizer.convert_ids_to_tokens(row["input_ids"])) for row in found]
    assert [text.replace("\u2581", " ") for text in written] == ["<s> def f(x)</s>", "<s> def f (x)</s>"]


def test_a_completion_keeps_its_first_token_if_the_tokenizer_reads_a_line_break_as_a_space(tmp_path):
    tokens = "<s> </s> \u2581 a \u2581a".split(" ")
    xglm = Tokenizer(models.BPE({one: number for number, one in enumerate(tokens)}, [("\u2581", "a")]))
    xglm.normalizer, xglm.pre_tokenizer = normalizers.Replace("\n", " "), pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=xglm, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    (row,) = load_data(run_with(dataset_name=jsonl(tmp_path, [{"prompt": "a", "completion": "a"}])), tokenizer).train
    assert row["input_ids"] == [4, 4, 1] and row["labels"] == [-100, 4, 1]


# --- Several formats in one file -----------------------------------------------------------------

MIXED = [
    ({"text": "plain"}, "plain<|endoftext|>"),
    ({"messages": CHAT[:2]}, said("Hello", "Hi!")),
    ({"messages": [CALLS[0], {"role": "assistant", "tool_calls": [CALL]}]},
     said("How warm is it in Rome?", CALLED.removesuffix("<|im_end|>"))),
    ({"conversations": SHAREGPT, "id": "x"}, BRIEF),
    ({"prompt": "2+2=", "completion": " 4"}, " 4<|endoftext|>"),
    ({"prompt": "2+2=", "completion": None}, ""),
    ({"instruction": "c", "output": "C"}, "C<|im_end|>\n"),
    ({"id": "nothing"}, ""),
    ({"text": ""}, ""),
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_each_row_of_a_file_with_several_formats_is_read_in_its_own_format(suffix, tmp_path):
    """As if it were alone, whatever stands beside it."""
    rows, wanted = zip(*MIXED, strict=True)
    file = jsonl(tmp_path, rows)
    if suffix == "parquet":
        file = str(tmp_path / "data.parquet")
        filled = [dict.fromkeys(name for row in rows for name in row) | row for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(filled), file)
    data = load_data(run_with(dataset_name=file), chatting(TOOLS))
    assert [learned(demo_tokenizer(), row) for row in data.train] == [text for text in wanted if text]


def test_an_explicit_dataset_text_field_wins_over_a_messages_column(tmp_path, tokenizer):
    file = jsonl(tmp_path, [{"messages": CHAT, "body": "both"}, {"messages": CHAT, "body": None}])
    data = load_data(run_with(dataset_name=file, dataset_text_field="body"), tokenizer)
    assert decoded(tokenizer, data.train)[0] == "both<|endoftext|>" and "See you" in decoded(tokenizer, data.train)[1]


# --- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "rows", "fix"),
    [
        ("completion_only_loss", [{"messages": CHAT}], "--assistant_only_loss"),
        ("assistant_only_loss", [{"messages": CHAT}, *texts("b")], "messages"),
        ("completion_only_loss", [{"prompt": "a", "completion": "b"}, *texts("b")], "prompt and completion"),
    ],
)
def test_a_loss_flag_for_one_format_is_refused_on_rows_of_another(flag, rows, fix, tmp_path, tokenizer):
    found = problem(run_with(dataset_name=jsonl(tmp_path, rows), **{flag: True}), tokenizer)
    assert found.subject == flag and found.what.startswith(f"row {len(rows)}: the row has no ") and fix in found.fix
