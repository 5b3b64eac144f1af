"""Tokens and labels: the columns of the data tell how it is tokenized and what is learned."""

import pyarrow
import pytest
from datasets import Features

from launch.data.demo import CHAT_TEMPLATE, demo_tokenizer
from launch.data.encode import encode_rows
from launch.data.load import load_data
from tests.support.rows import decoded, jsonl, learned, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")

CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]
SPOKEN = "Hi!<|im_end|>See you<|im_end|>"
UNMARKED_TEMPLATE = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


# --- Texts ---------------------------------------------------------------------------------------


def test_texts_end_with_eos_and_are_learned_whole(tmp_path, tokenizer):
    row = load_data(run_with(dataset_name=jsonl(tmp_path, texts("a b"))), tokenizer).train[0]
    assert learned(tokenizer, row) == "a b<|endoftext|>"


def test_texts_are_cut_at_max_length(tmp_path, tokenizer):
    data = load_data(run_with(dataset_name=jsonl(tmp_path, texts("abcdef")), max_length=4), tokenizer)
    assert decoded(tokenizer, data.train) == ["abcd"]


@pytest.mark.parametrize(
    ("row", "labels"),
    [
        ({}, [5, 6, 7]),
        ({"labels": [-100, 6, 7]}, [-100, 6, 7]),
        ({"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0]}, [5, 6, 7]),
    ],
    ids=["alone", "labels", "padding"],
)
def test_token_ids_are_taken_as_they_are_without_padding(row, labels, tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, [{"input_ids": [5, 6, 7], **row}]))
    assert load_data(run, tokenizer).train[0] == {"input_ids": [5, 6, 7], "labels": labels}


# --- Chats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED_TEMPLATE], ids=["marked", "unmarked"])
def test_only_the_assistant_is_learned(template, tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = template
    wide = [{"role": "user", "content": "naïve 漢"}, {"role": "assistant", "content": "é😀"}]
    file = jsonl(tmp_path, [{"messages": CHAT}, {"messages": wide}])
    train = load_data(run_with(dataset_name=file, assistant_only_loss=True), tokenizer).train
    assert [learned(tokenizer, row) for row in train] == [SPOKEN, "é😀<|im_end|>"]


def test_template_that_rewrites_the_past_is_refused(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}" + UNMARKED_TEMPLATE
    run = run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT}]), assistant_only_loss=True)
    assert problem(run, tokenizer).subject == "assistant_only_loss"


def test_chat_that_begins_with_the_assistant_needs_a_template_that_marks_its_words(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = UNMARKED_TEMPLATE
    run = run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT[1:]}]), assistant_only_loss=True)
    assert "begins with the assistant" in problem(run, tokenizer).what


def test_chats_need_a_chat_template(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = None
    found = problem(run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT}])), tokenizer)
    assert "has no chat template" in found.what


# --- Messages that are not learned ---------------------------------------------------------------

HEAD, TAIL = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "See you<|im_end|>\n"
BETWEEN = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
MUTED = {
    "an answer of null": {"role": "assistant", "content": None},
    "an empty answer": {"role": "assistant", "content": ""},
    "a weight of 0": {"role": "assistant", "content": "Hi!", "weight": 0},
    "a weight of 0 in ShareGPT": {"from": "gpt", "value": "Hi!", "weight": 0},
}


