"""The targets of a classifier, recognised by the label column: one class, several or numbers."""

import math
from decimal import Decimal

import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from pyarrow import parquet

from launch.data.labels import MULTI, REGRESSION, SINGLE, recognised
from launch.data.load import load_data, shown_examples
from recipes.errors import UserError
from tests.support.rows import jsonl, problem, run_with

pytestmark = pytest.mark.usefixtures("own_cache")
SPLITS = {"eval_strategy": "steps", "dataset_train_split": "train[:2]", "dataset_test_split": "train[2:]"}


def labelled(tmp_path, labels, **chosen):
    path = jsonl(tmp_path, [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)])
    return run_with(dataset_name=path, task="sequence_classification", **chosen)


def batch_of(data):
    return data.collator([data.train[number] for number in range(len(data.train))])["labels"].tolist()


ABC = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
TARGETS = {
    "texts, in alphabetical order": (["good", "bad", "good"], None, SINGLE, ["bad", "good"], [1, 0, 1]),
    "true or false": ([True, False], None, SINGLE, ["0", "1"], [1, 0]),
    "numbers around zero": ([0, -1, 1], None, SINGLE, ["-1", "0", "1"], [1, 0, 2]),
    "ids with gaps": ([10, 20, 10**9, 20], None, SINGLE, ["10", "20", "1000000000"], [0, 1, 2, 1]),
    "numbers from 1": ([1, 5, 2], None, SINGLE, ["1", "2", "5"], [0, 2, 1]),
    "whole numbers with a point, on request": ([3.0, 1.0], SINGLE, SINGLE, ["1", "3"], [1, 0]),
    "lists of texts": ([["b", "a"], [], ["a"]], None, MULTI, ["a", "b"], ABC),
    "lists of ids": ([[30, 20], [], [20]], None, MULTI, ["20", "30"], ABC),
    "a 0 or 1 for each class": ([[1, 1], [0, 0], [1, 0]], None, MULTI, ["0", "1"], ABC),
    "with a point": (ABC, None, MULTI, ["0", "1"], ABC),
    "fractions": ([0.5, -100.0, 3.0], None, REGRESSION, ["label"], [0.5, -100.0, 3.0]),
    "whole numbers, on request": ([5, 1], REGRESSION, REGRESSION, ["label"], [5.0, 1.0]),
}


@pytest.mark.parametrize("name", TARGETS)
def test_the_label_column_decides_the_problem_type_and_the_classes(name, tmp_path, tokenizer):
    labels, wanted, kind, names, batch = TARGETS[name]
    data = load_data(labelled(tmp_path, labels, problem_type=wanted), tokenizer)
    assert (data.problem_type, data.labels, batch_of(data)) == (kind, names, batch)
    words = {SINGLE: f"{len(names)} classes", MULTI: f"multi-label: {len(names)} labels", REGRESSION: "regression"}
    assert words[kind] in data.description and (kind == REGRESSION or ", ".join(names) in data.description)
    assert [*shown_examples(data, tokenizer, 1)] == [f"text 0 -> {labels[0]}"]


def test_dataset_columns_renames_the_columns_of_a_classifier(tmp_path, tokenizer):
    path = jsonl(tmp_path, [{"review": f"text {label}", "sentiment": label} for label in "ab"])
    renamed = {"dataset_columns": ["review=text", "sentiment=label"], "task": "sequence_classification"}
    assert load_data(run_with(dataset_name=path, **renamed), tokenizer).labels == ["a", "b"]


WRONG = {
    "nothing in a row": (
        [1, None],
        None,
        "dataset_label_field",
        "1 row without a usable label (first: row 2 of the split)",
    ),
    "objects": ([{"a": 1}, {"a": 2}], None, "dataset_label_field", "2 rows without a usable label"),
    "numbers and texts": ([1, "x"], None, "dataset_label_field", "classes must be all texts or all whole numbers"),
    "fractions as classes": ([0.5, 1.5], SINGLE, "dataset_label_field", "must be all texts or all whole numbers"),
    "one class": (["a", "a"], None, "dataset_label_field", "all rows have the same label: a"),
    "several classes as one": ([["a"], ["b"]], SINGLE, "problem_type", "holds lists"),
    "one class as several": (["a", "b"], MULTI, "problem_type", "holds one label a row"),
    "a row without a list": ([["a"], None, ["b"]], None, "dataset_label_field", "1 row without a usable label"),
    "no number": ([0.5, math.nan], None, "dataset_label_field", "1 row without a usable label"),
    "lists of fractions": ([[0.5], [0.5, 1.5]], None, "dataset_label_field", "all texts or all whole numbers"),
    "texts as numbers": (["a", "b"], REGRESSION, "problem_type", "the column 'label' holds other values"),
}


