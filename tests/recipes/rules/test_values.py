"""Rules about values: ranges, numbers of steps, and what limits them."""

from __future__ import annotations

import pytest

from recipes import legal
from recipes.run import resolve
from recipes.run.hardware import Hardware
from tests.support.real_failures import BY_NAME, assert_fires, train
from tests.support.runs import EVAL, Run

pytestmark = pytest.mark.usefixtures("fresh_state")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "values_are_in_range": (Run("--save_total_limit 0"), Run("--save_total_limit 1")),
    "debug_options_exist": (Run("--debug overflow"), Run("--debug underflow_overflow")),
    "a_run_has_steps": (Run("--num_train_epochs 0 --max_steps -1"), Run("--num_train_epochs 0 --max_steps 5")),
    "steps_above_one_are_whole": (Run("--logging_steps 2.5"), Run("--logging_steps 0.5")),
    "memory_can_be_limited": (
        Run("--memory_limit 2", hardware=Hardware(platform="darwin")),
        Run("--memory_limit 2"),
    ),
    "timings_go_to_a_table": (Run("--measure timings.txt"), Run("--measure timings.jsonl")),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("values_are_in_range", Run("--adam_beta1 1.0"), "adam_beta1"),
    ("values_are_in_range", Run("--max_steps 0"), "max_steps"),
    ("a_run_has_steps", Run("--save_steps 0"), "save_steps"),
    ("values_are_in_range", Run("--log_level loud"), "log_level"),
    ("values_are_in_range", Run("--use_peft --lora_r 0"), "lora_r"),
    ("values_are_in_range", Run(f"{EVAL} --eval_delay -1"), "eval_delay"),
    ("debug_options_exist", Run(f"--debug tpu_metrics_debug {EVAL}", missing=("torch_xla",)), "debug"),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("values_are_in_range", Run(f"{EVAL} --eval_steps 0")),  # logging_steps counts then
    ("values_are_in_range", Run("--data_seed -1")),
    ("debug_options_exist", Run("--debug tpu_metrics_debug")),  # only evaluations read them
    ("a_run_has_steps", Run("--logging_steps 0 --logging_strategy no --save_steps 0 --save_strategy epoch")),
]


def test_a_save_total_limit_of_zero_keeps_every_checkpoint(tmp_path):
    train(tmp_path, save_total_limit=0, save_strategy="steps", save_steps=1, max_steps=3)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    assert_fires("values_are_in_range", {"save_total_limit": 0})


@pytest.mark.parametrize("argv", ["--lora_r 0", "--optim sgd --adam_beta2 1", "--eval_delay -1", "--ddp_timeout 0"])
def test_a_value_that_the_run_does_not_read_is_no_error(argv):
    run = resolve(argv.split(), hardware=Hardware(), environment={})
    assert {problem.severity for problem in BY_NAME["values_are_in_range"](run)} == {"advice"}


def test_a_negative_data_seed_is_a_seed(tmp_path):
    assert train(tmp_path, data_seed=-1).state.global_step == 2


def test_zero_max_steps_train_one_step_of_several_epochs(tmp_path):
    assert train(tmp_path, max_steps=0, num_train_epochs=3).state.global_step == 1
    assert_fires("values_are_in_range", {"max_steps": 0})


def test_zero_epochs_train_nothing(tmp_path):
    assert train(tmp_path, max_steps=-1, num_train_epochs=0).state.global_step == 0
    assert_fires("a_run_has_steps", {"num_train_epochs": 0.0, "max_steps": -1})


@pytest.mark.parametrize("optim", ["sgd", "adagrad", "rmsprop"])
def test_an_optimizer_without_betas_trains_with_any(optim, tmp_path):
    assert optim in legal.optimizers_without_betas()
    assert train(tmp_path, optim=optim, adam_beta2=1.0).state.global_step == 2
