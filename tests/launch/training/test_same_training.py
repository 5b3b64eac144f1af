"""The same training on any hardware, also if the batches of an epoch or evaluation are uneven."""

import json

import pytest

from tests.support.running import launch_quickly, losses, model_flags, train_here

ODD = "--dataset_train_split train[:30] --dataset_test_split train[30:67] --num_train_epochs 2".split()
STEPS = "--logging_steps 1 --learning_rate 1e-3 --eval_strategy epoch --save_strategy no".split()
CLASSIFY = "--task sequence_classification".split()


LABELS = {
    "sequence_classification": lambda n: "no" if n * 7 % 3 else "yes",
    "multi_label_classification": lambda n: [name for place, name in enumerate("abc") if n * 7 % (place + 2)],
    "regression": lambda n: n * 7 % 5 - 1.25,
}


@pytest.fixture(scope="module")
def labelled(request, tmp_path_factory):
    """67 texts with labels in an order without a pattern."""
    file = tmp_path_factory.mktemp("labelled") / "rows.jsonl"
    label = LABELS[request.getfixturevalue("case")]
    rows = [{"text": f"row {n} " * (1 + n % 5), "label": label(n)} for n in range(67)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(
    scope="module",
    params=[
        "causal_lm",
        pytest.param("padding_free", marks=pytest.mark.slow),
        pytest.param("sequence_classification", marks=pytest.mark.slow),
        pytest.param("multi_label_classification", marks=pytest.mark.slow),
        "regression",
    ],
)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def kind(case, request, tiny_model, texts):
    """Flags of a training whose epochs have 30 examples, and whose evaluations have 37."""
    if case in LABELS:
        return [*model_flags(tiny_model, request.getfixturevalue("labelled")), *ODD, *STEPS, *CLASSIFY]
    more = ["--padding_free"] if case == "padding_free" else []
    return [*model_flags(tiny_model, texts), *ODD, *STEPS, *more]


@pytest.fixture(scope="module")
def one_process(kind, tmp_path_factory):
    return train_here(*kind[1:4:2], tmp_path_factory.mktemp("one"), *kind[6:])


SPEEDS = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def evaluations(outcome) -> list[float]:
    """The losses and metrics of all evaluations."""
    entries = [entry for entry in outcome.record["log_history"] if "eval_loss" in entry]
    return [entry[name] for entry in entries for name in entry if name.startswith("eval_") and name not in SPEEDS]


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
