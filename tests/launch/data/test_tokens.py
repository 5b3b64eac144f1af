"""The tokens on the disk: made once, found again, gone on with after a kill, waited for."""

import copy
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from launch.data import tokens
from launch.data.load import load_data
from launch.data.tokens import Encoder, cache_folder, token_table
from recipes.mixture import Part
from tests.support.rows import answer, decoded, jsonl, problem, run_with, texts, user
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("own_cache")
WORDS = [f"text {number}" for number in range(1000)]
CHATS = [{"messages": [user(word), answer(word[::-1])]} for word in WORDS]


def files():
    """The files with tokens in the cache, and when each was made."""
    return {file: file.stat().st_mtime_ns for file in cache_folder().rglob("*.arrow")}


def tokenized(run, tokenizer):
    return tokens.tokenized(run, tokenizer, Part(run["dataset_name"]))


def rows(run, tokenizer):
    return tokenized(run, tokenizer).train.to_list()


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(tokens, "UNIT_BYTES", 1000)
    monkeypatch.setattr(tokens, "ROWS_AT_ONCE", 100)


# --- What a file holds ---------------------------------------------------------------------------


def test_input_ids_and_labels_read_from_the_token_cache_equal_those_that_were_written():
    rows = [([5, 6, 7], [-100, 6, 7]), ([], []), ([8], [8]), ([1, 2], [-100, -100])]
    table = token_table(rows)
    for found, wanted in ((table, rows), (table.slice(2, 2), rows[2:]), (table.slice(1, 0), [])):
        assert [(ids.tolist(), labels.tolist()) for ids, labels in tokens.arrays_of(found)] == wanted


def test_the_label_of_the_first_token_is_ignored_since_no_token_predicts_it():
    table = token_table([([5, 6], [5, -100]), ([5], [5]), ([5, 6, 7], [-100, -100, 7])])
    assert [first if first < 9 else None for first in table["first_learned"].to_pylist()] == [None, None, 2]


def test_the_token_cache_takes_4_bytes_per_token_and_less_than_10_percent_more(tmp_path, tokenizer):
    found = tokenized(run_with(dataset_name=jsonl(tmp_path, texts("x" * 100_000))), tokenizer)
    assert sum(file.stat().st_size for file in files()) < 1.1 * 4 * len(found.train[0]["input_ids"])


# --- Found again ---------------------------------------------------------------------------------


def test_tokens_are_reused_if_only_the_seed_or_packing_or_max_length_changed(tmp_path, tokenizer, monkeypatch):
    name = jsonl(tmp_path, texts(*WORDS))
    load_data(run_with(dataset_name=name), tokenizer)
    monkeypatch.setattr(Encoder, "__call__", None)  # it is not called again
    for chosen in ({"max_length": 64}, {"packing": True}, {"dataset_num_proc": 3}, {"seed": 7}):
        load_data(run_with(dataset_name=name, **chosen), tokenizer)


def test_another_max_length_tokenizes_a_classifiers_texts_again(tmp_path, tokenizer):
    path = jsonl(tmp_path, [{"text": "long text", "label": number} for number in (0, 1)])
    for longest in (6, 4):
        run = run_with(dataset_name=path, task="sequence_classification", max_length=longest)
        assert {len(row["input_ids"]) for row in load_data(run, tokenizer).train} == {longest}


