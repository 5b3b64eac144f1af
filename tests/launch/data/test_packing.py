"""Packing: examples that stay apart in rows of one length, or texts joined and cut."""

import copy
import itertools

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig

from launch.data.batches import Joined, Packs, Stack, best_fit
from launch.data.encode import IGNORED
from launch.data.load import load_data
from launch.data.tokens import token_table
from launch.training.batches import tokens_of
from launch.training.model import load_tokenizer
from tests.support.rows import decoded, jsonl, learned, problem, run_with, texts
from tests.support.running import losses, train_here

documents = st.lists(st.lists(st.integers(0, 255), min_size=2, max_size=40), min_size=1, max_size=30)
SIZES = dict(vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, bos_token_id=1, eos_token_id=2)
SMALL = SIZES | dict(intermediate_size=64, num_key_value_heads=2, head_dim=16, max_position_embeddings=64)
MODELS = {
    "llama": LlamaConfig(**SMALL),
    "mistral with a window": MistralConfig(**SMALL, sliding_window=5),
    "gemma3, both": Gemma3TextConfig(**SMALL, sliding_window=5, layer_types=["sliding_attention", "full_attention"]),
    "gpt2": GPT2Config(
        vocab_size=260, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    ),
}  # fmt: skip
ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16], [17, 18, 19], [20, 21, 22, 23, 24, 25], [26, 27, 28, 29]]


def examples(rows):
    return Dataset(token_table([(row, row) for row in rows]))


# --- Which examples share a row ------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 60), max_size=200), st.integers(1, 40))
def test_packing_puts_each_example_once_into_the_best_fitting_row(lengths, limit):
    """As if each were placed on its own, the longest first, where it leaves the least space."""
    order, starts = best_fit(np.array(lengths, np.int64), limit)
    assert sorted(order) == [number for number, length in enumerate(lengths) if length]
    filled = [sum(min(lengths[n], limit) for n in order[a:b]) for a, b in itertools.pairwise(starts)]
    spaces = []
    for length in sorted((min(length, limit) for length in lengths if length), reverse=True):
        fitting = [(space, at) for at, space in enumerate(spaces) if space >= length]
        if fitting:
            spaces[min(fitting)[1]] -= length
        else:
            spaces.append(limit - length)
    assert sorted(filled) == sorted(limit - space for space in spaces)


# --- What a row holds ----------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(documents, st.integers(4, 50))
def test_a_packed_row_holds_whole_examples_and_padding_and_masks_each_first_token(rows, length):
    found = []
    for row in Packs(examples(rows), length, padding=259):
        assert {len(column) for column in row.values()} == {length}
        ids, positions = row["input_ids"].tolist(), row["position_ids"].tolist()
        starts = [place for place, position in enumerate(positions) if position == 0]
        found += [ids[start:end] for start, end in zip(starts, [*starts[1:], length], strict=True)]
        ignored = row["labels"] == IGNORED
        assert torch.equal(ignored, (row["position_ids"] == 0) | (row["input_ids"] == 259))
        assert torch.equal(row["labels"][~ignored], row["input_ids"][~ignored])
    without_padding = [ids for ids in found if set(ids) != {259}]
    assert sorted(without_padding) == sorted(row[:length] for row in rows)


@settings(max_examples=50, deadline=None)
@given(documents, st.integers(4, 50), st.integers(1, 4))
def test_padding_of_packed_rows_is_not_counted_as_tokens(rows, length, micro):
    packs = Packs(examples(rows), length, padding=259)
    batch = Stack()([packs[number] for number in range(min(micro, len(packs)))])
    assert tokens_of(batch) == (batch["input_ids"] != 259).sum()


def test_prompts_stay_masked_in_packed_rows(tmp_path, tokenizer):
    rows = [{"prompt": f"say {word} ", "completion": word} for word in ("one", "two", "three")]
    (row,) = load_data(run_with(dataset_name=jsonl(tmp_path, rows), packing=True, max_length=64), tokenizer).train
    said = learned(tokenizer, row).split("<|endoftext|>")
    assert sorted(said) == ["", "one", "three", "two"]


# --- What a model makes of it --------------------------------------------------------------------


