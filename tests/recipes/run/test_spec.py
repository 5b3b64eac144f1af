"""A run: every value has a source, and values that depend on others follow."""

from dataclasses import replace

import pytest

from recipes import legal
from recipes.run import Setting
from recipes.run.batch import Batch
from tests.support.runs import resolved


def test_each_setting_names_the_source_of_its_value(config):
    path = config("logging_steps: 7\n")
    run = resolved(["--config", path, "--seed", "1"])
    names = ("seed", "logging_steps", "save_total_limit", "per_device_train_batch_size", "adam_beta1", "use_cpu")
    sources = [run.setting(name).source for name in names]
    assert sources == ["command line", path, "recipe standard", "batch arithmetic", "library default", "hardware"]


def test_activation_and_gradient_checkpointing_are_one_setting_and_may_not_contradict():
    if "activation_checkpointing" not in legal.trainer_fields():
        pytest.skip("this transformers has only the old name")
    run = resolved("--activation_checkpointing")
    assert run["gradient_checkpointing"] is True
    assert run.training_arguments()["activation_checkpointing"] is True
    assert resolved("--gradient_checkpointing true --activation_checkpointing false").problems


def test_the_demonstrations_max_steps_do_not_apply_where_data_or_epochs_are_given():
    named = resolved("--dataset_name data.jsonl")
    assert resolved("").demonstration and not named.demonstration
    assert named["max_steps"] == -1 < resolved("")["max_steps"]
    assert resolved("--num_train_epochs 3")["max_steps"] == -1  # epochs that the user wrote


def test_a_setting_above_the_models_limit_is_lowered_in_a_copy_of_the_run_unless_the_user_gave_it():
    run = resolved("--dataset_name data.jsonl")
    limited = run.limited("max_length", 128, "the model's longest sequence")
    assert run["max_length"] == 1024
    assert limited.setting("max_length") == Setting(128, "limit", "the model's longest sequence")
    assert run.limited("max_length", None, "") is run.limited("max_length", 2048, "") is run
    written = resolved("--max_length 512")
    assert written.limited("max_length", 128, "") is written


def test_replacing_the_batch_of_a_resolved_run_recomputes_the_settings_that_depend_on_it():
    run = resolved("--recipe fast", world_size=1)
    split = replace(run, batch=Batch(16, 1, 1, "measured", "fit.json"))
    assert (run["gradient_accumulation_steps"], run["ddp_static_graph"]) == (2, False)
    assert (split["gradient_accumulation_steps"], split["ddp_static_graph"]) == (1, True)
    assert split.setting("per_device_train_batch_size") == Setting(16, "fit.json", "measured")
