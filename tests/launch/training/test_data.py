"""Data ready to train on: the demonstration, classification, packed rows and padded batches."""

import ast
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from launch.training.batches import IGNORED, Pad, pack
from launch.training.data import TOKENIZED, compute_accuracy, hub_commit, load_data
from launch.training.demo import demo_corpus, demo_tokenizer
from recipes.errors import UserError
from tests.support.rows import decoded, jsonl, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")


# --- The demonstration ---------------------------------------------------------------------------


def test_demonstration_is_the_same_each_time():
    assert demo_corpus() == demo_corpus()


def test_demonstration_is_python_source():
    assert all(ast.parse(text) for text in demo_corpus()[:10])


def test_demonstration_has_no_evaluation_unless_asked_for(tokenizer, monkeypatch):
    monkeypatch.setattr("launch.training.sources.demo_corpus", lambda: ["import this\n"] * 40)
    assert load_data(run_with(), tokenizer).eval is None


def test_demonstration_holds_texts_out_for_evaluation(tokenizer, monkeypatch):
    monkeypatch.setattr("launch.training.sources.demo_corpus", lambda: [f"text {n}\n" for n in range(40)])
    data = load_data(run_with(eval_strategy="steps", packing=False), tokenizer)
    assert len(data.train) == 38
    assert decoded(tokenizer, data.eval) == ["text 19\n<|endoftext|>", "text 39\n<|endoftext|>"]


def test_description_says_what_is_trained_on(tokenizer, monkeypatch):
    monkeypatch.setattr("launch.training.sources.demo_corpus", lambda: ["x" * 2559])
    data = load_data(run_with(packing=True, max_length=256), tokenizer)
    assert data.description == "stdlib source, 10 sequences of 256 tokens"


def test_main_process_releases_the_others_when_it_fails(monkeypatch, tmp_path, tokenizer):
    """Otherwise they would wait for it until the time-out of the process group."""
    waits = []
    state = SimpleNamespace(is_local_main_process=True, wait_for_everyone=lambda: waits.append("main"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("accelerate.PartialState", lambda: state)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    problem(run_with(dataset_name=str(broken)), tokenizer)
    assert waits == ["main"]


# --- Classification ------------------------------------------------------------------------------


def labelled(tmp_path, labels, name="data.jsonl", **chosen):
    rows = [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)]
    path = jsonl(tmp_path, rows, name)
    return run_with(dataset_name=path, task="sequence_classification", **chosen)


def test_text_labels_are_numbered_in_alphabetical_order(tmp_path, tokenizer):
    data = load_data(labelled(tmp_path, ["good", "bad", "good"]), tokenizer)
    assert (data.labels, data.train["labels"][:]) == (["bad", "good"], [1, 0, 1])


def test_numbers_stay_as_they_are(tmp_path, tokenizer):
    data = load_data(labelled(tmp_path, [0, 2]), tokenizer)
    assert (data.labels, data.train["labels"][:]) == (["0", "1", "2"], [0, 2])


def test_class_names_come_with_the_data(tmp_path, tokenizer):
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    Dataset.from_dict({"text": ["a"], "label": [1]}, features=features).save_to_disk(tmp_path / "saved")
    run = run_with(dataset_name=str(tmp_path / "saved"), task="sequence_classification")
    assert load_data(run, tokenizer).labels == ["no", "yes"]


def test_a_batch_has_one_class_per_row(tmp_path, tokenizer):
    data = load_data(labelled(tmp_path, ["good", "bad"]), tokenizer)
    assert data.collator([data.train[0], data.train[1]])["labels"].tolist() == [1, 0]


def test_language_models_have_no_classes(tmp_path, tokenizer):
    assert load_data(run_with(dataset_name=jsonl(tmp_path, texts("a"))), tokenizer).labels is None


def test_labels_that_training_never_saw(tmp_path, tokenizer):
    run = labelled(
        tmp_path,
        ["a", "b", "c"],
        eval_strategy="steps",
        dataset_train_split="train[:2]",
        dataset_test_split="train[2:]",
    )
    assert problem(run, tokenizer).what == "has labels that are not among the classes: 'c'"


def test_missing_label_column_lists_the_columns(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a")), task="sequence_classification")
    assert problem(run, tokenizer).what == "there is no column 'label'; the data has text"


@pytest.mark.parametrize("labels", [[0.5, 1.5], [None, 1], [-1, 0], ["a", None]])
def test_labels_that_are_not_classes(labels, tmp_path, tokenizer):
    assert "a class is a text or an integer from 0" in problem(labelled(tmp_path, labels), tokenizer).what


def test_one_class_is_nothing_to_learn(tmp_path, tokenizer):
    assert problem(labelled(tmp_path, ["a", "a"]), tokenizer).what == "all rows have the label 'a'"


def test_classification_needs_data(tokenizer):
    with pytest.raises(UserError, match="classification needs labelled texts"):
        load_data(run_with(task="sequence_classification", packing=False), tokenizer)


def test_accuracy_is_the_share_of_right_answers():
    logits, right = np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1])
    assert compute_accuracy(SimpleNamespace(predictions=logits, label_ids=right)) == {"accuracy": 0.5}


