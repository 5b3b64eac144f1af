"""Flags, a configuration file, and values of the right type."""

from pathlib import Path

import numpy as np
import pytest
from transformers import SchedulerType

from recipes import legal
from recipes.run.command_line import coerce, with_flags
from tests.support.runs import resolved

FLAGS = {
    "--packing": True,
    "--packing true": True,
    "--packing=True": True,
    "--packing yes": True,
    "--recipe fast --no_packing": False,
    "--recipe fast --no-packing": False,
    "--recipe fast --packing false": False,
    "--fsdp": True,
    "--fsdp true": True,
    "--fsdp offload": "offload",
    "--max-steps 3": 3,
    "--max_steps -1": -1,
    "--lora_target_modules q_proj v_proj": ["q_proj", "v_proj"],
    '--accelerator_config {"even_batches":false}': {"even_batches": False},
    "--save_strategy no": "no",
    "--report_to none": "none",
}


@pytest.mark.parametrize("words", FLAGS)
def test_flags_are_read_in_the_usual_spellings_of_booleans_numbers_lists_and_json(words):
    run = resolved(words)
    name = [word for word in words.split() if word.startswith("--")][-1][2:].partition("=")[0].replace("-", "_")
    assert run[name.removeprefix("no_")] == FLAGS[words] and not run.problems


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("learning_rate: 1e-4", 1e-4),
        ("lr_scheduler_kwargs: {min_lr: 1e-6, decay_type: linear}", {"min_lr": 1e-6, "decay_type": "linear"}),
        ("eval_strategy: no", "no"),  # which YAML reads as false
        ("report_to: null", "none"),
    ],
)
def test_ambiguous_yaml_values_in_a_config_file_get_the_type_of_their_setting(text, value, config):
    run = resolved(["--config", config(text)])
    assert run[text.partition(":")[0]] == value and not run.problems


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("steps --max_steps 3", "is not a flag"),
        ("--max_steps 3 --max-steps 3", "is given twice"),
        ("--learning_rate", "Fix: --learning_rate with a number"),
        ("--run_name a b", "needs one value, got 'a b'"),
        ("--no_packing true", "no_packing: is not an argument"),
    ],
)
def test_a_mistake_in_a_command_line_has_a_fix(words, expected):
    problems = [str(problem) for problem in resolved(words).problems]
    assert [line for line in problems if expected in line and "Fix: " in line]


def test_flags_of_a_command_line_are_replaced_added_or_removed_by_the_function_named_with_flags():
    argv = ["--global-batch-size=8", "--no_packing", "--lora_target_modules", "a", "b", "--seed", "1"]
    flags = {"global_batch_size": 4, "packing": None, "lora_target_modules": ["c", "d"], "fit": True}
    words = "--seed 1 --global_batch_size 4 --lora_target_modules c d --fit true"
    assert with_flags(argv, flags) == words.split()


def field(annotation, default=None):
    return legal.Field("x", frozenset(annotation.split(" | ")), default)


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
        ("list | None", "q_proj", ["q_proj"]),
        ("bool", "t", True),
        ("str", SchedulerType.COSINE, "cosine"),
        ("str", Path("out"), "out"),
        ("float", np.float64(0.5), 0.5),
        ("list", ("a", "b"), ["a", "b"]),
    ],
)
def test_values_are_converted_to_the_type_of_their_setting(annotation, value, expected):
    found = coerce(value, field(annotation))
    assert (found, type(found)) == (expected, type(expected))


def test_a_whole_number_given_for_a_setting_becomes_a_float_only_if_the_default_is_a_float():
    assert type(coerce(0, field("float", 0.9))) is float
    assert type(coerce(np.int64(0), field("float", 500))) is int


@pytest.mark.parametrize(
    ("annotation", "value"),
    [("int", "1.5"), ("int", True), ("bool", "maybe"), ("float", "fast"), ("int", [1]), ("str", 3), ("float", "nan")],
)
def test_values_that_cannot_be_converted_to_the_type_of_their_setting_are_refused(annotation, value):
    with pytest.raises(ValueError, match="needs"):
        coerce(value, field(annotation))
