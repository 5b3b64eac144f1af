"""Data: found wherever it lies, recognised by its columns, tokenized into what the model learns from, or refused."""

from __future__ import annotations

import ast
import dataclasses
import json
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from launch.training import data as data_module
from launch.training.batches import IGNORED, Pad, pack
from launch.training.data import compute_accuracy, load_data
from launch.training.demo import CHAT_TEMPLATE, demo_corpus, demo_tokenizer
from recipes.errors import UserError
from recipes.flags import RunFlags

CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]
SPOKEN = "Hi!<|im_end|>See you<|im_end|>"
UNMARKED_TEMPLATE = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def run_with(**chosen):
    defaults = {flag.name: flag.default for flag in dataclasses.fields(RunFlags)}
    return defaults | {"eval_strategy": "no"} | chosen


def jsonl(tmp_path, rows, name="data.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(*words):
    return [{"text": word} for word in words]


def decoded(tokenizer, dataset):
    return [tokenizer.decode(row) for row in dataset["input_ids"]]


def learned(tokenizer, row):
    """The text that the labels of a row ask for."""
    return tokenizer.decode([label for label in row["labels"] if label != IGNORED])


def problem(run, tokenizer, **options):
    with pytest.raises(UserError) as caught:
        load_data(run, tokenizer, **options)
    (found,) = caught.value.problems
    return found


# --- The demonstration -----------------------------------------------------------------------------------------------


def test_demonstration_is_the_same_each_time():
    assert demo_corpus() == demo_corpus()


def test_demonstration_is_python_source():
    assert all(ast.parse(text) for text in demo_corpus()[:10])


def test_demonstration_has_no_evaluation_unless_asked_for(tokenizer, monkeypatch):
    monkeypatch.setattr(data_module, "demo_corpus", lambda: ["import this\n"] * 40)
    assert load_data(run_with(), tokenizer).eval is None


def test_demonstration_holds_texts_out_for_evaluation(tokenizer, monkeypatch):
    monkeypatch.setattr(data_module, "demo_corpus", lambda: [f"text {n}\n" for n in range(40)])
    data = load_data(run_with(eval_strategy="steps"), tokenizer)
    assert len(data.train) == 38
    assert decoded(tokenizer, data.eval) == ["text 19\n<|endoftext|>", "text 39\n<|endoftext|>"]


def test_description_says_what_is_trained_on(tokenizer, monkeypatch):
    monkeypatch.setattr(data_module, "demo_corpus", lambda: ["x" * 2559])
    data = load_data(run_with(packing=True, max_length=256), tokenizer)
    assert data.description == "stdlib source, 10 sequences of 256 tokens"


# --- Files, folders, splits ------------------------------------------------------------------------------------------

WRITERS = {
    "data.jsonl": lambda rows, path: rows.to_json(path),
    "data.json": lambda rows, path: path.write_text(json.dumps(rows.to_list())),
    "data.csv": lambda rows, path: rows.to_csv(path),
    "data.parquet": lambda rows, path: rows.to_parquet(path),
    "data.txt": lambda rows, path: path.write_text("\n".join(rows["text"])),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_is_read(name, tmp_path, tokenizer):
    WRITERS[name](Dataset.from_list(texts("one", "two")), tmp_path / name)
    data = load_data(run_with(dataset_name=str(tmp_path / name)), tokenizer)
    assert decoded(tokenizer, data.train) == ["one<|endoftext|>", "two<|endoftext|>"]


def test_folder_written_by_save_to_disk(tmp_path, tokenizer):
    Dataset.from_list(texts("one")).save_to_disk(tmp_path / "saved")
    assert len(load_data(run_with(dataset_name=str(tmp_path / "saved")), tokenizer).train) == 1


def test_folder_of_saved_splits(tmp_path, tokenizer):
    splits = DatasetDict(train=Dataset.from_list(texts("one")), validation=Dataset.from_list(texts("two")))
    splits.save_to_disk(tmp_path / "saved")
    data = load_data(run_with(dataset_name=str(tmp_path / "saved"), eval_strategy="steps"), tokenizer)
    assert decoded(tokenizer, data.eval) == ["two<|endoftext|>"]


def test_folder_of_data_files(tmp_path, tokenizer):
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path, texts("one"), "folder/train.jsonl")
    jsonl(tmp_path, texts("two"), "folder/test.jsonl")
    data = load_data(run_with(dataset_name=str(tmp_path / "folder"), eval_strategy="steps"), tokenizer)
    assert decoded(tokenizer, data.eval) == ["two<|endoftext|>"]


def test_slices_of_a_file(tmp_path, tokenizer):
    run = run_with(
        dataset_name=jsonl(tmp_path, texts(*"abcdefghij")),
        dataset_train_split="train[:80%]",
        dataset_test_split="train[80%:]",
        eval_strategy="epoch",
    )
    data = load_data(run, tokenizer)
    assert (len(data.train), decoded(tokenizer, data.eval)) == (8, ["i<|endoftext|>", "j<|endoftext|>"])


def test_no_evaluation_split_is_read_without_evaluation(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a")), dataset_test_split="nowhere")
    assert load_data(run, tokenizer).eval is None


# --- What cannot be found --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./nothing", "nothing.jsonl", "/no/where", "~/nothing_here_at_all"])
def test_what_looks_like_a_path_is_a_missing_file(name, tokenizer):
    found = problem(run_with(dataset_name=name), tokenizer)
    assert (found.subject, found.what) == ("dataset_name", f"there is no file or folder {name}")


def test_unknown_kind_of_file_names_the_known_ones(tmp_path, tokenizer):
    (tmp_path / "data.xlsx").write_text("x")
    found = problem(run_with(dataset_name=str(tmp_path / "data.xlsx")), tokenizer)
    assert ".jsonl, .json, .csv, .parquet, .txt" in found.fix


def test_empty_file(tmp_path, tokenizer):
    assert "is empty" in problem(run_with(dataset_name=jsonl(tmp_path, [])), tokenizer).what


def test_broken_jsonl_names_the_line(tmp_path, tokenizer):
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert "line 2: " in problem(run_with(dataset_name=str(tmp_path / "data.jsonl")), tokenizer).what


def test_a_prompt_may_be_empty_in_the_first_row(tokenizer, tmp_path):
    rows = [{"prompt": None, "completion": "a"}, {"prompt": "b", "completion": "c"}]
    run = run_with(dataset_name=str(jsonl(tmp_path, rows)))
    assert len(load_data(run, tokenizer).train) == 2


def test_chats_written_as_text_are_refused(tokenizer, tmp_path):
    rows = [{"messages": json.dumps([{"role": "user", "content": "hi"}])}]
    assert "not lists of messages" in problem(run_with(dataset_name=str(jsonl(tmp_path, rows))), tokenizer).what


@pytest.mark.parametrize(
    "row", [{"input_ids": [1, -1, 2]}, {"input_ids": [1, 2, 3], "labels": [1, 2]}], ids=["negative", "labels too short"]
)
def test_tokens_that_cannot_be_trained_are_refused(row, tokenizer, tmp_path):
    assert problem(run_with(dataset_name=str(jsonl(tmp_path, [row]))), tokenizer).subject == "dataset_name"


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


UNREADABLE = {"a.csv": b"a,b\n1,2\n1,2,3,4\n", "a.parquet": b"no", "a.txt": b"\xe9"}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_file_is_one_line(name, tmp_path, tokenizer):
    (tmp_path / name).write_bytes(UNREADABLE[name])
    found = problem(run_with(dataset_name=str(tmp_path / name)), tokenizer)
    assert f"{name} cannot be read as" in found.what and "\n" not in str(found)


def test_folder_without_data(tmp_path, tokenizer):
    assert "cannot be read" in problem(run_with(dataset_name=str(tmp_path)), tokenizer).what


def test_hub_out_of_reach_says_it_is_no_local_file_either(tokenizer):
    found = problem(run_with(dataset_name="somebody/something"), tokenizer)
    assert found.what.startswith("'somebody/something' is neither a local file or folder nor a data set")


def test_unknown_split_lists_those_there_are(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a", "b")), dataset_train_split="learn")
    assert "the data has train (2 rows)" in problem(run, tokenizer).what


@pytest.mark.parametrize("wanted", ["train[", "train[:200%]", "train[5%:2%"])
def test_malformed_slice_is_about_the_split(wanted, tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a")), dataset_train_split=wanted)
    assert problem(run, tokenizer).subject == "dataset_train_split"


@pytest.mark.parametrize("wanted", ["train[:0]", "train[2:1]", "train[1:]"])
def test_empty_split(wanted, tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a")), dataset_train_split=wanted)
    assert problem(run, tokenizer).what == f"the split '{wanted}' is empty"


def test_nothing_to_evaluate_on_shows_how_to_split(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a")), eval_strategy="steps")
    assert "--dataset_test_split 'train[95%:]' --dataset_train_split 'train[:95%]'" in problem(run, tokenizer).fix


def test_missing_text_column_lists_the_columns(tmp_path, tokenizer):
    found = problem(run_with(dataset_name=jsonl(tmp_path, [{"body": "a", "id": 1}])), tokenizer)
    assert found.what == "there is no column 'text'; the data has body, id"


def test_text_column_with_numbers(tmp_path, tokenizer):
    assert "int64, not text" in problem(run_with(dataset_name=jsonl(tmp_path, [{"text": 1}])), tokenizer).what


def test_longer_than_the_model(tokenizer):
    found = problem(run_with(max_length=1025), tokenizer, max_positions=1024)
    assert found.subject == "max_length"


def test_main_process_releases_the_others_when_it_fails(monkeypatch, tmp_path, tokenizer):
    """Otherwise they would wait for it until the time-out of the process group."""
    waits = []
    state = SimpleNamespace(is_local_main_process=True, wait_for_everyone=lambda: waits.append("main"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("accelerate.PartialState", lambda: state)
    problem(run_with(dataset_name="./nothing"), tokenizer)
    assert waits == ["main"]


# --- Texts -----------------------------------------------------------------------------------------------------------


def test_texts_end_with_eos_and_are_learned_whole(tmp_path, tokenizer):
    row = load_data(run_with(dataset_name=jsonl(tmp_path, texts("a b"))), tokenizer).train[0]
    assert learned(tokenizer, row) == "a b<|endoftext|>"


def test_texts_are_cut_at_max_length(tmp_path, tokenizer):
    data = load_data(run_with(dataset_name=jsonl(tmp_path, texts("abcdef")), max_length=4), tokenizer)
    assert decoded(tokenizer, data.train) == ["abcd"]


def test_empty_texts_are_left_out_and_counted(tmp_path, tokenizer):
    data = load_data(run_with(dataset_name=jsonl(tmp_path, texts("abc", "", None))), tokenizer)
    assert data.description.endswith("1 examples of 4 tokens, the longest 4, 2 left out: nothing to learn in them")


def test_other_text_columns(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, [{"body": "a"}]), dataset_text_field="body")
    assert decoded(tokenizer, load_data(run, tokenizer).train) == ["a<|endoftext|>"]


def test_token_ids_are_taken_as_they_are(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, [{"input_ids": [5, 6, 7]}]))
    assert load_data(run, tokenizer).train[0] == {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}


def test_labels_beside_token_ids_are_kept(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}]))
    assert load_data(run, tokenizer).train[0]["labels"] == [-100, 6, 7]


def test_padding_of_token_ids_is_taken_off(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, [{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}]))
    assert load_data(run, tokenizer).train[0]["input_ids"] == [5, 6]


def test_one_file_has_no_configurations(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a")), dataset_config="en")
    assert problem(run, tokenizer).subject == "dataset_config"


def test_token_ids_of_another_tokenizer_are_refused(tmp_path, tokenizer):
    found = problem(run_with(dataset_name=jsonl(tmp_path, [{"input_ids": [5, 260]}])), tokenizer)
    assert "the token id 260" in found.what


# --- Chats -----------------------------------------------------------------------------------------------------------


def test_chats_are_learned_whole(tmp_path, tokenizer):
    data = load_data(run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT}])), tokenizer)
    assert learned(tokenizer, data.train[0]) == tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED_TEMPLATE], ids=["marked", "unmarked"])
