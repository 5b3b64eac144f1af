"""The loss of a classifier is that of plain transformers, and its metrics are scikit-learn's."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from transformers import BertConfig, BertForSequenceClassification

from launch.data.batches import IGNORED
from launch.training.objective import MeanOverExamples, Metrics, countable, filler
from recipes.run.metrics import METRICS, smaller_is_better

LABELS = {
    "single_label_classification": torch.tensor([0, 2, 1, 2, 2, 0]),
    "multi_label_classification": torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 0], [0, 0, 1]]),
    "regression": torch.tensor([0.5, -100.0, 3.0, 1e3, 0.0, -2.5]),
    "regression of three": torch.arange(18.0).reshape(6, 3),
}


@pytest.fixture(scope="module", params=LABELS)
def case(request):
    """The problem type, a model's loss by plain transformers, its logits, and the labels."""
    labels, problem_type = LABELS[request.param], request.param.partition(" ")[0]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    config.num_labels = 1 if labels.dim() == 1 and problem_type == "regression" else 3
    config.problem_type = problem_type
    ids = torch.randint(20, (6, 5))
    output = BertForSequenceClassification(config).eval()(input_ids=ids, labels=labels)
    return problem_type, output.loss.item(), output.logits.detach(), labels


def loss(case, start=0, stop=6, items=None):
    problem_type, _, logits, labels = case
    return MeanOverExamples(problem_type)({"logits": logits[start:stop]}, labels[start:stop], items).item()


def test_the_loss_is_that_of_plain_transformers(case):
    assert loss(case) == pytest.approx(case[1], rel=1e-6)


def test_micro_batches_of_any_size_add_up_to_it(case):
    split = loss(case, 0, 1, items=6) + loss(case, 1, 4, items=6) + loss(case, 4, 6, items=6)
    assert split == pytest.approx(case[1], rel=1e-6)


def test_an_example_that_only_fills_up_a_batch_counts_nothing(case):
    problem_type, _, logits, labels = case
    logits = logits.clone().requires_grad_()
    filled = labels.clone()
    filled[4:] = filler(labels)
    masked = MeanOverExamples(problem_type)({"logits": logits}, filled, 4)
    assert masked.item() == pytest.approx(loss(case, 0, 4), rel=1e-6)
    masked.backward()
    assert torch.isfinite(logits.grad).all() and not logits.grad[4:].any()


def test_items_are_examples_whatever_their_labels(case):
    labels = case[3].clone()
    assert int(countable({"labels": labels})["labels"].ne(IGNORED).sum()) == 6  # -100.0 is a number to learn
    labels[5] = filler(labels)
    assert int(countable({"labels": labels})["labels"].ne(IGNORED).sum()) == 5


# --- Metrics -------------------------------------------------------------------------------------


def figures(problem_type, names, predictions, labels):
    """Without any warning: scikit-learn's would stand between the lines of a training."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Metrics(problem_type, names)(SimpleNamespace(predictions=predictions, label_ids=labels))


def of_classes(logits, labels, names=("a", "b")):
    return figures("single_label_classification", names, logits, labels)


@pytest.mark.parametrize("problem_type", METRICS)
def test_rules_know_the_metrics_that_are_reported(problem_type):
    one = problem_type == "single_label_classification"
    labels = np.array([0, 1]) if one else np.array([[0.0, 1.0], [1.0, 1.0]])
    outcome = figures(problem_type, ["a", "b"], np.array([[0.1, 0.9], [0.8, -0.2]]), labels)
    assert set(outcome) - {"per_class"} == set(METRICS[problem_type])
    assert all(smaller_is_better(name) is (name in ("mse", "mae")) for name in METRICS[problem_type])


def test_separate_batches_count_each_example_once():
    batches = [np.array([[2.0, 1.0], [0.0, 3.0]]), np.array([[1.0, 0.0]])]
    assert of_classes(batches, [np.array([0, 1]), np.array([1])])["accuracy"] == pytest.approx(2 / 3)


def test_the_averages_are_those_of_scikit_learn():
    numbers = np.random.default_rng(0)
    logits, right = numbers.normal(size=(50, 4)), numbers.integers(0, 4, 50)
    outcome, predicted = of_classes(logits, right, "abcd"), logits.argmax(-1)
    for average in ("macro", "weighted"):
        assert outcome[f"f1_{average}"] == sklearn_metrics.f1_score(right, predicted, average=average)
    assert outcome["precision_macro"] == sklearn_metrics.precision_score(right, predicted, average="macro")
    table = sklearn_metrics.classification_report(right, predicted, target_names=list("abcd"), output_dict=True)
    for name in "abcd":
        expected = (table[name]["precision"], table[name]["recall"], table[name]["f1-score"], table[name]["support"])
        assert tuple(outcome["per_class"][name].values()) == pytest.approx(expected)


@pytest.mark.parametrize(("right", "seen", "f1"), [([0, 1], "ab", 1 / 3), ([0, 0], "a", 1.0)])
def test_a_class_that_nobody_predicts_counts_as_0_and_one_that_never_occurs_is_left_out(right, seen, f1):
    outcome = of_classes(np.array([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]), np.array(right), "abc")
    assert set(outcome["per_class"]) == {*seen} and outcome["f1_macro"] == pytest.approx(f1)
    assert outcome["per_class"].get("b", {}).get("f1", 0.0) == 0.0


def test_several_labels_are_each_as_likely_as_not_at_0():
    logits, right = np.array([[1.0, -1.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    outcome = figures("multi_label_classification", ["a", "b"], logits, right)
    assert (outcome["accuracy"], outcome["f1_micro"]) == (0.5, pytest.approx(0.8))
    assert outcome["per_class"]["a"] == {"precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3), "examples": 1}


@pytest.mark.parametrize(
    ("predicted", "right", "expected"),
    [
        ([1.0, 2.0, 4.0], [1.0, 2.0, 3.0], (1 / 3, 1 / 3, 0.5)),
        ([1.0, 1.0], [3.0, 3.0], (4, 2, 0)),
        ([1.0], [3.0], (4, 2, 0)),
    ],
    ids=["three", "without variance", "one"],
)
def test_the_errors_of_a_regression(predicted, right, expected):
    outcome = figures("regression", ["score"], np.array(predicted)[:, None], np.array(right))
    assert tuple(outcome[name] for name in ("mse", "mae", "r2")) == pytest.approx(expected)
