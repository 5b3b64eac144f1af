"""Data of several sources: what an epoch has of each, in what order, on how many ranks."""

import gzip
import json
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset

from launch.data.load import load_data
from launch.data.mixture import mixed, taken
from tests.support.rows import decoded, jsonl, learned, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")

WEIGHTS = (5, 3, 2)


def part(number: int, size: int) -> Dataset:
    """Its examples are two tokens, the number of the part and their own."""
    return Dataset.from_dict({"input_ids": [[number, row] for row in range(size)]})


@pytest.fixture(scope="module")
def epoch() -> np.ndarray:
    """The part and the number of each example of an epoch."""
    sizes = (80_000, 900, 7)
    assert taken(sizes, WEIGHTS) == [80_000, 48_000, 32_000]
    return np.array(mixed([part(number, size) for number, size in enumerate(sizes)], WEIGHTS)["input_ids"])


# --- Shares --------------------------------------------------------------------------------------


def shares(numbers: np.ndarray) -> np.ndarray:
    return np.bincount(numbers, minlength=3) / len(numbers)


def test_the_shares_hold_in_every_stretch_of_an_epoch_that_is_not_shuffled(epoch):
    for start in range(0, len(epoch), 100):
        assert abs(shares(epoch[start : start + 100, 0]) - np.array(WEIGHTS) / 10).max() < 0.03


def test_a_part_that_is_exhausted_begins_again_and_no_example_is_left_out(epoch):
    seen = Counter(map(tuple, epoch))
    assert len(seen) == 80_000 + 900 + 7
    assert {number for (first, _), number in seen.items() if first == 0} == {1}
    assert {number for (first, _), number in seen.items() if first == 1} == {53, 54}
    assert epoch[epoch[:, 0] == 2, 1][:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_without_weights_every_part_is_taken_whole():
    assert taken([5, 2], [None, None]) == [5, 2]
    rows = mixed([part(0, 5), part(1, 2)], [None, None])["input_ids"]
    assert rows[:] == [[0, n] for n in range(5)] + [[1, n] for n in range(2)]


# --- From files ----------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
SHAREGPT = [{"from": "human", "value": "Bye"}, {"from": "gpt", "value": "See you"}]


def test_each_part_may_have_a_format_of_its_own(tmp_path, tokenizer):
    names = [
        jsonl(tmp_path, [{"messages": CHAT}], "chats.jsonl"),
        jsonl(tmp_path, [{"conversations": SHAREGPT}], "sharegpt.jsonl"),
        jsonl(tmp_path, [{"instruction": "2+2", "input": "", "output": "4"}], "alpaca.jsonl"),
        jsonl(tmp_path, texts("plain"), "texts.jsonl"),
    ]
    questions = jsonl(tmp_path, [{"q": "3+3=", "a": "6", "prompt": "unused"}], "questions.jsonl")
    entries = [*names, {"name": questions, "columns": {"q": "prompt", "a": "completion"}}]
    data = load_data(run_with(dataset_name=entries), tokenizer)
    assert [learned(tokenizer, row) for row in data.train] == [
        tokenizer.apply_chat_template(CHAT, tokenize=False),
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSee you<|im_end|>\n",
        "4<|im_end|>\n",
        "plain<|endoftext|>",
        "6<|endoftext|>",
    ]


def test_the_description_has_a_line_for_each_part(tmp_path, tokenizer):
    long, short = (jsonl(tmp_path, texts(*"abcdefgh"[:n]), f"{n}.jsonl") for n in (8, 2))
    entries = [{"name": long, "weight": 2}, {"name": short, "weight": 1}]
    first, *lines = load_data(run_with(dataset_name=entries), tokenizer).description.splitlines()
    assert first == f"{long}, {short}, 12 examples of 2 tokens, the longest 2"
    assert lines == [
        f"{long}: 8 examples, 66.7% of all",
        f"{short}: 2 examples, 33.3% of all",
    ]


def test_a_part_has_its_own_split_and_all_that_can_are_evaluated_on(tmp_path, tokenizer):
    for name in ("train", "validation"):
        (tmp_path / "folder").mkdir(exist_ok=True)
        jsonl(tmp_path / "folder", texts(name), f"{name}.jsonl")
    other = jsonl(tmp_path, texts("a", "b", "c"))
    entries = [str(tmp_path / "folder"), {"name": other, "split": "train[:2]"}]
    data = load_data(run_with(dataset_name=entries, eval_strategy="steps"), tokenizer)
    assert decoded(tokenizer, data.train) == [f"{text}<|endoftext|>" for text in ("train", "a", "b")]
    assert decoded(tokenizer, data.eval) == ["validation<|endoftext|>"]
    run = run_with(dataset_name=[other, other], eval_strategy="steps")
    assert "nothing to evaluate on" in problem(run, tokenizer).what


def test_columns_that_are_not_there(tmp_path, tokenizer):
    entries = [{"name": jsonl(tmp_path, texts("a")), "columns": {"body": "text"}}]
    assert "has no column 'body'; it has text" in problem(run_with(dataset_name=entries), tokenizer).what


def test_files_of_a_pattern_are_one_source(tmp_path, tokenizer):
    for name in ("b", "a"):
        jsonl(tmp_path, texts(name), f"{name}.jsonl")
    data = load_data(run_with(dataset_name=str(tmp_path / "*.jsonl")), tokenizer)
    assert decoded(tokenizer, data.train) == ["a<|endoftext|>", "b<|endoftext|>"]


def test_compressed_lines_and_folders_of_parquet(tmp_path, tokenizer):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "packed"}) + "\n")
    (tmp_path / "parquet").mkdir()
    for number in range(2):
        table = pyarrow.table({"text": [f"part {number}"]})
        pyarrow.parquet.write_table(table, tmp_path / "parquet" / f"train-{number}.parquet")
    names = [str(tmp_path / "a.jsonl.gz"), str(tmp_path / "parquet")]
    expected = [f"{text}<|endoftext|>" for text in ("packed", "part 0", "part 1")]
    assert decoded(tokenizer, load_data(run_with(dataset_name=names), tokenizer).train) == expected


@pytest.mark.parametrize("streaming", [False, True])
def test_a_compressed_file_that_is_damaged_is_one_line(streaming, tmp_path, tokenizer):
    whole = gzip.compress("".join(f'{{"text": "line {n}"}}\n' for n in range(999)).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:200])
    run = run_with(dataset_name=str(tmp_path / "a.jsonl.gz"), dataset_streaming=streaming, max_steps=1)
    assert "cannot be read" in problem(run, tokenizer).what


def test_a_mistake_names_its_part(tmp_path, tokenizer):
    names = [jsonl(tmp_path, [{"messages": CHAT}], "chats.jsonl"), jsonl(tmp_path, texts("plain"), "texts.jsonl")]
    found = problem(run_with(dataset_name=names, assistant_only_loss=True), tokenizer)
    assert found.what == f"{names[1]}: row 1: has no messages"