def model_of(name, attention):
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS[name])
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def batch_of(rows):
    packs = Packs(examples(rows), 16)
    return Stack()([packs[number] for number in range(len(packs))])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_have_the_losses_and_gradients_of_their_examples_alone(name, attention):
    batch, count = batch_of(ROWS), sum(len(row) - 1 for row in ROWS)
    together, alone = model_of(name, attention), model_of(name, attention)
    loss = together(**batch, num_items_in_batch=count).loss
    loss.backward()
    parts = [alone(input_ids=row, labels=row, num_items_in_batch=count).loss for row in map(as_batch, ROWS)]
    sum(parts).backward()
    assert loss.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-5)
    for (weight, one), (_, other) in zip(together.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=weight)


def as_batch(row):
    return torch.tensor([row])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral with a window"])
def test_changing_one_packed_example_changes_no_other_with_flex_attention(name):
    model, batch = model_of(name, "flex_attention").eval(), batch_of(ROWS)
    changed = batch["input_ids"].clone()
    changed[0, : len(ROWS[0])] += 100  # the longest example, at the beginning of the first row
    with torch.no_grad():
        both, positions = (batch["input_ids"], changed), batch["position_ids"]
        before, after = (model(input_ids=ids, position_ids=positions).logits for ids in both)
    same = changed == batch["input_ids"]
    torch.testing.assert_close(before[same], after[same], rtol=0, atol=1e-6)
    assert not torch.allclose(before[~same], after[~same], atol=1e-3)


def test_cu_seq_lens_for_flash_attention_mark_where_packed_examples_begin():
    packs = Packs(examples(ROWS), 16)
    batch = Stack(flash=True)([packs[0], packs[1]])
    starts = (batch["position_ids"].flatten() == 0).nonzero().flatten().tolist()
    assert batch["cu_seq_lens_q"].tolist()[: len(starts)] == starts
    assert set(batch["cu_seq_lens_q"].tolist()[len(starts) :]) == {32}
    assert len(batch["cu_seq_lens_q"]) in (5, 9, 17) and batch["max_length_q"] == 16


# --- Trained -------------------------------------------------------------------------------------


def test_a_packed_training_step_has_the_loss_of_its_examples_one_by_one(tiny_model, texts, tmp_path):
    flags = "--packing --max_steps 1 --logging_steps 1 --global_batch_size 4 --per_device_train_batch_size 2"
    in_order = "--train_sampling_strategy sequential --save_strategy no"
    trained = train_here(tiny_model, texts, tmp_path, *f"{flags} {in_order}".split())
    run = run_with(model_name_or_path=str(tiny_model), dataset_name=str(texts), packing=True, max_length=64)
    packs = load_data(run, load_tokenizer(run)).train
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).train()
    numbers = packs.order[: packs.starts[4]]
    rows = [packs.examples.with_format(None)[int(number)]["input_ids"][:64] for number in numbers]
    count = sum(len(row) - 1 for row in rows)
    loss = sum(model(input_ids=row, labels=row, num_items_in_batch=count).loss for row in map(as_batch, rows))
    assert losses(trained) == pytest.approx([loss.item()], rel=1e-5)


# --- Joined and cut ------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(documents, st.integers(2, 50))
def test_wrapped_packing_keeps_the_tokens_in_order_and_drops_the_incomplete_last_row(rows, length):
    stream = [token for row in rows for token in row]
    blocks = Joined(examples(rows), length)
    found = [token for number in range(len(blocks)) for token in blocks[number]["input_ids"].tolist()]
    assert found == stream[: len(stream) // length * length]


def joining(tmp_path, rows, length=1024):
    name = jsonl(tmp_path, rows)
    return run_with(dataset_name=name, packing=True, packing_strategy="wrapped", max_length=length)


def test_wrapped_packing_puts_eos_between_texts_and_needs_no_attention_mask(tmp_path, tokenizer):
    data = load_data(joining(tmp_path, texts("abc", "def"), 8), tokenizer)
    assert decoded(tokenizer, data.train) == ["abc<|endoftext|>def<|endoftext|>"]
    assert set(data.collator([data.train[0]])) == {"input_ids", "labels"}


def test_wrapped_packing_of_too_few_tokens_is_refused_with_the_token_count(tmp_path, tokenizer):
    found = problem(joining(tmp_path, texts("abc")), tokenizer)
    assert "has 4 tokens" in found.what and "--max_length 4" in found.fix


def test_wrapped_packing_is_refused_for_prompts_with_completions(tmp_path, tokenizer):
    """A row could hold that part alone: its loss would be nan."""
    run = joining(tmp_path, [{"prompt": "p" * 20, "completion": "abc"}], 8)
    assert problem(run, tokenizer).subject == "packing_strategy"
