"""The loss of a classifier is that of plain transformers, and its metrics are scikit-learn's."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from transformers import BertConfig, BertForSequenceClassification

from launch.data.encode import IGNORED
from launch.training.objective import countable, filler, mean_loss, metrics_of
from recipes.run.metrics import METRICS, smaller_is_better
from tests.support.models import SMALL

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
    config = BertConfig(**SMALL, intermediate_size=64)
    config.num_labels = 1 if labels.dim() == 1 and problem_type == "regression" else 3
    config.problem_type = problem_type
    ids = torch.randint(20, (6, 5))
    output = BertForSequenceClassification(config).eval()(input_ids=ids, labels=labels)
    return problem_type, output.loss.item(), output.logits.detach(), labels


def loss(case, start=0, stop=6, items=None):
    problem_type, _, logits, labels = case
    return mean_loss({"logits": logits[start:stop]}, labels[start:stop], items, problem_type=problem_type).item()


def test_classification_losses_of_uneven_micro_batches_add_up_to_the_full_batch_loss(case):
    split = loss(case, 0, 1, items=6) + loss(case, 1, 4, items=6) + loss(case, 4, 6, items=6)
    assert split == pytest.approx(case[1], rel=1e-6)


def test_filler_examples_of_a_batch_add_no_loss_and_no_gradient(case):
    problem_type, _, logits, labels = case
    logits = logits.clone().requires_grad_()
    filled = labels.clone()
    filled[4:] = filler(labels)
    masked = mean_loss({"logits": logits}, filled, 4, problem_type=problem_type)
    assert masked.item() == pytest.approx(loss(case, 0, 4), rel=1e-6)
    masked.backward()
    assert torch.isfinite(logits.grad).all() and not logits.grad[4:].any()


def test_examples_that_only_fill_a_batch_are_not_counted_as_items(case):
    labels = case[3].clone()
    labels[5] = filler(labels)
    assert int(countable({"labels": labels})["labels"].ne(IGNORED).sum()) == 5


# --- Metrics -------------------------------------------------------------------------------------


def figures(problem_type, predictions, labels):
    """Without any warning: scikit-learn's would stand between the lines of a training."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return metrics_of(problem_type, SimpleNamespace(predictions=predictions, label_ids=labels))


@pytest.mark.parametrize("problem_type", METRICS)
def test_each_problem_type_has_its_documented_metrics_and_only_mse_and_mae_are_minimised(problem_type):
    one = problem_type == "single_label_classification"
    labels = np.array([0, 1]) if one else np.array([[0.0, 1.0], [1.0, 1.0]])
    outcome = figures(problem_type, np.array([[0.1, 0.9], [0.8, -0.2]]), labels)
    assert set(outcome) == set(METRICS[problem_type])
    assert all(smaller_is_better(name) is (name in ("mse", "mae")) for name in METRICS[problem_type])


def test_accuracy_over_several_batches_counts_each_example_once():
    batches = [np.array([[2.0, 1.0], [0.0, 3.0]]), np.array([[1.0, 0.0]])]
    outcome = figures("single_label_classification", batches, [np.array([0, 1]), np.array([1])])
    assert outcome["accuracy"] == pytest.approx(2 / 3)


def test_f1_and_precision_averages_equal_scikit_learns_and_an_unpredicted_class_counts_as_0():
    numbers = np.random.default_rng(0)
    logits, right = numbers.normal(size=(50, 4)), numbers.integers(0, 4, 50)
    logits[:, 3] = -9
    outcome, predicted = figures("single_label_classification", logits, right), logits.argmax(-1)
    for average in ("macro", "weighted"):
        assert outcome[f"f1_{average}"] == sklearn_metrics.f1_score(right, predicted, average=average)
    expected = sklearn_metrics.precision_score(right, predicted, average="macro", zero_division=0)
    assert outcome["precision_macro"] == expected


def test_a_multi_label_logit_above_0_predicts_its_label():
    logits, right = np.array([[1.0, -1.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    outcome = figures("multi_label_classification", logits, right)
    assert (outcome["accuracy"], outcome["f1_micro"]) == (0.5, pytest.approx(0.8))


@pytest.mark.parametrize(
    ("predicted", "right", "expected"),
    [
        ([1.0, 2.0, 4.0], [1.0, 2.0, 3.0], (1 / 3, 1 / 3, 0.5)),
        ([1.0, 1.0], [3.0, 3.0], (4, 2, 0)),
        ([1.0], [3.0], (4, 2, 0)),
    ],
    ids=["three", "without variance", "one"],
)
def test_regression_metrics_are_mse_mae_and_r2(predicted, right, expected):
    outcome = figures("regression", np.array(predicted)[:, None], np.array(right))
    assert tuple(outcome[name] for name in ("mse", "mae", "r2")) == pytest.approx(expected)
