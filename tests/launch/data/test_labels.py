"""What a classifier learns: one class, several or a number, recognised by the label column."""

import math

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from launch.data.demo import demo_tokenizer
from launch.data.labels import MULTI, REGRESSION, SINGLE, recognised
from launch.data.load import load_data
from recipes.errors import UserError
from tests.support.rows import jsonl, problem, run_with, texts

pytestmark = pytest.mark.usefixtures("own_cache")


# --- One class -----------------------------------------------------------------------------------


def labelled(tmp_path, labels, name="data.jsonl", **chosen):
    rows = [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)]
    path = jsonl(tmp_path, rows, name)
    return run_with(dataset_name=path, task="sequence_classification", **chosen)


def labels_of(data):
    return [row["labels"] for row in data.train]


CLASSES = {
    "texts, in alphabetical order": (["good", "bad", "good"], ["bad", "good"], [1, 0, 1]),
    "numbers from 0 stay": ([0, 2], ["0", "1", "2"], [0, 2]),
    "true or false": ([True, False], ["0", "1"], [1, 0]),
    "numbers below zero": ([1, -1, 1], ["-1", "1"], [1, 0, 1]),
    "numbers around zero": ([0, -1, 1], ["-1", "0", "1"], [1, 0, 2]),
    "ids with gaps": ([10, 20, 10**9, 20], ["10", "20", "1000000000"], [0, 1, 2, 1]),
    "a gap after zero": ([10**18, 0], ["0", str(10**18)], [1, 0]),
    "numbers from 1": ([1, 5, 2], ["1", "2", "5"], [0, 2, 1]),
}


@pytest.mark.parametrize("kind", CLASSES)
def test_classes_are_numbered_in_their_order(kind, tmp_path, tokenizer):
    labels, names, numbers = CLASSES[kind]
    data = load_data(labelled(tmp_path, labels), tokenizer)
    assert (data.problem_type, data.labels, labels_of(data)) == (SINGLE, names, numbers)
    assert data.collator([data.train[0], data.train[1]])["labels"].tolist() == numbers[:2]


NO_CLASSES = {
    "a class is a text or a whole number": ([None, 1], ["a", None]),
    "lists, or numbers and texts mixed": ([1, "x"], [{"a": 1}, {"a": 2}]),
}


@pytest.mark.parametrize(("what", "labels"), [(what, one) for what, both in NO_CLASSES.items() for one in both])
def test_labels_that_are_not_classes(what, labels, tmp_path, tokenizer):
    found = problem(labelled(tmp_path, labels), tokenizer)
    assert found.subject == "dataset_label_field" and what in found.what


def test_class_names_come_with_the_data(tmp_path, tokenizer):
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    Dataset.from_dict({"text": ["a"], "label": [1]}, features=features).save_to_disk(tmp_path / "saved")
    run = run_with(dataset_name=str(tmp_path / "saved"), task="sequence_classification")
    assert load_data(run, tokenizer).labels == ["no", "yes"]


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


def test_one_class_is_nothing_to_learn(tmp_path, tokenizer):
    assert problem(labelled(tmp_path, ["a", "a"]), tokenizer).what == "all rows have the label 'a'"


def test_classification_needs_data(tokenizer):
    with pytest.raises(UserError, match="classification needs labelled texts"):
        load_data(run_with(task="sequence_classification", packing=False), tokenizer)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_classes_may_be_texts_in_any_table(suffix, tmp_path):
    import pandas

    file = tmp_path / f"reviews.{suffix}"
    table = pandas.DataFrame({"text": ["good", "bad"] * 4, "label": ["pos", "neg"] * 4})
    table.to_csv(file, index=False) if suffix == "csv" else table.to_parquet(file)
    run = run_with(task="sequence_classification", dataset_name=str(file))
    assert load_data(run, demo_tokenizer()).labels == ["neg", "pos"]


KNOWN = {
    "in its order": ([20, 10], ["20", "10"], ["20", "10"], [0, 1]),
    "more than the data": (["GOOD", "bad"], ["good", "fair", "bad"], ["GOOD", "fair", "bad"], [0, 2]),
    "one of them alone": (["a", "a"], ["a", "b"], ["a", "b"], [0, 0]),
    "one in two spellings": (["Yes", "yes", "no"], ["no", "yes"], ["Yes", "no", "yes"], [0, 2, 1]),
}


@pytest.mark.parametrize("case", KNOWN)
def test_a_model_that_knows_the_classes_keeps_them(case, tmp_path, tokenizer):
    labels, of_model, names, numbers = KNOWN[case]
    data = load_data(labelled(tmp_path, labels), tokenizer, classes=of_model)
    assert (data.labels, labels_of(data)) == (names, numbers)
    assert data.description.endswith("as many as the model knows") == (len(names) > len(set(labels)))


def test_an_evaluation_may_lack_a_class(tmp_path, tokenizer):
    splits = {"dataset_train_split": "train[:2]", "dataset_test_split": "train[2:]"}
    data = load_data(labelled(tmp_path, ["a", "b", "b"], eval_strategy="steps", **splits), tokenizer)
    assert [row["labels"] for row in data.eval] == [1]


def test_whole_numbers_with_a_point_are_classes_on_request(tmp_path, tokenizer):
    data = load_data(labelled(tmp_path, [3.0, 1.0], problem_type=SINGLE), tokenizer)
    assert (data.labels, labels_of(data)) == (["1", "3"], [1, 0])


