"""Sources of data: files, folders and splits are read, and what cannot be read is named."""

import pytest
from datasets import Dataset, DatasetDict

from launch.data.load import load_data
from tests.support.rows import WRITERS, decoded, jsonl, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")


# --- Files, folders, splits ----------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_json_csv_parquet_text_and_gzip_files_are_read(name, tmp_path, tokenizer):
    WRITERS[name](Dataset.from_list(texts("one", "two")), tmp_path / name)
    data = load_data(run_with(dataset_name=str(tmp_path / name)), tokenizer)
    assert decoded(tokenizer, data.train) == ["one<|endoftext|>", "two<|endoftext|>"]


def test_other_files_beside_train_jsonl_are_left_out_with_a_note_and_a_glob_reads_all(tmp_path, tokenizer, capsys):
    for name in ("train", "more"):
        jsonl(tmp_path, texts(name), f"{name}.jsonl")
    data = load_data(run_with(dataset_name=str(tmp_path)), tokenizer)
    assert decoded(tokenizer, data.train) == ["train<|endoftext|>"]
    assert " not read, such as more.jsonl: " in " ".join(capsys.readouterr().out.split())
    data = load_data(run_with(dataset_name=f"{tmp_path}/*.jsonl"), tokenizer)  # all that match are one data set
    assert decoded(tokenizer, data.train) == ["more<|endoftext|>", "train<|endoftext|>"]
    assert "not read" not in capsys.readouterr().out


def test_a_dataset_dict_saved_with_save_to_disk_is_read(tmp_path, tokenizer):
    splits = DatasetDict(train=Dataset.from_list(texts("one")), validation=Dataset.from_list(texts("two")))
    splits.save_to_disk(tmp_path / "saved")
    data = load_data(run_with(dataset_name=str(tmp_path / "saved"), eval_strategy="steps"), tokenizer)
    assert decoded(tokenizer, data.eval) == ["two<|endoftext|>"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_all_files_of_a_folder_and_its_subfolders_are_read_as_one_dataset(suffix, tmp_path, tokenizer):
    """As a job finds a folder that is mounted for it, here one that Spark has written."""
    folder = tmp_path / "INPUT_data"
    (folder / "year=2025").mkdir(parents=True)
    for number, name in enumerate((f"part-00000-c000.{suffix}", f"part-00001-c000.{suffix}", f"year=2025/x.{suffix}")):
        rows = Dataset.from_list(texts(f"text {number}"))
        (rows.to_parquet if suffix == "parquet" else rows.to_json)(folder / name)
    (folder / "_SUCCESS").touch()
    data = load_data(run_with(dataset_name=str(folder)), tokenizer)
    assert sorted(decoded(tokenizer, data.train)) == [f"text {number}<|endoftext|>" for number in range(3)]


def test_a_csv_in_a_folder_in_which_a_comma_shifts_the_columns_is_refused(tmp_path, tokenizer):
    """pandas takes the first cells for an index, and reads the text from the second cells."""
    (tmp_path / "data.csv").write_text("text,label\nHello, dear,1\nBye, dear,0\n")
    found = problem(run_with(dataset_name=str(tmp_path)), tokenizer)
    assert "a comma in a text needs quotes" in found.what


def test_a_line_of_a_jsonl_that_is_no_json_is_named_by_its_number_in_the_file(tmp_path, tokenizer):
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n' * 50_000 + '{"text": "b"\n')
    found = problem(run_with(dataset_name=str(tmp_path)), tokenizer).what
    assert "line 50,001 of data.jsonl: JSON" in found and " in row " not in found


def test_texts_of_a_csv_stay_as_they_are_where_pandas_would_read_numbers(tmp_path, tokenizer):
    """pandas infers types anew for each 10,000 rows, and in each file."""
    (tmp_path / "a.csv").write_text("text\n" + "yes\n" * 10_000 + "007\n")
    (tmp_path / "b.csv").write_text("text\n1.50\n")
    data = load_data(run_with(dataset_name=f"{tmp_path}/*.csv", max_length=32), tokenizer)
    ends = [data.train[number]["input_ids"] for number in range(9_999, 10_002)]
    assert [tokenizer.decode(one, skip_special_tokens=True) for one in ends] == ["yes", "007", "1.50"]


def test_dataset_test_split_is_not_read_without_eval_strategy(tmp_path, tokenizer):
    run = run_with(dataset_name=jsonl(tmp_path, texts("a")), dataset_test_split="nowhere")
    assert load_data(run, tokenizer).eval is None


# --- What cannot be found ------------------------------------------------------------------------


def test_an_empty_data_folder_is_refused(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    assert "cannot be read" in str(problem(run_with(dataset_name=str(tmp_path / "empty")), tokenizer))


def test_a_dataset_name_that_is_neither_local_nor_reachable_on_the_hub_is_refused(tokenizer):
    found = problem(run_with(dataset_name="somebody/something"), tokenizer)
    assert found.what.startswith("'somebody/something' is neither a local file or folder nor a data set")


def test_an_unknown_split_is_refused_with_the_splits_of_the_data(tmp_path, tokenizer):
    jsonl(tmp_path, texts("a", "b"))
    run = run_with(dataset_name=str(tmp_path), dataset_train_split="learn")
    assert "the data has train" in problem(run, tokenizer).what


@pytest.mark.parametrize("wanted", ["train[", "train[:200%]", "train[5%:2%", "train[:0]", "train[2:1]", "train[1:]"])
def test_a_malformed_or_empty_slice_is_refused_as_a_mistake_in_the_split(wanted, tmp_path, tokenizer):
    found = problem(run_with(dataset_name=jsonl(tmp_path, texts("a")), dataset_train_split=wanted), tokenizer)
    assert found.subject == "dataset_train_split"
    assert (found.what == f"the split '{wanted}' is empty") == (wanted[-1] == "]" and "%" not in wanted)
    assert ("for percent, write train[80%:]" in found.fix) == (wanted[-1] == "]" and "%" not in wanted)


@pytest.mark.parametrize(("train", "shared"), [("train+test", 2), ("train", 1), ("train[:1]", 0)])
def test_evaluated_rows_that_are_also_trained_on_are_counted_in_any_split(train, shared, tmp_path, tokenizer):
    jsonl(tmp_path, texts("a", "b"), "train.jsonl")
    jsonl(tmp_path, texts("b", "c"), "test.jsonl")
    chosen = {"dataset_train_split": train, "eval_strategy": "epoch"}
    said = load_data(run_with(dataset_name=str(tmp_path), **chosen), tokenizer).description
    assert said.endswith(f", {shared} of the rows are also trained on" if shared else "at most")