@pytest.mark.parametrize("name", MUTED)
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED_TEMPLATE], ids=["marked", "unmarked"])
@pytest.mark.parametrize("kind", ["conversations", "completion"])
def test_an_answer_that_is_empty_or_has_no_weight_is_read_and_not_learned(name, template, kind, tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = template
    chat = [CHAT[0], MUTED[name], *CHAT[2:]]
    rows = [{"conversations": chat} if kind == "conversations" else {"prompt": chat[:1], "completion": chat[1:]}]
    file = jsonl(tmp_path, rows)
    train = load_data(run_with(dataset_name=file), tokenizer).train
    words = "Hi!" if "weight" in name else ""
    assert tokenizer.decode(train[0]["input_ids"]) == f"{HEAD}{words}<|im_end|>\n{BETWEEN}{TAIL}"
    expected = BETWEEN + TAIL if kind == "completion" else HEAD + BETWEEN + TAIL
    assert learned(tokenizer, train[0]) == expected
    run = run_with(dataset_name=file, assistant_only_loss=True)
    assert learned(tokenizer, load_data(run, tokenizer).train[0]) == "See you<|im_end|>"


def test_a_question_without_weight_is_not_learned(tmp_path, tokenizer):
    chat = [{**message, "weight": number % 2} for number, message in enumerate(CHAT)]
    data = load_data(run_with(dataset_name=jsonl(tmp_path, [{"messages": chat}])), tokenizer)
    assert learned(tokenizer, data.train[0]) == "Hi!<|im_end|>\nSee you<|im_end|>\n"


# As of Qwen3 and others: of all answers the last one alone is preceded by a thought.
OF_ANSWERS = "{% if message['role'] == 'assistant' %}"
THINKING = UNMARKED_TEMPLATE.replace(OF_ANSWERS, OF_ANSWERS + "{{ '<think></think>' if loop.last else '' }}")


def test_a_template_that_writes_the_last_answer_in_another_way_mutes_the_same(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = THINKING
    chat = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    rows = [
        {"messages": chat},
        {"prompt": [], "completion": CHAT[1:2]},
    ]
    data = load_data(run_with(dataset_name=jsonl(tmp_path, rows)), tokenizer)
    whole, alone = (learned(tokenizer, row) for row in data.train)
    assert whole == f"{HEAD}Bye<|im_end|>\n<|im_start|>assistant\n<think></think>{TAIL}"
    assert alone == "Hi!<|im_end|>\n"


NO_ANSWER = {  # rows without an answer, and one that has it
    "a completion": ({"prompt": "q", "completion": None}, {"prompt": "q", "completion": ""}),
    "a completion of messages": (
        {"prompt": CHAT[:1], "completion": None},
        {"prompt": CHAT[:1], "completion": [{"role": "assistant", "content": None}]},
    ),
    "a chat": ({"messages": [CHAT[0], MUTED["an answer of null"]]}, {"messages": [CHAT[0], MUTED["a weight of 0"]]}),
    "Alpaca": ({"instruction": "q", "output": None}, {"instruction": "q", "output": ""}),
    "texts": ({"text": None}, {"text": ""}),
}
ANSWERED = {
    "a completion": {"prompt": "q", "completion": "a"},
    "a completion of messages": {"prompt": CHAT[:1], "completion": CHAT[1:2]},
    "a chat": {"messages": CHAT},
    "Alpaca": {"instruction": "q", "output": "a"},
    "texts": {"text": "a"},
}
OF_CHATS = [(name, {"assistant_only_loss": True}) for name in ("a chat", "a completion of messages", "Alpaca")]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [*((name, {}) for name in ANSWERED), ("a completion", {"completion_only_loss": False}), *OF_CHATS],
)
def test_without_an_answer_there_is_nothing_to_learn(name, chosen, tmp_path, tokenizer):
    """However many such rows are tokenized together."""
    rows = [*NO_ANSWER[name] * 150, ANSWERED[name]]
    data = load_data(run_with(dataset_name=jsonl(tmp_path, rows), **chosen), tokenizer)
    assert len(data.train) == 1 and "300 left out: nothing to learn" in data.description


@pytest.mark.parametrize("name", ANSWERED)
def test_no_rows_have_no_tokens(name, tokenizer):
    rows = pyarrow.Table.from_pylist([ANSWERED[name]])
    assert encode_rows(rows.slice(1), Features.from_arrow_schema(rows.schema), run_with(), tokenizer) == ([], [])


def test_a_content_of_null_is_an_empty_text(tmp_path, tokenizer):
    """Some templates would write "None"."""
    chat = [{"role": "system", "content": None}, *CHAT]
    data = load_data(run_with(dataset_name=jsonl(tmp_path, [{"messages": chat}])), tokenizer)
    assert decoded(tokenizer, data.train)[0].startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user")


# --- Prompts and completions ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion_only", "expected"),
    [(None, " 4<|endoftext|>"), (True, " 4<|endoftext|>"), (False, "2+2= 4<|endoftext|>")],
)
def test_completions_are_learned_and_prompts_if_wanted(completion_only, expected, tmp_path, tokenizer):
    rows = [{"prompt": "2+2=", "completion": " 4"}]
    run = run_with(dataset_name=jsonl(tmp_path, rows), completion_only_loss=completion_only)
    assert learned(tokenizer, load_data(run, tokenizer).train[0]) == expected


def test_completion_of_a_chat(tmp_path, tokenizer):
    rows = [{"prompt": CHAT[:3], "completion": CHAT[3:]}]
    row = load_data(run_with(dataset_name=jsonl(tmp_path, rows)), tokenizer).train[0]
    assert learned(tokenizer, row) == "See you<|im_end|>\n"


def test_prompts_that_fill_max_length_teach_nothing(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, [{"prompt": "too long", "completion": "x"}]), max_length=8)
    assert "all labels are masked" in problem(run, tokenizer).what


def test_completion_only_needs_completions(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a")), completion_only_loss=True)
    assert problem(run, tokenizer).subject == "completion_only_loss"
