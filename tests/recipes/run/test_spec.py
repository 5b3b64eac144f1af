"""A run: every value has a source, what depends on others follows, and nothing changes it."""

from dataclasses import FrozenInstanceError

import pytest

from recipes import legal
from recipes.run import Setting
from recipes.run.batch import Batch
from tests.support.runs import resolved


def test_each_value_says_where_it_came_from(config):
    path = config("logging_steps: 7\n")
    run = resolved(["--config", path, "--seed", "1"])
    names = ("seed", "logging_steps", "save_total_limit", "per_device_train_batch_size", "adam_beta1")
    sources = [run.setting(name).source for name in names]
    assert sources == ["command line", path, "recipe standard", "batch arithmetic", "library default"]


def test_the_new_name_of_activation_checkpointing_is_the_same_setting():
    if "activation_checkpointing" not in legal.trainer_fields():
        pytest.skip("this transformers has only the old name")
    run = resolved("--activation_checkpointing")
    assert run["gradient_checkpointing"] is True
    assert run.training_arguments()["activation_checkpointing"] is True


def test_the_demonstration_ends_where_a_model_or_data_is_named():
    assert resolved("").demonstration
    assert not resolved("--dataset_name data.jsonl").demonstration
    assert resolved("--dataset_name data.jsonl")["max_steps"] == -1


def test_a_machine_without_gpus_trains_on_its_cpu_explicitly():
    assert resolved("").training_arguments()["use_cpu"] is True


@pytest.mark.parametrize("field", ["given", "batch", "world_size", "limits"])
def test_a_run_cannot_be_changed(field):
    run = resolved("")
    with pytest.raises(FrozenInstanceError):
        setattr(run, field, None)


def test_a_limit_makes_another_run_and_leaves_the_old_one():
    run = resolved("--dataset_name data.jsonl")
    limited = run.limited("max_length", 128, "the model's longest sequence")
    assert (run["max_length"], run.setting("max_length").source) == (1024, "library default")
    assert limited.setting("max_length") == Setting(128, "limit", "the model's longest sequence")


@pytest.mark.parametrize(("argv", "limit"), [("", None), ("", 2048), ("--max_length 512", 128)])
def test_a_limit_lowers_only_what_the_user_did_not_write(argv, limit):
    run = resolved(f"--dataset_name data.jsonl {argv}")
    assert run.limited("max_length", limit, "") is run


def test_another_batch_makes_another_run_and_what_depends_on_it_follows():
    run = resolved("--recipe fast", world_size=1)
    split = run.at_batch(Batch(16, 1, 1, "measured"), "fit.json")
    assert (run["gradient_accumulation_steps"], run["ddp_static_graph"]) == (2, False)
    assert (split["gradient_accumulation_steps"], split["ddp_static_graph"]) == (1, True)
    assert split.setting("per_device_train_batch_size") == Setting(16, "fit.json", "measured")
