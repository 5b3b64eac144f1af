"""What the user wrote: flags, a configuration file, and values of the right type."""

from pathlib import Path

import numpy as np
import pytest
from transformers import SchedulerType

from recipes import legal
from recipes.errors import UserError
from recipes.run import resolve
from recipes.run.command_line import coerce
from recipes.run.hardware import Hardware
from tests.support.runs import resolved


def test_text_in_yaml_that_is_a_number_is_read_as_one(config):
    assert resolved(["--config", config("learning_rate: 1e-4\n")])["learning_rate"] == 1e-4


def test_numbers_below_a_setting_of_yaml_are_numbers_too(config):
    run = resolved(["--config", config("lr_scheduler_kwargs: {min_lr: 1e-6, decay_type: linear}\n")])
    assert run["lr_scheduler_kwargs"] == {"min_lr": 1e-6, "decay_type": "linear"}


@pytest.mark.parametrize("words", ["--packing", "--packing true", "--packing=True", "--packing yes"])
def test_a_switch_can_be_written_in_the_usual_ways(words):
    assert resolved(words)["packing"] is True


@pytest.mark.parametrize("words", ["--no_packing", "--no-packing", "--packing false"])
def test_a_switch_can_be_turned_off(words):
    assert resolved(f"--recipe fast {words}")["packing"] is False


@pytest.mark.parametrize(("words", "value"), [("--fsdp", True), ("--fsdp true", True), ("--fsdp offload", "offload")])
def test_a_setting_that_may_stand_alone_takes_words_too(words, value):
    run = resolved(words)
    assert run["fsdp"] == value and not run.problems


def test_dashes_are_underscores():
    assert resolved("--max-steps 3")["max_steps"] == 3


def test_a_list_takes_several_words():
    assert resolved("--lora_target_modules q_proj v_proj")["lora_target_modules"] == ["q_proj", "v_proj"]


def test_json_is_read_as_a_mapping():
    run = resolved(["--accelerator_config", '{"even_batches": false}'])
    assert run["accelerator_config"] == {"even_batches": False}


def test_no_as_a_strategy_is_text():
    assert resolved("--save_strategy no")["save_strategy"] == "no"


def test_negative_numbers_are_values():
    assert resolved("--max_steps -1")["max_steps"] == -1


def test_a_bare_no_in_yaml_is_the_text_where_no_is_a_choice(config):
    run = resolved(["--config", config("eval_strategy: no\n")])
    assert run["eval_strategy"] == "no" and not run.problems


def test_a_key_that_is_written_twice_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-4\nseed: 1\nlearning_rate: 1e-5\n")
    with pytest.raises(UserError, match="'learning_rate' twice"):
        resolve(["--config", str(tmp_path / "run.yaml")], hardware=Hardware(), environment={})


def test_a_setting_under_its_old_and_new_name_is_refused():
    if "activation_checkpointing" not in legal.trainer_fields():
        pytest.skip("this transformers has only the old name")
    assert resolved("--gradient_checkpointing true --activation_checkpointing false").problems


@pytest.mark.parametrize("asked", ["none", None])
def test_reporting_nowhere_is_a_word(asked):
    run = resolve(settings={"report_to": asked}, hardware=Hardware(), environment={})
    assert run["report_to"] == "none"


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        ("float", "1e-4", 1e-4),
        ("float", "2", 2.0),
        ("float", 20, 20),
        ("float | None", None, None),
        ("int | None", "none", None),
        ("bool", "no", False),
        ("str", "no", "no"),
        ("str | bool", "all", "all"),
        ("dict | str | None", '{"a": 1}', {"a": 1}),
        ("list[str] | None", "q_proj", ["q_proj"]),
        ("bool", "t", True),
        ("str", SchedulerType.COSINE, "cosine"),
        ("str", Path("out"), "out"),
        ("float", np.float64(0.5), 0.5),
        ("list[str]", ("a", "b"), ["a", "b"]),
    ],
)
def test_values_become_the_type_of_the_field(annotation, value, expected):
    given = coerce(value, legal.Field("x", annotation))
    assert (given, type(given)) == (expected, type(expected))


@pytest.mark.parametrize("value", [0, np.int64(0)])
def test_a_whole_number_becomes_a_float_where_the_default_is_one(value):
    assert type(coerce(value, legal.Field("adam_beta1", "float", 0.9))) is float
    assert type(coerce(value, legal.Field("logging_steps", "float", 500))) is int


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        ("int", "1.5"),
        ("int", True),
        ("bool", "maybe"),
        ("float", "fast"),
        ("int", [1]),
        ("str", 3),
        ("float", "nan"),
        ("float", "inf"),
    ],
)
def test_values_of_another_type_are_refused(annotation, value):
    with pytest.raises(ValueError, match="takes"):
        coerce(value, legal.Field("x", annotation))
