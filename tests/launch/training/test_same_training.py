"""The same training on any hardware, also if the batches of an epoch or evaluation are uneven."""

import json

import pytest

from tests.support.running import launch_quickly, losses, model_flags, train_here

ODD = "--dataset_train_split train[:30] --dataset_test_split train[30:67] --num_train_epochs 2".split()
STEPS = "--logging_steps 1 --learning_rate 1e-3 --eval_strategy epoch --save_strategy no".split()
CLASSIFY = "--task sequence_classification".split()


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """67 texts of two classes, in an order without a pattern."""
    file = tmp_path_factory.mktemp("labelled") / "rows.jsonl"
    rows = [{"text": f"row {n} " * (1 + n % 5), "label": "no" if n * 7 % 3 else "yes"} for n in range(67)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(
    scope="module",
    params=[
        "causal_lm",
        pytest.param("padding_free", marks=pytest.mark.slow),
        pytest.param("sequence_classification", marks=pytest.mark.slow),
    ],
)
def kind(request, tiny_model, texts, labelled):
    """Flags of a training whose epochs have 30 examples, and whose evaluations have 37."""
    if request.param == "sequence_classification":
        return [*model_flags(tiny_model, labelled), *ODD, *STEPS, *CLASSIFY]
    more = ["--padding_free"] if request.param == "padding_free" else []
    return [*model_flags(tiny_model, texts), *ODD, *STEPS, *more]


@pytest.fixture(scope="module")
def one_process(kind, tmp_path_factory):
    return train_here(*kind[1:4:2], tmp_path_factory.mktemp("one"), *kind[6:])


def evaluations(outcome) -> list[float]:
    return [entry["eval_loss"] for entry in outcome.record["log_history"] if "eval_loss" in entry]


@pytest.fixture(scope="module")
def two_ranks(kind, tmp_path_factory):
    return launch_quickly(*kind, output=tmp_path_factory.mktemp("two"), processes=2, config="standard.yaml")


def test_the_last_batch_of_an_epoch_is_the_same_on_two_ranks(one_process, two_ranks):
    assert len(losses(one_process)) == 4
    assert losses(two_ranks) == pytest.approx(losses(one_process), rel=1e-5)


def test_an_evaluation_is_the_same_on_two_ranks(one_process, two_ranks):
    assert evaluations(two_ranks) == pytest.approx(evaluations(one_process), rel=1e-5)


def test_an_evaluation_does_not_depend_on_its_batch_size(kind, one_process, tmp_path):
    other = train_here(*kind[1:4:2], tmp_path, *kind[6:], "--per_device_eval_batch_size", "3")
    assert evaluations(other) == pytest.approx(evaluations(one_process), rel=1e-5)


def test_the_micro_batch_does_not_change_the_losses(kind, one_process, tmp_path):
    other = train_here(*kind[1:4:2], tmp_path, *kind[6:], "--per_device_train_batch_size", "16")
    assert losses(other) == pytest.approx(losses(one_process), rel=1e-5)
