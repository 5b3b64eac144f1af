"""Sources of data: files, folders and splits are read, and what cannot be read is named."""

import json

import pytest
from datasets import Dataset, DatasetDict

from launch.data.load import load_data
from tests.support.rows import decoded, jsonl, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")


# --- Files, folders, splits ----------------------------------------------------------------------


WRITERS = {
    "data.jsonl": lambda rows, path: rows.to_json(path),
    "data.jsonl.gz": lambda rows, path: rows.to_json(path, compression="gzip"),
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


def test_a_folder_of_saved_splits_is_read(tmp_path, tokenizer):
    splits = DatasetDict(train=Dataset.from_list(texts("one")), validation=Dataset.from_list(texts("two")))
    splits.save_to_disk(tmp_path / "saved")
    data = load_data(run_with(dataset_name=str(tmp_path / "saved"), eval_strategy="steps"), tokenizer)
    assert decoded(tokenizer, data.eval) == ["two<|endoftext|>"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_folder_of_parts_is_read_whole(suffix, tmp_path, tokenizer):
    """As a job finds a folder that is mounted for it, here one that Spark has written."""
    folder = tmp_path / "INPUT_data"
    (folder / "year=2025").mkdir(parents=True)
    for number, name in enumerate((f"part-00000-c000.{suffix}", f"part-00001-c000.{suffix}", f"year=2025/x.{suffix}")):
        rows = Dataset.from_list(texts(f"text {number}"))
        (rows.to_parquet if suffix == "parquet" else rows.to_json)(folder / name)
    (folder / "_SUCCESS").touch()
    data = load_data(run_with(dataset_name=str(folder)), tokenizer)
    assert sorted(decoded(tokenizer, data.train)) == [f"text {number}<|endoftext|>" for number in range(3)]


def test_train_and_test_split_may_be_slices_of_one_file(tmp_path, tokenizer):
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


# --- What cannot be found ------------------------------------------------------------------------


def test_an_empty_folder_cannot_be_read(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    assert "cannot be read" in str(problem(run_with(dataset_name=str(tmp_path / "empty")), tokenizer))


def test_hub_out_of_reach_says_that_it_is_not_a_local_file_either(tokenizer):
    found = problem(run_with(dataset_name="somebody/something"), tokenizer)
    assert found.what.startswith("'somebody/something' is neither a local file or folder nor a data set")


def test_unknown_split_lists_those_there_are(tmp_path, tokenizer):
    jsonl(tmp_path, texts("a", "b"))
    run = run_with(dataset_name=str(tmp_path), dataset_train_split="learn")
    assert "the data has train" in problem(run, tokenizer).what


@pytest.mark.parametrize("wanted", ["train[", "train[:200%]", "train[5%:2%", "train[:0]", "train[2:1]", "train[1:]"])
def test_a_malformed_or_empty_slice_is_refused_as_a_mistake_in_the_split(wanted, tmp_path, tokenizer):
    found = problem(run_with(dataset_name=jsonl(tmp_path, texts("a")), dataset_train_split=wanted), tokenizer)
    assert found.subject == "dataset_train_split"
    assert (found.what == f"the split '{wanted}' is empty") == (wanted[-1] == "]" and "%" not in wanted)


def test_nothing_to_evaluate_on_shows_how_to_split(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a")), eval_strategy="steps")
    assert "--dataset_test_split 'train[90%:]' --dataset_train_split 'train[:90%]'" in problem(run, tokenizer).fix