def test_only_the_assistant_is_learned(template, tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = template
    run = run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT}]), assistant_only_loss=True)
    assert learned(tokenizer, load_data(run, tokenizer).train[0]) == SPOKEN


def test_only_the_assistant_is_learned_with_letters_of_several_bytes(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = UNMARKED_TEMPLATE
    chat = [{"role": "user", "content": "naïve 漢"}, {"role": "assistant", "content": "é😀"}]
    run = run_with(dataset_name=jsonl(tmp_path, [{"messages": chat}]), assistant_only_loss=True)
    assert learned(tokenizer, load_data(run, tokenizer).train[0]) == "é😀<|im_end|>"


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


def test_tools_beside_chats_are_said_to_be_unused(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT, "tools": "[]"}]))
    assert "the column tools is not used" in load_data(run, tokenizer).description


def test_chats_need_a_chat_template(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = None
    found = problem(run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT}])), tokenizer)
    assert "has no chat template" in found.what


def test_chat_that_the_template_refuses(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    found = problem(run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT}])), tokenizer)
    assert "refuses a chat of the data: roles must alternate" in found.what


def test_assistant_only_needs_chats(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a")), assistant_only_loss=True)
    assert problem(run, tokenizer).subject == "assistant_only_loss"


def test_chats_without_an_assistant_would_give_nan(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, [{"messages": CHAT[:1]}]), assistant_only_loss=True)
    assert "all labels are masked" in problem(run, tokenizer).what


