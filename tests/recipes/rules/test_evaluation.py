"""Rules about evaluation, and what happens without them."""

from __future__ import annotations

import pytest

from recipes.rules.evaluation import best_metric_is_reported, every_evaluation_is_saved
from tests.support.real_failures import arguments, assert_fires, tiny_llama, train
from tests.support.runs import A100, BEST, CLASSIFY, EVAL, MODEL, Run, machine, model, resolved

pytestmark = pytest.mark.usefixtures("fresh_state")

NUMBERS = f"{CLASSIFY} --problem_type regression"
SMOOTHED = "--use_liger_kernel --label_smoothing_factor 0.1"
PLATEAU = f"--lr_scheduler_type reduce_lr_on_plateau {EVAL}"

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "best_model_needs_matching_strategies": (Run(f"{BEST} {EVAL} --save_strategy epoch"), Run(f"{BEST} {EVAL}")),
    "every_evaluation_is_saved": (
        Run(f"{BEST} {EVAL} --eval_steps 5 --save_steps 10"),
        Run(f"{BEST} {EVAL} --eval_steps 5"),
    ),
    "saving_the_best_needs_evaluation": (
        Run("--save_strategy best --metric_for_best_model loss"),
        Run(f"--save_strategy best --metric_for_best_model loss {EVAL}"),
    ),
    "early_stopping_needs_evaluation": (
        Run("--early_stopping_patience 3"),
        Run(f"--early_stopping_patience 3 {EVAL} {BEST}"),
    ),
    "best_metric_is_reported": (
        Run(f"{EVAL} {BEST} --metric_for_best_model f1"),
        Run(f"{EVAL} {BEST} --metric_for_best_model eval_loss"),
    ),
    "best_is_the_better_value": (
        Run(f"{EVAL} {BEST} --metric_for_best_model loss --greater_is_better true"),
        Run(f"{EVAL} {BEST} --metric_for_best_model loss --greater_is_better false"),
    ),
    "plateaus_look_the_right_way": (
        Run(f"{PLATEAU} {CLASSIFY} --metric_for_best_model accuracy"),
        Run(f'{PLATEAU} {CLASSIFY} --metric_for_best_model accuracy --lr_scheduler_kwargs {{"mode":"max"}}'),
    ),
    "evaluating_needs_data": (Run("--eval_on_start"), Run(f"--eval_on_start {EVAL}")),
    "evaluations_gather_tensors": (
        Run(f"--eval_use_gather_object {EVAL}", world=2),
        Run("--eval_use_gather_object", world=2),
    ),
    "accuracy_is_computed_at_the_end": (
        Run(f"--batch_eval_metrics {CLASSIFY}"),
        Run(f"--eval_do_concat_batches false {CLASSIFY} {EVAL}"),
    ),
    "labels_have_one_name": (Run(f"--label_names foo {EVAL}"), Run(f"--label_names labels {EVAL}")),
    "liger_evaluates_plain_labels": (
        Run(f"{SMOOTHED} {EVAL} {MODEL}", hardware=machine(A100), files=model()),
        Run(f"{SMOOTHED} {MODEL}", hardware=machine(A100), files=model()),
    ),
    "a_training_trains": (Run("--do_train false"), Run("--do_train")),
    "test_split_is_used": (Run("--dataset_test_split test"), Run(f"--dataset_test_split test {EVAL}")),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("best_model_needs_matching_strategies", Run(BEST), "load_best_model_at_end"),
    ("best_model_needs_matching_strategies", Run(f"{BEST} --save_strategy no"), "load_best_model_at_end"),
    (
        "best_model_needs_matching_strategies",
        Run(f"{BEST} {EVAL} --eval_steps 3 --save_steps 7"),
        "load_best_model_at_end",
    ),
    (
        "best_model_needs_matching_strategies",
        Run(f"{BEST} {EVAL} --save_strategy best --eval_strategy no"),
        "load_best",
    ),
    ("every_evaluation_is_saved", Run(f"{BEST} {EVAL} --eval_steps 20 --save_steps 20 --max_steps 10"), "save_steps"),
    ("best_metric_is_reported", Run(f"{NUMBERS} {EVAL} {BEST} --metric_for_best_model f1_macro"), "metric_for_best"),
    ("best_metric_is_reported", Run(f"{CLASSIFY} {EVAL} {BEST} --metric_for_best_model f1"), "metric_for_best"),
    (
        "best_is_the_better_value",
        Run(f"{NUMBERS} {EVAL} {BEST} --metric_for_best_model mse --greater_is_better true"),
        "greater_is_better",
    ),
    ("saving_the_best_needs_evaluation", Run(f"--save_strategy best {EVAL}"), "save_strategy"),
    ("early_stopping_needs_evaluation", Run(f"--early_stopping_patience 3 {EVAL}"), "early_stopping_patience"),
    (
        "best_is_the_better_value",
        Run(f"{CLASSIFY} {EVAL} {BEST} --metric_for_best_model accuracy --greater_is_better false"),
        "greater_is_better",
    ),
    (
        "plateaus_look_the_right_way",
        Run(f'{PLATEAU} --lr_scheduler_kwargs {{"mode":"max"}}'),
        "lr_scheduler_type",
    ),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    (
        "liger_evaluates_plain_labels",
        Run(f"{SMOOTHED} {EVAL} {MODEL}", hardware=machine(A100), files=model(model_type="gpt2")),
    ),
    (
        "liger_evaluates_plain_labels",
        Run(
            f'{SMOOTHED} {EVAL} {MODEL} --liger_kernel_config {{"fused_linear_cross_entropy":false}}',
            hardware=machine(A100),
            files=model(),
        ),
    ),
    ("best_metric_is_reported", Run(f"{CLASSIFY} {EVAL} {BEST} --metric_for_best_model eval_f1_macro")),
    ("best_metric_is_reported", Run(f"{CLASSIFY} {EVAL} {BEST} --metric_for_best_model r2")),  # the data will tell
    ("every_evaluation_is_saved", Run(f"{BEST} {EVAL} --eval_steps 2 --save_steps 3")),  # an error says it
    ("best_model_needs_matching_strategies", Run(f"{BEST} {EVAL} --eval_steps 0.1 --save_steps 0.3")),
    ("best_model_needs_matching_strategies", Run(f"{BEST} {EVAL} --save_strategy best")),
    ("best_model_needs_matching_strategies", Run(f"{BEST} --eval_strategy epoch")),
    ("every_evaluation_is_saved", Run(f"{BEST} {EVAL} --eval_steps 5 --save_strategy steps")),
    ("every_evaluation_is_saved", Run(f"{BEST} {EVAL} --eval_steps 5 --save_steps 5 --max_steps 5")),
    ("best_is_the_better_value", Run(f"{EVAL} --greater_is_better true")),  # nothing reads it
    ("best_is_the_better_value", Run(f"{BEST} {EVAL} --metric_for_best_model f1 --greater_is_better false")),
]


