"""Batches: packed rows of one length, padded ones, and padding-free ones."""

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from launch.training.batches import IGNORED, Pad, pack
from launch.training.data import TOKENIZED, load_data
from tests.support.rows import decoded, jsonl, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")


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