def test_fractions_are_never_classes(tmp_path, tokenizer):
    found = problem(labelled(tmp_path, [0.5, 1.5], problem_type=SINGLE), tokenizer)
    assert "a class is a text or a whole number" in found.what and "--problem_type regression" in found.fix


# --- Several classes at once ---------------------------------------------------------------------


def batch_of(data):
    return data.collator([data.train[number] for number in range(len(data.train))])["labels"].tolist()


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ([["b", "a"], [], ["a"]], ["a", "b"]),
        ([[30, 20], [], [20]], ["20", "30"]),
        ([[1, 1], [0, 0], [1, 0]], ["0", "1"]),
        ([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]], ["0", "1"]),
        ([[True, True], [False, False], [True, False]], ["0", "1"]),
    ],
)
def test_lists_are_several_classes_at_once(labels, names, tmp_path, tokenizer):
    data = load_data(labelled(tmp_path, labels), tokenizer)
    assert (data.problem_type, data.labels) == (MULTI, names)
    assert batch_of(data) == [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0]]
    assert data.description.endswith("multi-label: 2 labels")


def test_lists_of_named_classes(tmp_path, tokenizer):
    features = Features({"text": Value("string"), "label": List(ClassLabel(names=["x", "y", "z"]))})
    Dataset.from_dict({"text": ["a", "b"], "label": [[0, 1], [2, 0]]}, features=features).save_to_disk(tmp_path / "d")
    data = load_data(run_with(dataset_name=str(tmp_path / "d"), task="sequence_classification"), tokenizer)
    assert (data.labels, batch_of(data)) == (["x", "y", "z"], [[1, 1, 0], [1, 0, 1]])


def test_one_class_a_row_may_be_learned_as_any_number(tmp_path, tokenizer):
    data = load_data(labelled(tmp_path, ["b", "a"], problem_type=MULTI), tokenizer)
    assert (data.problem_type, batch_of(data)) == (MULTI, [[0.0, 1.0], [1.0, 0.0]])


def test_several_classes_are_not_one(tmp_path, tokenizer):
    found = problem(labelled(tmp_path, [["a"], ["b"]], problem_type=SINGLE), tokenizer)
    assert found.subject == "problem_type" and MULTI in found.fix


def test_a_row_without_a_list_is_refused(tmp_path, tokenizer):
    found = problem(labelled(tmp_path, [["a"], None, ["b"]]), tokenizer)
    assert "1 row without a usable label" in found.what and "empty where no class applies" in found.fix


# --- Numbers -------------------------------------------------------------------------------------


def test_whole_numbers_are_a_regression_on_request(tmp_path, tokenizer):
    assert batch_of(load_data(labelled(tmp_path, [5, 1], problem_type=REGRESSION), tokenizer)) == [5.0, 1.0]


def test_fractions_are_a_regression(tmp_path, tokenizer):
    data = load_data(labelled(tmp_path, [0.5, -100.0, 3.0]), tokenizer)
    assert (data.problem_type, data.labels, batch_of(data)) == (REGRESSION, ["label"], [0.5, -100.0, 3.0])
    assert data.description.endswith("regression: numbers from -100 to 3")


def test_lists_of_fractions_are_several_numbers(tmp_path, tokenizer):
    data = load_data(labelled(tmp_path, [[0.5, 2.0], [1.5, 0.0]]), tokenizer)
    assert (data.problem_type, data.labels) == (REGRESSION, ["label_0", "label_1"])
    assert batch_of(data) == [[0.5, 2.0], [1.5, 0.0]]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([0.5, None, None], "2 rows without a usable label"),
        ([0.5, math.nan], "1 row without a usable label"),
        ([0.5, math.inf], "1 row without a usable label"),
        ([[0.5], [0.5, 1.5]], "the lists in 'label' hold 1, 2 numbers"),
    ],
)
def test_numbers_that_cannot_be_learned(labels, expected, tmp_path, tokenizer):
    assert expected in problem(labelled(tmp_path, labels), tokenizer).what


def test_texts_are_not_numbers(tmp_path, tokenizer):
    found = problem(labelled(tmp_path, ["a", "b"], problem_type=REGRESSION), tokenizer)
    assert found.what == "regression learns numbers, and the column 'label' holds string"


def test_an_evaluation_has_as_many_numbers(tmp_path, tokenizer):
    splits = {"dataset_train_split": "train[:2]", "dataset_test_split": "train[2:]"}
    run = labelled(tmp_path, [[0.5, 1.0], [0.1, 2.0], [0.5]], eval_strategy="steps", **splits)
    found = problem(run, tokenizer)
    assert found.subject == "dataset_test_split" and "has 1 numbers a row" in found.what


# --- What the run says of it ---------------------------------------------------------------------


def test_the_run_records_what_its_data_says(tmp_path):
    run, advice = recognised(labelled(tmp_path, [0.5]), REGRESSION)
    assert (run["problem_type"], run.setting("problem_type").source, advice) == (REGRESSION, "data", [])


def test_a_metric_of_other_labels_is_refused_once_the_data_is_known(tmp_path):
    run = labelled(tmp_path, [0.5], eval_strategy="steps", metric_for_best_model="f1_macro")
    with pytest.raises(UserError, match="f1_macro is not reported"):
        recognised(run, REGRESSION)


def test_label_smoothing_is_for_one_class(tmp_path):
    _, advice = recognised(labelled(tmp_path, [0.5], label_smoothing_factor=0.1), REGRESSION)
    assert [found.subject for found in advice] == ["label_smoothing_factor"]