@pytest.mark.parametrize(("labels", "wanted", "subject", "what"), WRONG.values(), ids=WRONG)
def test_invalid_classification_labels_are_refused_with_a_fix(labels, wanted, subject, what, tmp_path, tokenizer):
    found = problem(labelled(tmp_path, labels, problem_type=wanted), tokenizer)
    assert found.subject == subject and what in found.what and found.fix


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        (["a", "b", "c"], "has labels unlike the training labels: 'c'"),
        (["a", "b", None], "the column 'label' has 1 row without a usable label (first: row 1 of the split)"),
    ],
)
def test_an_evaluation_split_with_unknown_or_missing_labels_is_refused(labels, what, tmp_path, tokenizer):
    found = problem(labelled(tmp_path, labels, **SPLITS), tokenizer)
    assert (found.subject, found.what) == ("dataset_test_split", what)


def test_an_evaluation_split_may_lack_a_class(tmp_path, tokenizer):
    data = load_data(labelled(tmp_path, ["a", "b", "b"], **SPLITS), tokenizer)
    assert [row["labels"] for row in data.eval] == [1]


@pytest.mark.parametrize("kind", [ClassLabel, List])
def test_class_names_are_taken_from_a_class_label_feature(kind, tmp_path, tokenizer):
    named = ClassLabel(names=["x", "y", "z"])
    feature, labels = (named, [1, 0]) if kind is ClassLabel else (List(named), [[0, 1], [2, 0]])
    features = Features({"text": Value("string"), "label": feature})
    rows = Dataset.from_dict({"text": ["a", "b"], "label": labels}, features)
    rows.save_to_disk(tmp_path / "saved")
    data = load_data(run_with(dataset_name=str(tmp_path / "saved"), task="sequence_classification"), tokenizer)
    assert data.labels == ["x", "y", "z"]
    assert batch_of(data) == ([1, 0] if kind is ClassLabel else [[1, 1, 0], [1, 0, 1]])


KNOWN = {
    "in its order": ([20, 10], ["20", "10"], ["20", "10"], [0, 1]),
    "more than the data": (["GOOD", "bad"], ["good", "fair", "bad"], ["good", "fair", "bad"], [0, 2]),
    "one of them alone": (["a", "a"], ["a", "b"], ["a", "b"], [0, 0]),
    "other classes": (["a", "b"], ["b", "c"], ["a", "b"], [0, 1]),
    "in upper and in lower case": (["a", "A"], ["A", "a"], ["A", "a"], [1, 0]),
    "one in another case": (["US", "X"], ["us", "US", "x"], ["us", "US", "x"], [1, 2]),
    "known in one case": (["a", "A"], ["a", "b"], ["A", "a"], [1, 0]),
}


@pytest.mark.parametrize("case", KNOWN)
def test_the_class_names_of_a_model_are_kept_if_they_cover_the_data(case, tmp_path, tokenizer):
    labels, of_model, names, numbers = KNOWN[case]
    data = load_data(labelled(tmp_path, labels), tokenizer, classes=of_model)
    assert (data.labels, batch_of(data)) == (names, numbers)


# --- What the run says of it ---------------------------------------------------------------------


def test_a_problem_type_inferred_from_the_labels_is_recorded_with_data_as_its_source(tmp_path):
    run, advice = recognised(labelled(tmp_path, [0.5]), REGRESSION)
    assert (run["problem_type"], run.setting("problem_type").source, advice) == (REGRESSION, "data", [])


def test_settings_are_checked_again_once_the_labels_give_the_problem_type(tmp_path):
    wrong = labelled(tmp_path, [0.5], eval_strategy="steps", metric_for_best_model="f1_macro")
    with pytest.raises(UserError, match="f1_macro is not reported"):
        recognised(wrong, REGRESSION)
    _, advice = recognised(labelled(tmp_path, [0.5], label_smoothing_factor=0.1), REGRESSION)
    assert [found.subject for found in advice] == ["label_smoothing_factor"]


def test_parquet_labels_of_decimal_type_are_read_as_regression_numbers(tmp_path, tokenizer):
    rows = pa.table({"text": ["one", "two"], "label": pa.array([Decimal("0.5"), Decimal("2.0")])})
    parquet.write_table(rows, tmp_path / "rows.parquet")
    run = run_with(dataset_name=str(tmp_path / "rows.parquet"), task="sequence_classification")
    assert batch_of(load_data(run, tokenizer)) == [0.5, 2.0]
