"""Data ready to train on: the demonstration, classification, packed rows and padded batches."""

import dataclasses

import pytest
import torch
from transformers import AutoTokenizer, XLNetConfig, XLNetForSequenceClassification

from launch.data.batches import Pad
from launch.data.encode import IGNORED
from launch.data.load import load_data, recorded
from tests.support.models import load, loss_of
from tests.support.rows import answer, decoded, jsonl, run_with, user

pytestmark = pytest.mark.usefixtures("own_cache")


# --- The demonstration ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["def f(x):\n\treturn 'a  .'\r\n", "naïve 漢字 😀\x00", " a , b . ", ""])
def test_the_demonstration_tokenizer_decodes_to_exactly_the_same_text(text, tokenizer):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_demonstration_model_begins_at_the_loss_of_random_guessing():
    """ln(260) is 5.56: a start far above it wastes the first steps."""
    assert loss_of(load(run_with(max_length=256))).item() == pytest.approx(5.56, abs=0.6)


def test_the_demonstration_holds_out_texts_for_evaluation(tokenizer, monkeypatch):
    monkeypatch.setattr("launch.data.sources.demo_corpus", lambda: [f"text {n}\n" for n in range(40)])
    data = load_data(run_with(eval_strategy="steps", packing=False), tokenizer)
    assert len(data.train) == 38
    assert decoded(tokenizer, data.eval) == ["text 19\n<|endoftext|>", "text 39\n<|endoftext|>"]


def test_the_data_description_counts_sequences_and_tokens_left_over(tokenizer, monkeypatch):
    monkeypatch.setattr("launch.data.sources.demo_corpus", lambda: ["x" * 2599])
    data = load_data(run_with(packing=True, packing_strategy="wrapped", max_length=256), tokenizer)
    assert data.description == "stdlib source, 10 sequences of 256 tokens, 40 tokens left over"


def test_the_data_description_says_of_a_folder_of_texts_that_each_line_is_an_example(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    data = load_data(run_with(dataset_name=str(tmp_path)), tokenizer)
    assert ", each line an example, 2 examples" in data.description


@pytest.mark.parametrize("task", ["causal_lm", "sequence_classification"])
def test_the_data_description_counts_evaluation_examples_and_rows_left_out(task, tmp_path, tokenizer):
    rows = [{"text": text, "label": min(number, 1)} for number, text in enumerate(("a", "b", "c", "", "d"))]
    splits = {"dataset_train_split": "train[:2]", "dataset_test_split": "train[2:]", "eval_strategy": "steps"}
    data = load_data(run_with(dataset_name=jsonl(tmp_path, rows), task=task, **splits), tokenizer)
    _, held_out = data.description.splitlines()
    assert held_out.startswith("evaluation: 2 examples") and "1 row left out (first: row 2): the" in held_out
    assert ("only 1 of the 2 classes" in held_out) == (task == "sequence_classification")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("row", "are_chats"),
    [
        ({"prompt": "a", "completion": "b"}, False),
        ({"prompt": [user("a")], "completion": [answer("b")]}, True),
        ({"instruction": "a", "output": "b"}, True),
        ({"text": "<|im_start|>user\na<|im_end|>"}, True),
    ],
)
def test_run_json_records_whether_the_data_are_chats(row, are_chats, streams, tmp_path, tiny_model):
    run = run_with(dataset_name=jsonl(tmp_path, [row]), dataset_streaming=streams, max_steps=1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert recorded(load_data(run, tokenizer), tokenizer) == {"chats": are_chats}


# --- Batches -------------------------------------------------------------------------------------


def test_batches_are_padded_to_a_multiple_of_8_with_masked_labels():
    batch = Pad(9, 64)([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1] * 9, "labels": [1] * 9}])
    assert batch["labels"][0].tolist() == [1, 2] + [IGNORED] * 14
    assert batch["attention_mask"][0].tolist() == [1, 1] + [0] * 14


def test_an_xlnet_classifier_gives_a_text_the_same_logits_beside_a_longer_text(tmp_path, tokenizer):
    """It classifies by the last token, which must not be padding."""
    config = XLNetConfig(vocab_size=len(tokenizer), d_model=32, n_layer=2, n_head=2, d_inner=64)
    rows = [{"text": "short", "label": 0}, {"text": "a longer text", "label": 1}]
    run = run_with(dataset_name=jsonl(tmp_path, rows), task="sequence_classification")
    data = load_data(dataclasses.replace(run, model=config.to_dict()), tokenizer)
    model = XLNetForSequenceClassification(config).eval()
    alone = model(input_ids=torch.tensor([data.train[0]["input_ids"]])).logits
    beside = model(**data.collator([data.train[0], data.train[1]])).logits
    torch.testing.assert_close(alone[0], beside[0])


def test_padding_never_exceeds_max_length():
    assert Pad(9, 5)([{"input_ids": [1, 2], "labels": [1, 2]}])["input_ids"].shape == (1, 5)