def test_a_changed_data_file_is_tokenized_again_even_if_its_mtime_is_unchanged(tmp_path, tokenizer):
    path = jsonl(tmp_path, texts("old"))
    before = Path(path).stat()
    rows(run_with(dataset_name=path), tokenizer)
    jsonl(tmp_path, texts("new"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert decoded(tokenizer, load_data(run_with(dataset_name=path), tokenizer).train) == ["new<|endoftext|>"]


def test_a_new_text_column_or_chat_template_or_code_version_tokenizes_anew(tmp_path, tokenizer, monkeypatch):
    name = jsonl(tmp_path, [{"text": "a", "body": "b", "messages": None}, {**CHATS[0], "text": None}])
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    found = [
        decoded(own, load_data(run_with(dataset_name=name, dataset_text_field=column), own).train)
        for column, own in (("text", tokenizer), ("body", tokenizer), ("text", other))
    ]
    assert [texts[0] for texts in found] == ["a<|endoftext|>", "b<|endoftext|>", "a<|endoftext|>"]
    assert found[0][1].startswith("<|im_start|>user") and found[2][1] == "text 00 txet<|endoftext|>"
    monkeypatch.setattr(tokens, "__file__", str(tmp_path / "tokens.py"))  # another version of launch/data
    load_data(run_with(dataset_name=name, dataset_text_field="text"), tokenizer)
    assert len(list(cache_folder().iterdir())) == 3 + 1


def test_a_tokenizer_loaded_offline_has_the_same_cache_key(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "saved")
    found = [AutoTokenizer.from_pretrained(tmp_path / "saved", local_files_only=offline) for offline in (False, True)]
    assert tokens._contents(found[0]) == tokens._contents(found[1])


# --- A slice -------------------------------------------------------------------------------------


def test_a_sliced_split_tokenizes_only_its_rows_and_the_cache_gains_the_rest_later(tmp_path, tokenizer, small_units):
    name = jsonl(tmp_path, texts(*WORDS))
    assert len(tokenized(run_with(dataset_name=name, dataset_train_split="train[:150]"), tokenizer).train) == 150
    made = files()
    everything = tokenized(run_with(dataset_name=name), tokenizer).train
    assert [tokenizer.decode(row) for row in everything["input_ids"]] == [f"{word}<|endoftext|>" for word in WORDS]
    assert made.items() < files().items()


# --- Threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [texts(*WORDS), CHATS, [*texts(*WORDS[:500]), *CHATS[:500]]], ids=["texts", "chats", "both"]
)
def test_dataset_num_proc_makes_no_difference_to_the_tokens(data, tmp_path, tokenizer, small_units):
    found = []
    for workers in (1, 3):
        own = jsonl(tmp_path, data, f"{workers}.jsonl")
        run = run_with(dataset_name=own, dataset_num_proc=workers, assistant_only_loss=data is CHATS)
        found.append(rows(run, tokenizer))
    assert found[0] == found[1] and len(found[0]) == 1000


def test_a_malformed_row_far_down_is_reported_with_its_row_number(tmp_path, tokenizer):
    bad = {"messages": [user("x"), {"role": "assistant", "text": "y"}]}
    run = run_with(dataset_name=jsonl(tmp_path, [*CHATS, bad, *CHATS]), dataset_num_proc=3)
    assert problem(run, tokenizer).what.startswith("row 1,001: has a message without content")


# --- Killed, failed, waited for ------------------------------------------------------------------


def in_process(function, *args):
    """Start it in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    return process


def tokenize_slowly(seconds, run, tokenizer):
    """Pause before each table. Only in a process of its own, where the pause may stay."""
    encode = Encoder.__call__

    def slow(*args):
        time.sleep(seconds)
        return encode(*args)

    Encoder.__call__ = slow
    tokenized(run, tokenizer)


def test_tokenizing_continues_after_a_kill_and_keeps_the_files_written(tmp_path, tokenizer, small_units):
    run = run_with(dataset_name=jsonl(tmp_path, texts(*WORDS)), dataset_num_proc=1)
    process = in_process(tokenize_slowly, 0.1, run, tokenizer)
    wait_for("three files", lambda: len(files()) >= 3)
    process.kill()
    process.join()
    made = dict(sorted(files().items())[:-1])  # it may have been killed before the index named the last
    assert [tokenizer.decode(row["input_ids"]) for row in rows(run, tokenizer)] == [f"{w}<|endoftext|>" for w in WORDS]
    assert made.items() < files().items()


def test_a_waiting_run_takes_over_tokenizing_if_the_other_run_is_killed(tmp_path, tokenizer, small_units):
    run = run_with(dataset_name=jsonl(tmp_path, texts(*WORDS)), dataset_num_proc=1)
    process = in_process(tokenize_slowly, 0.5, run, tokenizer)
    wait_for("a file", files)
    killer = in_process(lambda: (time.sleep(0.5), process.kill()))
    assert len(rows(run, tokenizer)) == 1000
    killer.join()
    process.join()
    assert process.exitcode == -signal.SIGKILL