# --- Prompts and completions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion_only", "expected"),
    [(None, " 4<|endoftext|>"), (True, " 4<|endoftext|>"), (False, "2+2= 4<|endoftext|>")],
)
def test_completions_are_learned_and_prompts_if_wanted(completion_only, expected, tmp_path, tokenizer):
    rows = [{"prompt": "2+2=", "completion": " 4"}]
    run = run_with(dataset_name=jsonl(tmp_path, rows), completion_only_loss=completion_only)
    assert learned(tokenizer, load_data(run, tokenizer).train[0]) == expected


def test_prompt_is_kept_in_the_input(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, [{"prompt": "2+2=", "completion": " 4"}]))
    assert decoded(tokenizer, load_data(run, tokenizer).train) == ["2+2= 4<|endoftext|>"]


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


# --- Packing ---------------------------------------------------------------------------------------------------------

documents = st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=40), min_size=1, max_size=30)


def packed(rows, length):
    examples = Dataset.from_dict({"input_ids": rows, "labels": rows}, features=data_module.TOKENIZED)
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


# --- Batches ---------------------------------------------------------------------------------------------------------


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
    config.use_cache = False  # with a cache, transformers 5.23 overlooks where sequences begin: the loss differs
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()
    name = jsonl(tmp_path, texts("one text", "another, longer text", "x"))
    losses = []
    for padding_free in (False, True):
        data = load_data(run_with(dataset_name=name, padding_free=padding_free), tokenizer)
        losses.append(model(**data.collator([data.train[n] for n in range(3)])).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# --- Classification --------------------------------------------------------------------------------------------------


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
def test_labels_that_are_no_classes(labels, tmp_path, tokenizer):
    assert "a class is a text or a number from 0" in problem(labelled(tmp_path, labels), tokenizer).what


def test_one_class_is_nothing_to_learn(tmp_path, tokenizer):
    assert problem(labelled(tmp_path, ["a", "a"]), tokenizer).what == "all rows have the label 'a'"


def test_classification_needs_data(tokenizer):
    assert problem(run_with(task="sequence_classification"), tokenizer).subject == "dataset_name"


def test_accuracy_is_the_share_of_right_answers():
    logits, right = np.array([[0.1, 0.9], [0.8, 0.2]]), np.array([1, 1])
    assert compute_accuracy(SimpleNamespace(predictions=logits, label_ids=right)) == {"accuracy": 0.5}


def test_accuracy_of_a_model_that_returns_more_than_logits():
    logits, right = np.array([[0.1, 0.9]]), np.array([1])
    assert compute_accuracy(SimpleNamespace(predictions=(logits, "more"), label_ids=right)) == {"accuracy": 1.0}
