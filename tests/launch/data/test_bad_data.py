"""Data that cannot be learned from: what is wrong with it is named, and what it should be."""

import pyarrow
import pyarrow.parquet
import pytest

from launch.data.load import load_data
from tests.support.rows import decoded, jsonl, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")
CHAT = [{"role": "user", "content": "a"}]
ANSWER = [{"role": "assistant", "content": "b"}]

BYTES = {
    "latin-1": ("data.jsonl", '{"text": "café au lait"}\n'.encode("latin-1"), "UTF-8"),
    "UTF-16": ("data.csv", "text\none\n".encode("utf-16"), "UTF-8"),
    "a line that is not JSON": ("data.jsonl", b'{"text": "a"}\n{"text": \n', "correct the file"),
    "columns that do not match": ("data.csv", b"a,b\n1,2\n1,2,3,4\n", "correct the file"),
    "a number": ("data.json", b"3", "correct the file"),
    "no rows": ("data.json", b"[]", ""),
    "garbage": ("data.parquet", b"PAR1" + b"x" * 100 + b"PAR1", "correct the file"),
}


@pytest.mark.parametrize("name", BYTES)
def test_a_file_that_cannot_be_read(name, tmp_path, tokenizer):
    file, content, expected = BYTES[name]
    (tmp_path / file).write_bytes(content)
    found = problem(run_with(dataset_name=str(tmp_path / file)), tokenizer)
    assert expected in found.fix and "\n" not in str(found)


@pytest.mark.parametrize("name", ["data.txt", "data.csv", "data.jsonl", "data.json"])
def test_a_byte_order_mark_is_not_text(name, tmp_path, tokenizer):
    contents = {".txt": "one\n", ".csv": "text\none\n", ".jsonl": '{"text": "one"}\n', ".json": '[{"text": "one"}]'}
    (tmp_path / name).write_text("\ufeff" + contents[(tmp_path / name).suffix])
    data = load_data(run_with(dataset_name=str(tmp_path / name)), tokenizer)
    assert decoded(tokenizer, data.train) == ["one<|endoftext|>"]


NAMES = ["a[1]", "a* b", "é", "a{b,c}", "a#b%20c", "http:", "~a"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_name_and_no_pattern(name, tmp_path, tokenizer, monkeypatch):
    file = jsonl(tmp_path, texts("one"), f"{name}.jsonl")
    jsonl(tmp_path, texts("other"), "a1.jsonl")
    assert len(load_data(run_with(dataset_name=file), tokenizer).train) == 1
    monkeypatch.chdir(tmp_path)
    assert len(load_data(run_with(dataset_name=f"{name}.jsonl"), tokenizer).train) == 1


TOKENS = {
    "nothing in a list": ([1, None, 2], "or null in them"),
    "fractions": ([1.5, 2.0], "not lists of whole numbers"),
    "a number": (1, "int64, not lists of whole numbers"),
    "a number below zero": ([1, -1, 2], "has the token id -1"),
    "another tokenizer's": ([5, 260], "has the token id 260"),
    "a label beyond the vocabulary": ({"input_ids": [1, 2], "labels": [1, 9999]}, "has the token id 9999"),
    "another mask than -100": ({"input_ids": [1, 2], "labels": [1, -5]}, "has the token id -5 in labels"),
    "no labels in a row": ({"input_ids": [1, 2], "labels": None}, "2 input_ids, 0 labels"),
    "a short mask": ({"input_ids": [1, 2], "attention_mask": [1]}, "and 1 values in attention_mask"),
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_that_no_model_reads(name, tmp_path, tokenizer):
    row, expected = TOKENS[name]
    rows = [row if isinstance(row, dict) else {"input_ids": row}, {"input_ids": [1, 2], "labels": [1, 2]}]
    rows = rows if "labels" in rows[0] else rows[:1]
    found = problem(run_with(dataset_name=jsonl(tmp_path, rows)), tokenizer)
    assert found.subject == "dataset_name" and expected in found.what and found.fix


def test_tokens_that_pandas_wrote_as_whole_floats_are_tokens(tmp_path, tokenizer):
    rows = [{"input_ids": [1.0, 2.0]}, {"input_ids": None}]
    data = load_data(run_with(dataset_name=jsonl(tmp_path, rows)), tokenizer)
    assert [row["input_ids"] for row in data.train] == [[1, 2]] and "1 left out" in data.description


CHATS = {
    "a chat and a text": ([{"prompt": CHAT, "completion": "b"}], "'completion' holds texts, not lists of messages"),
    "messages that are a message": ([{"messages": CHAT[0]}], "not lists of messages"),
    "a message that is null": ([{"messages": [None, *CHAT]}], "not a list of messages: [None"),
    "a message without a role": ([{"messages": [{"content": "x"}]}], "refuses a chat"),
}


@pytest.mark.parametrize("name", CHATS)
def test_chats_that_are_none(name, tmp_path, tokenizer):
    rows, expected = CHATS[name]
    found = problem(run_with(dataset_name=jsonl(tmp_path, rows)), tokenizer)
    assert expected in found.what and found.fix


def test_a_column_of_bytes_is_not_text(tmp_path, tokenizer):
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"\xe9"]}), tmp_path / "data.parquet")
    assert "binary, not text" in problem(run_with(dataset_name=str(tmp_path / "data.parquet")), tokenizer).what