def test_accuracy_of_a_model_that_returns_more_than_logits():
    logits, right = np.array([[0.1, 0.9]]), np.array([1])
    assert compute_accuracy(SimpleNamespace(predictions=(logits, "more"), label_ids=right)) == {"accuracy": 1.0}


def test_the_accuracy_of_separate_batches_counts_each_example_once():
    batches = [np.array([[2.0, 1.0], [0.0, 3.0]]), np.array([[1.0, 0.0]])]
    labels = [np.array([0, 1]), np.array([1])]
    outcome = compute_accuracy(SimpleNamespace(predictions=batches, label_ids=labels))
    assert outcome == {"accuracy": pytest.approx(2 / 3)}


def test_classes_with_huge_gaps_between_their_numbers_are_refused(tokenizer, tmp_path):
    rows = [{"text": "a", "label": 900_000}, {"text": "b", "label": 900_001}]
    run = run_with(task="sequence_classification", dataset_name=str(jsonl(tmp_path, rows)))
    assert "without gaps" in problem(run, tokenizer).fix


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_classes_may_be_texts_in_any_table(suffix, tmp_path):
    import pandas

    file = tmp_path / f"reviews.{suffix}"
    table = pandas.DataFrame({"text": ["good", "bad"] * 4, "label": ["pos", "neg"] * 4})
    table.to_csv(file, index=False) if suffix == "csv" else table.to_parquet(file)
    run = run_with(task="sequence_classification", dataset_name=str(file))
    assert load_data(run, demo_tokenizer()).labels == ["neg", "pos"]


# --- Packing -------------------------------------------------------------------------------------


documents = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=40), min_size=1, max_size=30)


def packed(rows, length):
    examples = Dataset.from_dict({"input_ids": rows, "labels": rows}, features=TOKENIZED)
    return pack(examples, length)["input_ids"][:].tolist() if sum(map(len, rows)) >= length else []


@settings(max_examples=25, deadline=None)
@given(documents, st.integers(2, 50))
def test_packing_keeps_every_token_in_order(rows, length):
    stream = [token for row in rows for token in row]
    blocks = packed(rows, length)
    assert [token for block in blocks for token in block] == stream[: len(blocks) * length]


@settings(max_examples=25, deadline=None)
@given(documents, st.integers(2, 50))
def test_packing_makes_as_many_rows_as_fit(rows, length):
    assert len(packed(rows, length)) == sum(map(len, rows)) // length


def test_packing_joins_across_map_batches():
    """Tokens left over by the first thousand examples begin the next row."""
    blocks = packed([[n % 256] * 3 for n in range(2500)], 1000)
    assert len(blocks) == 7


def test_packed_batches_have_no_mask(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("abc", "def")), packing=True, max_length=4)
    data = load_data(run, tokenizer)
    assert set(data.collator([data.train[0], data.train[1]])) == {"input_ids", "labels"}


def test_packed_texts_have_eos_between(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("abc", "def")), packing=True, max_length=8)
    assert decoded(tokenizer, load_data(run, tokenizer).train) == ["abc<|endoftext|>def<|endoftext|>"]


def test_packed_rows_without_a_label_are_left_out(tmp_path, tokenizer):
    run = run_with(
        dataset_name=jsonl(tmp_path, [{"prompt": "p" * 20, "completion": "abc"}]), packing=True, max_length=8
    )
    assert decoded(tokenizer, load_data(run, tokenizer).train) == ["ppppabc<|endoftext|>"]


def test_too_few_tokens_to_pack_says_how_many_there_are(tmp_path, tokenizer):
    found = problem(run_with(dataset_name=jsonl(tmp_path, texts("abc")), packing=True), tokenizer)
    assert "has 4 tokens" in found.what and "--max_length 4" in found.fix


# --- Batches -------------------------------------------------------------------------------------


def test_padding_goes_to_a_multiple_of_8_and_is_not_learned():
    batch = Pad(9, 64)([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1] * 9, "labels": [1] * 9}])
    assert batch["labels"][0].tolist() == [1, 2] + [IGNORED] * 14


def test_padding_never_exceeds_max_length():
    assert Pad(9, 5)([{"input_ids": [1, 2], "labels": [1, 2]}])["input_ids"].shape == (1, 5)


def test_padding_is_masked():
    batch = Pad(9, 64)([{"input_ids": [1, 2], "labels": [1, 2]}])
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_free_batches_have_the_loss_of_padded_ones(attention, tmp_path, tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    # With a cache, transformers 5.23 overlooks where sequences begin: the loss differs.
    config.use_cache = False
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()
    name = jsonl(tmp_path, texts("one text", "another, longer text", "x"))
    losses = []
    for padding_free in (False, True):
        data = load_data(run_with(dataset_name=name, padding_free=padding_free), tokenizer)
        losses.append(model(**data.collator([data.train[n] for n in range(3)])).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_data_of_the_hub_is_known_by_the_commit_in_its_cache(tmp_path):
    rows = Dataset.from_dict({"text": ["one"]})
    for name, commit in (("a" * 40, "a" * 40), ("no-commit", None)):
        (tmp_path / name).mkdir()
        rows.map(dict, cache_file_name=str(tmp_path / name / "x.arrow"))
        assert hub_commit(Dataset.from_file(str(tmp_path / name / "x.arrow"))) == commit
