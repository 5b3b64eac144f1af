"""Data that cannot be learned from: what is wrong with it is named, and what it should be."""

import gzip
from dataclasses import replace

import pytest

from launch.data.load import load_data
from tests.support.models import chat_tokenizer
from tests.support.rows import CHAT, decoded, jsonl, problem, run_with, texts, user

pytestmark = pytest.mark.usefixtures("own_cache")

BYTES = {
    "latin-1": ("data.jsonl", '{"text": "café au lait"}\n'.encode("latin-1")),
    "UTF-16": ("data.csv", "text\none\n".encode("utf-16")),
    "columns that do not match": ("data.csv", b"a,b\n1,2\n1,2,3,4\n"),
    "a number": ("data.json", b"3"),
    "garbage": ("data.parquet", b"PAR1" + b"x" * 100 + b"PAR1"),
    "cut off": (
        "data.jsonl.gz",
        gzip.compress("".join(f'{{"text": "line {n}"}}\n' for n in range(999)).encode())[:200],
    ),
}


@pytest.mark.parametrize(("name", "streaming"), [*((name, False) for name in BYTES), ("cut off", True)])
def test_a_data_file_whose_content_cannot_be_parsed_is_refused_with_a_fix(name, streaming, tmp_path, tokenizer):
    file, content = BYTES[name]
    (tmp_path / file).write_bytes(content)
    run = run_with(dataset_name=str(tmp_path / file), dataset_streaming=streaming, max_steps=1)
    found = problem(run, tokenizer)
    assert "cannot be read: " in found.what and "UTF-8" in found.fix and "\n" not in str(found)


@pytest.mark.parametrize("name", ["data.txt", "data.csv", "data.jsonl", "data.json"])
def test_a_byte_order_mark_is_not_read_as_text(name, tmp_path, tokenizer):
    contents = {".txt": "one\n", ".csv": "text\none\n", ".jsonl": '{"text": "one"}\n', ".json": '[{"text": "one"}]'}
    (tmp_path / name).write_text("\ufeff" + contents[(tmp_path / name).suffix])
    data = load_data(run_with(dataset_name=str(tmp_path / name)), tokenizer)
    assert decoded(tokenizer, data.train) == ["one<|endoftext|>"]


@pytest.mark.parametrize("name", ["a[1]", "a* b", "a{b,c}", "http:", "~a"])
def test_a_file_name_with_glob_characters_is_not_taken_for_a_pattern(name, tmp_path, tokenizer, monkeypatch):
    file = jsonl(tmp_path, texts("one"), f"{name}.jsonl")
    jsonl(tmp_path, texts("other"), "a1.jsonl")
    assert len(load_data(run_with(dataset_name=file), tokenizer).train) == 1
    monkeypatch.chdir(tmp_path)
    assert len(load_data(run_with(dataset_name=f"{name}.jsonl"), tokenizer).train) == 1


TWO_OBJECTS = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '[{"a": 1}, {"b": 2}]'}}]}
ROWS = {
    "a chat and a text": ({"prompt": CHAT[:1], "completion": "b"}, "not a list of messages: b"),
    "messages that are a message": ({"messages": CHAT[0]}, "not a list of messages"),
    "a message that is null": ({"messages": [None, *CHAT]}, "not a list of messages: [None"),
    "a message without a role": ({"messages": [{"content": "x"}]}, "a message with the role None"),
    "a misspelt role": (
        {"messages": [CHAT[0], {"role": "asistant", "content": "b"}]},
        "the role 'asistant'",
    ),
    "a role that ShareGPT does not have": ({"conversations": [{"from": "narrator", "value": "x"}]}, "'narrator'"),
    "another key for the content": ({"messages": [{"role": "user", "text": "a"}]}, "a message without content"),
    "a picture": ({"messages": [user([{"type": "image"}]), CHAT[1]]}, "content is not text"),
    "chats written as text": ({"conversations": "Hello"}, "not a list of messages"),
    "a history of messages": (
        {"instruction": "a", "output": "b", "history": [{"a": "b"}]},
        "history that is not a list of pairs",
    ),
    "an answer that is a number": ({"instruction": "2+2", "output": 4}, "holds 4, which is not text, in the column"),
    "a call that is not JSON": ({"conversations": [{"from": "function_call", "value": "f()"}]}, "is not a JSON object"),
    "a call with two objects": ({"messages": [CHAT[0], TWO_OBJECTS]}, "several objects as arguments"),
    "tools that are not JSON": ({"messages": CHAT, "tools": "f"}, "tools is not a JSON object"),
    "token ids without a token": ({"input_ids": [5, 99999]}, "does not know"),
    "labels of other tokens": ({"input_ids": [5, 6], "labels": [6, 7]}, "labels that differ"),
    "labels of fewer tokens": ({"input_ids": [5, 6], "labels": [5]}, "labels that differ"),
}


@pytest.mark.parametrize(("row", "expected"), ROWS.values(), ids=ROWS)
def test_a_malformed_row_is_refused_with_its_row_number_and_a_fix(row, expected, tmp_path, tokenizer):
    found = problem(run_with(dataset_name=jsonl(tmp_path, [row])), tokenizer)
    assert found.subject == "dataset_name" and found.what.startswith("row 1: ") and expected in found.what
    assert found.fix and "\n" not in str(found)


def test_only_rows_with_a_token_that_has_no_embedding_in_the_model_are_refused(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens("<new>")
    old, new = (run_with(dataset_name=jsonl(tmp_path, texts(word), f"{word}.jsonl")) for word in ("old", "<new>"))
    assert len(load_data(replace(old, model={"vocab_size": 260}), tokenizer).train) == 1
    found = problem(replace(new, model={"vocab_size": 260}), tokenizer)
    assert "the data needs the token <new>, but the model has only 260 embeddings" in found.what
    assert load_data(replace(new, model={"vocab_size": 261}), tokenizer)  # and keeps the tokens
    assert problem(replace(new, model={"vocab_size": 260}), tokenizer).what == found.what
