"""The columns of local files are judged before anything is imported, as the training will judge."""

import pytest
from datasets import Dataset

from launch.data.columns import require_columns
from launch.data.load import load_data
from recipes.errors import UserError
from tests.support.rows import WRITERS, jsonl
from tests.support.runs import resolved

CLASSIFY = "--task sequence_classification"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def problems(file, flags=""):
    try:
        require_columns(resolved(f"--dataset_name {file} {flags}"))
    except UserError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("name", ["data.jsonl", "data.csv", "data.parquet", "data.jsonl.gz"])
def test_a_data_file_without_a_known_column_is_refused_with_the_columns_that_it_has(name, tmp_path):
    WRITERS[name](Dataset.from_list([{"question": "Why?", "number": 3}]), tmp_path / name)
    (found,) = problems(tmp_path / name)
    assert found.subject == "dataset_text_field" and name in found.what and "question, number" in found.what
    assert found.fix.startswith("rename columns") and found.source == "library default"


def test_both_missing_columns_of_a_classifier_are_reported_at_once(tmp_path):
    found = problems(jsonl(tmp_path, [{"review": "good", "stars": 5}]), CLASSIFY)
    assert [one.subject for one in found] == ["dataset_text_field", "dataset_label_field"]


@pytest.mark.parametrize("flag", ["assistant_only_loss", "completion_only_loss"])
def test_assistant_only_loss_and_completion_only_loss_are_refused_for_a_text_column(flag, tmp_path):
    (found,) = problems(jsonl(tmp_path, [{"text": "a"}]), f"--{flag}")
    assert found.subject == flag and "has text, and no" in found.what and found.source == "command line"


LEGAL = [
    ("chats", [CHAT], ""),
    ("answers in chats", [CHAT], "--assistant_only_loss"),
    ("answers of instructions", [{"instruction": "a", "output": "b"}], "--completion_only_loss"),
    ("another text column", [{"body": "a"}], "--dataset_text_field body"),
    ("renamed columns", [{"q": "a", "a": "b"}], "--dataset_columns q=prompt a=completion"),
    ("a column that only later rows have", [{"number": 1}, {"text": "a"}], ""),
    ("a classifier's columns", [{"text": "a", "label": 1}], CLASSIFY),
]


@pytest.mark.parametrize(("rows", "flags"), [case[1:] for case in LEGAL], ids=[case[0] for case in LEGAL])
def test_the_column_check_accepts_data_with_columns_of_a_known_name_or_renamed_by_a_flag(rows, flags, tmp_path):
    assert not problems(jsonl(tmp_path, rows), flags)


def test_a_label_column_in_the_data_of_a_language_model_is_reported_as_advice_and_not_as_an_error(tmp_path):
    (found,) = require_columns(resolved(f"--dataset_name {jsonl(tmp_path, [{'text': 'a', 'label': 1}])}"))
    assert found.severity == "advice" and found.fix.startswith("--task sequence_classification")


@pytest.mark.parametrize("text", ["", "[\n {'a': 1}]", '[{"a": 1}]', "\xff\xfe"])
def test_the_column_check_accepts_a_json_file_that_is_not_json_lines(text, tmp_path):
    (tmp_path / "d.json").write_text(text, encoding="latin-1")
    require_columns(resolved(f"--dataset_name {tmp_path / 'd.json'}"))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_csv_whose_columns_are_not_separated_by_commas_is_refused(separator, tmp_path):
    (tmp_path / "d.csv").write_text(f"text{separator}label\nHello, dear,{separator}1\n")
    with pytest.raises(UserError, match=r"separates its columns by .* Fix: run pandas.read_csv"):
        require_columns(resolved(f"--dataset_name {tmp_path / 'd.csv'}"))


@pytest.mark.parametrize("rows", ["text,label\nHello, dear,1\n", "\ntext\n\nHello, dear\n", "text\nHello,\n"])
def test_a_csv_whose_first_row_has_more_cells_than_the_header_is_refused(rows, tmp_path):
    (tmp_path / "d.csv").write_text(rows)
    with pytest.raises(UserError, match="more cells in its first row than in its header: a comma in a text"):
        require_columns(resolved(f"--dataset_name {tmp_path / 'd.csv'}"))


@pytest.mark.parametrize(
    "rows",
    {
        "blank lines": "\ntext\n\nHello\n",
        "an index column": ",text\n0,Hello\n",
        "an index column of pandas": "text,__index_level_0__\nHello,7\n",
        "row names of R": '"text"\n"1","Hello, dear"\n"2","Bye"\n',
        "a quoted line break": 'text,n\n"Hello,\ndear",1\n',
        "a long text": f"text\n{'a ' * 70_000}\n",
    }.items(),
    ids=lambda item: item[0],
)
def test_a_csv_whose_rows_fit_its_header_is_legal(rows, tmp_path, tokenizer, own_cache):
    (tmp_path / "d.csv").write_text(rows[1])
    run = resolved(f"--dataset_name {tmp_path / 'd.csv'}")
    assert require_columns(run) == [] and len(load_data(run, tokenizer).train)


def test_dataset_columns_with_an_absent_column_is_refused_with_the_columns_name(tmp_path):
    (found,) = problems(jsonl(tmp_path, [{"text": "a"}]), "--dataset_columns qestion=prompt")
    assert (found.subject, found.source) == ("dataset_columns", "command line") and "'qestion'" in found.what
