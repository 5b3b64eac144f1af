"""Facts of the libraries are those of their classes."""

import dataclasses
from typing import Any, Literal

import pytest
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from recipes import legal
from recipes.legal import libraries, schema


def test_trainer_settings_and_their_defaults_are_those_of_training_arguments():
    real = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    known = {name: field.default for name, field in legal.trainer_fields().items()}
    assert known == {name: None if default is dataclasses.MISSING else default for name, default in real.items()}
    assert "bool" in legal.settings()["fsdp"].types  # it may stand alone


HINTS = [
    (int, {"int"}, ()),
    (bool | None, {"bool", "None"}, ()),
    (dict[str, Any] | str | None, {"dict", "str", "None"}, ()),
    (list[str] | None, {"list", "None"}, ()),
    (Literal["nf4", "fp4"] | None, {"str", "None"}, ("nf4", "fp4")),
    (str | Literal[False], {"str"}, ()),
    (IntervalStrategy | str, {"str"}, ("no", "steps", "epoch")),
    (Any, {"str"}, ()),
]


@pytest.mark.parametrize(("hint", "types", "choices"), HINTS)
def test_types_and_choices_of_a_setting_follow_from_its_type_hint(hint, types, choices):
    field = schema.fields_of(dataclasses.make_dataclass("Settings", [("name", hint, None)]))["name"]
    assert (field.types, field.choices) == (types, choices)


@pytest.mark.parametrize("ask", libraries.OPTIONAL, ids=lambda ask: ask.__name__)
def test_everything_that_rules_assume_about_the_libraries_is_found_in_the_installed_versions(ask):
    """A private name that a release no longer has leaves a fact out, and its rules silent."""
    if ask.__name__ in ("liger", "deepspeed"):
        pytest.importorskip({"liger": "liger_kernel.transformers"}.get(ask.__name__, ask.__name__))
    assert all(ask().values())


NAMES = {
    "accelerate_yaml": "main_process_port",
    "accelerator_config": "split_batches",
    "ddp": "bucket_cap_mb",
    "fsdp_config": "reshard_after_forward",
    "gradient_accumulation_kwargs": "sync_each_batch",
    "gradient_checkpointing_kwargs": "determinism_check",
    "report_to": "wandb",
    # The launcher's flags, of which some may leave out the prefix.
    "deepspeed_config of accelerate_yaml": "zero_stage",
    "dynamo_config of accelerate_yaml": "use_dynamic",
    "fp8_config of accelerate_yaml": "fp8_format",
    "fsdp_config of accelerate_yaml": "fsdp_version version fsdp_reshard_after_forward fsdp_activation_checkpointing",
    "megatron_lm_config of accelerate_yaml": "megatron_lm_tp_degree",
    "mpirun_config of accelerate_yaml": "mpirun_hostfile",
    "parallelism_config of accelerate_yaml": "parallelism_config_tp_size",
}


def test_the_keys_found_in_the_libraries_for_each_dict_setting_include_a_known_key():
    assert not {of for of, keys in NAMES.items() if not {*keys.split()} <= {*legal.names(of)}}