def test_the_worst_model_is_the_best_one(tmp_path):
    every_step = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, learning_rate=1e-2)
    settings = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True, **every_step)
    trainer = train(tmp_path, evaluates=True, **settings)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_metric == max(losses) > min(losses)
    assert_fires("best_is_the_better_value", settings)


def test_a_plateau_in_the_wrong_direction_lowers_the_rate_of_a_falling_loss(tmp_path):
    every_step = dict(eval_strategy="steps", eval_steps=1, logging_steps=1, max_steps=4)
    settings = dict(lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"mode": "max", "patience": 0})
    history = train(tmp_path, evaluates=True, **settings, **every_step).state.log_history
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    assert losses == sorted(losses, reverse=True) and rates[-1] < rates[0] / 50
    assert_fires("plateaus_look_the_right_way", {**settings, **every_step})


def test_early_stopping_without_evaluation_is_an_assertion_error(tmp_path):
    from transformers import EarlyStoppingCallback

    with pytest.raises(AssertionError, match="EarlyStoppingCallback requires"):
        train(tmp_path, callbacks=[EarlyStoppingCallback(3)])
    assert_fires("early_stopping_needs_evaluation", {"early_stopping_patience": 3})


@pytest.mark.parametrize("needed", [dict(save_strategy="best"), dict(load_best_model_at_end=True)])
def test_a_metric_that_nobody_reports_fails_after_the_first_evaluation(needed, tmp_path):
    evaluation = dict(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    settings = {**evaluation, **needed, "metric_for_best_model": "foo"}
    with pytest.raises(KeyError, match="not found in the evaluation metrics"):
        train(tmp_path, evaluates=True, **settings)
    assert_fires("best_metric_is_reported", settings)


def test_metrics_batch_by_batch_are_not_what_ours_compute(tmp_path):
    from transformers import Trainer

    from launch.training.objective import Metrics

    metrics = Metrics("regression", ["score"])
    with pytest.raises(ValueError, match="must take a `compute_result` boolean argument"):
        Trainer(tiny_llama(), arguments(tmp_path, batch_eval_metrics=True), compute_metrics=metrics)
    settings = {"batch_eval_metrics": True, "task": "sequence_classification"}
    assert_fires("accuracy_is_computed_at_the_end", settings)


def test_saving_the_best_without_evaluation_saves_nothing(tmp_path):
    train(tmp_path, save_strategy="best", metric_for_best_model="loss", load_best_model_at_end=True)
    assert not list(tmp_path.glob("checkpoint-*"))
    assert_fires("saving_the_best_needs_evaluation", {"save_strategy": "best", "metric_for_best_model": "loss"})
    assert_fires("best_model_needs_matching_strategies", {"save_strategy": "best", "load_best_model_at_end": True})


def test_do_eval_alone_evaluates_nothing(tmp_path):
    history = train(tmp_path, evaluates=True, do_eval=True).state.log_history
    assert not [entry for entry in history if "eval_loss" in entry]
    assert_fires("evaluating_needs_data", {"do_eval": True})


def test_a_best_model_that_was_not_saved_is_not_loaded(tmp_path):
    """The first evaluation is the best here: its step has no checkpoint, so none is loaded."""
    evaluation = dict(eval_strategy="steps", eval_steps=1, metric_for_best_model="loss", greater_is_better=True)
    settings = {**evaluation, "load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 2}
    state = train(tmp_path, evaluates=True, **settings).state
    assert (state.best_global_step, state.best_model_checkpoint) == (1, None)
    assert_fires("every_evaluation_is_saved", settings)


def test_what_is_left_out_is_not_to_be_left_out():
    argv = f"{BEST} {EVAL} --eval_steps 10 --max_steps 6"
    (advice,) = every_evaluation_is_saved(resolved(argv))
    assert advice.fix == "a smaller --eval_steps"
    (advice,) = every_evaluation_is_saved(resolved(f"{argv} --save_steps 10"))
    assert "or leave save_steps out" in advice.fix


@pytest.mark.parametrize(("metric", "greater"), [("mse", False), ("eval_mae", False), ("r2", None), ("f1_macro", None)])
def test_a_smaller_error_is_better_though_trainer_takes_all_but_a_loss_for_greater(metric, greater, tmp_path):
    """`greater_is_better` None leaves it to Trainer."""
    evaluates = dict(eval_strategy="steps", metric_for_best_model=metric)
    assert arguments(tmp_path, **evaluates).greater_is_better is True
    assert resolved(f"{CLASSIFY} {EVAL} --metric_for_best_model {metric}")["greater_is_better"] is greater


def test_the_fix_of_a_metric_names_those_that_begin_alike():
    (found,) = best_metric_is_reported(resolved(f"{CLASSIFY} {EVAL} --metric_for_best_model f1"))
    assert found.fix == "f1_macro or f1_weighted or f1_micro"
