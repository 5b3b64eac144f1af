"""Data of several sources: what an epoch has of each, in what order, on how many ranks."""

from collections import Counter

import pytest

from launch.data.load import load_data
from tests.support.rows import CHAT, decoded, jsonl, learned, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")


def test_each_dataset_of_a_mixture_may_have_its_own_format(tmp_path, tokenizer):
    names = [jsonl(tmp_path, [{"messages": CHAT}], "chats.jsonl"), jsonl(tmp_path, texts("plain"), "texts.jsonl")]
    questions = jsonl(tmp_path, [{"q": "3+3=", "a": "6", "prompt": "unused"}], "questions.jsonl")
    entries = [*names, {"name": questions, "columns": {"q": "prompt", "a": "completion"}}]
    data = load_data(run_with(dataset_name=entries), tokenizer)
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert [learned(tokenizer, row) for row in data.train] == [chat, "plain<|endoftext|>", "6<|endoftext|>"]


def test_an_epoch_of_a_mixture_has_every_example_and_follows_the_weights(tmp_path, tokenizer):
    sizes, weights = (800, 200, 7), (5, 3, 2)
    parts = [jsonl(tmp_path, texts(*(f"{size}.{n}" for n in range(size))), f"{size}.jsonl") for size in sizes]
    entries = [{"name": name, "weight": weight} for name, weight in zip(parts, weights, strict=True)]
    found = decoded(tokenizer, load_data(run_with(dataset_name=entries), tokenizer).train)
    assert len({*found}) == sum(sizes)
    seen = Counter(text.partition(".")[0] for text in found)
    shares = [seen[str(size)] / len(found) for size in sizes]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_a_mixture_trains_on_each_datasets_split_and_evaluates_on_those_with_a_test_split(tmp_path, tokenizer):
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


def test_a_mistake_in_one_dataset_of_a_mixture_names_that_dataset(tmp_path, tokenizer):
    silent = [{"messages": [{"role": "user"}]}]
    names = [jsonl(tmp_path, [{"messages": CHAT}], "chats.jsonl"), jsonl(tmp_path, silent, "silent.jsonl")]
    found = problem(run_with(dataset_name=names), tokenizer)
    assert found.what.startswith(f"{names[1]}: row 1: ")
