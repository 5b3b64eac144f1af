"""The same training on any hardware, also if the batches of an epoch or evaluation are uneven."""

import pytest

from tests.support.rows import jsonl
from tests.support.running import launch_quickly, losses, model_flags, train_here

# Epochs of 30 examples, evaluations of 37.
ODD = "--dataset_train_split train[:30] --dataset_test_split train[30:67] --num_train_epochs 2".split()
STEPS = [*ODD, *"--logging_steps 1 --learning_rate 1e-3 --eval_strategy epoch --save_strategy no".split()]
LABELS = {
    "sequence_classification": lambda n: "no" if n * 7 % 3 else "yes",
    "multi_label_classification": lambda n: [name for place, name in enumerate("abc") if n * 7 % (place + 2)],
    "regression": lambda n: n * 7 % 5 - 1.25,
}
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in LABELS if case != "regression"]
SPEEDS = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")


def evaluations(outcome) -> list[float]:
    """The losses and metrics of all evaluations."""
    entries = [entry for entry in outcome.record["log_history"] if "eval_loss" in entry]
    return [entry[name] for entry in entries for name in entry if name.startswith("eval_") and name not in SPEEDS]


@pytest.mark.parametrize("case", ["causal_lm", "regression", *SLOW])
def test_losses_and_evaluations_are_equal_on_two_ranks_and_with_other_micro_batches(case, tiny_model, texts, tmp_path):
    data, more = texts, list[str]()
    if case in LABELS:  # in an order without a pattern
        rows = [{"text": f"row {n} " * (1 + n % 5), "label": LABELS[case](n)} for n in range(67)]
        data, more = jsonl(tmp_path, rows), ["--task", "sequence_classification"]
    one = train_here(tiny_model, data, tmp_path / "one", *STEPS, *more)
    assert len(losses(one)) == 4
    sizes = "--per_device_train_batch_size 16 --per_device_eval_batch_size 3".split()
    for other in (
        launch_quickly(*model_flags(tiny_model, data), *STEPS, *more, output=tmp_path / "two"),
        train_here(tiny_model, data, tmp_path / "sizes", *STEPS, *more, *sizes),
    ):
        assert losses(other) == pytest.approx(losses(one), rel=1e-5)
        assert evaluations(other) == pytest.approx(evaluations(one), rel=1e-5)
