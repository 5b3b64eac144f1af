"""Facts of the libraries are those of their classes."""

import dataclasses
from typing import Any, Literal

import pytest

from recipes import legal
from recipes.legal import libraries, schema


def test_settings_of_trainer_are_the_fields_of_the_real_class():
    from transformers import TrainingArguments

    real = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    known = {name: field.default for name, field in legal.trainer_fields().items()}
    assert known == {name: None if default is dataclasses.MISSING else default for name, default in real.items()}


def test_an_enumeration_is_text_with_a_list_of_values():
    from transformers.training_args import OptimizerNames

    field = legal.settings()["optim"]
    assert field.types == {"str"} and field.choices == tuple(name.value for name in OptimizerNames)


HINTS = [
    (int, {"int"}, ()),
    (bool | None, {"bool", "None"}, ()),
    (dict[str, Any] | str | None, {"dict", "str", "None"}, ()),
    (list[str] | None, {"list", "None"}, ()),
    (Literal["nf4", "fp4"] | None, {"str", "None"}, ("nf4", "fp4")),
    (str | Literal[False], {"str"}, ()),
    (Any, {"str"}, ()),
]


@pytest.mark.parametrize(("hint", "types", "choices"), HINTS)
def test_types_and_choices_are_those_of_the_hint(hint, types, choices):
    field = schema.fields_of(dataclasses.make_dataclass("Settings", [("name", hint, None)]))["name"]
    assert (field.types, field.choices) == (types, choices)


def test_a_flag_that_may_stand_alone_takes_true_and_false():
    assert "bool" in legal.settings()["fsdp"].types


@pytest.mark.parametrize("ask", libraries.OPTIONAL, ids=lambda ask: ask.__name__)
def test_every_fact_is_known_of_the_installed_versions(ask):
    """A private name that a release no longer has leaves a fact out, and its rules silent."""
    if ask.__name__ in ("liger", "deepspeed"):
        pytest.importorskip({"liger": "liger_kernel.transformers"}.get(ask.__name__, ask.__name__))
    assert all(ask().values())


@pytest.mark.parametrize(
    ("of", "name"),
    {
        "accelerate_yaml": "main_process_port",
        "accelerator_config": "split_batches",
        "ddp": "bucket_cap_mb",
        "fsdp_config": "reshard_after_forward",
        "gradient_accumulation_kwargs": "sync_each_batch",
        "gradient_checkpointing_kwargs": "use_reentrant",
        "report_to": "wandb",
    }.items(),
)
def test_names_are_those_that_the_libraries_take(of, name):
    assert name in legal.names(of)


@pytest.mark.parametrize(
    ("section", "keys"),
    {
        "deepspeed_config": "zero_stage",
        "dynamo_config": "use_dynamic",
        "fp8_config": "fp8_format",
        "fsdp_config": "fsdp_version version fsdp_reshard_after_forward fsdp_activation_checkpointing",
        "megatron_lm_config": "megatron_lm_tp_degree",
        "mpirun_config": "mpirun_hostfile",
        "parallelism_config": "parallelism_config_tp_size",
    }.items(),
)
def test_sections_of_an_accelerate_yaml_take_the_flags_of_the_launcher_and_may_leave_out_the_prefix(section, keys):
    assert set(keys.split()) <= legal.accelerate_nested_keys(section)
