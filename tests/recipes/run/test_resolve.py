"""Resolving: precedence, sources, types, and nothing lost on the way."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import SchedulerType

from recipes import legal
from recipes.catalog import RECIPES
from recipes.errors import UserError
from recipes.run import resolve
from recipes.run.command_line import coerce
from recipes.run.hardware import Gpu, Hardware

CPU = Hardware(cores=2)


def resolved(argv="", **keywords):
    words = argv.split() if isinstance(argv, str) else argv
    return resolve(words, hardware=CPU, environment={}, **keywords)


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_the_command_line_wins_over_the_file_and_the_file_over_the_recipe(config):
    path = config("recipe: fast\nlogging_steps: 7\nlearning_rate: 1e-4\n")
    run = resolved(["--config", path, "--learning_rate", "2e-4"])
    assert (run["learning_rate"], run["logging_steps"], run["save_total_limit"]) == (2e-4, 7, 1)


def test_each_value_says_where_it_came_from(config):
    path = config("logging_steps: 7\n")
    run = resolved(["--config", path, "--seed", "1"])
    names = ("seed", "logging_steps", "save_total_limit", "per_device_train_batch_size", "adam_beta1")
    sources = [run.setting(name).source for name in names]
    assert sources == ["command line", path, "recipe standard", "batch arithmetic", "library default"]


def test_text_in_yaml_that_is_a_number_is_read_as_one(config):
    assert resolved(["--config", config("learning_rate: 1e-4\n")])["learning_rate"] == 1e-4


@pytest.mark.parametrize("words", ["--packing", "--packing true", "--packing=True", "--packing yes"])
def test_a_switch_can_be_written_in_the_usual_ways(words):
    assert resolved(words)["packing"] is True


@pytest.mark.parametrize("words", ["--no_packing", "--no-packing", "--packing false"])
def test_a_switch_can_be_turned_off(words):
    assert resolved(f"--recipe fast {words}")["packing"] is False


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


@given(
    recipe=st.sampled_from(sorted(RECIPES)),
    rate=st.floats(1e-6, 1.0),
    steps=st.integers(1, 10_000),
    world=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_what_is_typed_is_what_trains(recipe, rate, steps, world):
    run = resolved(["--recipe", recipe, "--learning_rate", repr(rate), "--max_steps", str(steps)], world_size=world)
    arguments = run.training_arguments()
    assert not run.problems
    assert (arguments["learning_rate"], arguments["max_steps"]) == (rate, steps)
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] * world == 16


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        ("float", "1e-4", 1e-4),
        ("float", "2", 2),
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
    assert coerce(value, legal.Field("x", annotation)) == expected


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


def test_gpus_that_are_not_to_be_used_decide_nothing():
    h100 = Hardware((Gpu("NVIDIA H100", (9, 0), 80 * 2**30),), cores=16)
    run = resolve(["--recipe", "fast", "--use_cpu"], hardware=h100, environment={})
    assert (run["bf16"], run["torch_compile"], run["tf32"]) == (False, False, None)


def test_a_bare_no_in_yaml_is_the_text_where_no_is_a_choice(config):
    run = resolved(["--config", config("eval_strategy: no\n")])
    assert run["eval_strategy"] == "no" and not run.problems


def test_trainers_own_deepspeed_argument_names_the_engine(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    assert resolved(["--deepspeed", str(file)]).engine.title == "DeepSpeed ZeRO-3"


def test_a_setting_under_its_old_and_new_name_is_refused():
    if "activation_checkpointing" not in legal.trainer_fields():
        pytest.skip("this transformers has only the old name")
    assert resolved("--gradient_checkpointing true --activation_checkpointing false").problems


def test_epochs_that_were_asked_for_win_over_the_demonstrations_steps():
    run = resolve(["--num_train_epochs", "3"], hardware=Hardware(), environment={})
    assert (run["num_train_epochs"], run["max_steps"]) == (3, -1)


def test_a_key_that_is_written_twice_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("learning_rate: 1e-4\nseed: 1\nlearning_rate: 1e-5\n")
    with pytest.raises(UserError, match="'learning_rate' twice"):
        resolve(["--config", str(tmp_path / "run.yaml")], hardware=Hardware(), environment={})


@pytest.mark.parametrize("asked", ["none", None])
def test_reporting_nowhere_is_a_word(asked):
    run = resolve(settings={"report_to": asked}, hardware=Hardware(), environment={})
    assert run["report_to"] == "none"
