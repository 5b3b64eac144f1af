"""Legal names are those of the real classes, and reading them imports no library."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from recipes import legal
from recipes.errors import UserError
from recipes.legal import source


def names(cls) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_legal_arguments_are_the_fields_of_the_real_class():
    from transformers import TrainingArguments

    real = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert set(legal.trainer_fields()) == real


def test_defaults_and_choices_are_those_of_the_real_class():
    from transformers import TrainingArguments

    for field in dataclasses.fields(TrainingArguments):
        if field.init and field.default is not dataclasses.MISSING:
            expected = getattr(field.default, "value", field.default)
            assert legal.trainer_fields()[field.name].default == expected, field.name


def test_legal_schedule_settings_are_the_parameters_of_the_real_functions():
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    by_trainer = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch", "kwargs"}
    for schedule, function in TYPE_TO_SCHEDULER_FUNCTION.items():
        real = set(inspect.signature(function).parameters)
        if "kwargs" not in real:
            assert set(legal.schedule_keys()[schedule.value]) == real - by_trainer


def test_legal_ddp_keywords_are_the_fields_of_the_real_class():
    from accelerate.utils import DistributedDataParallelKwargs

    assert legal.ddp_keywords() == names(DistributedDataParallelKwargs)


def test_legal_yaml_keys_are_the_fields_of_the_real_class():
    from accelerate.commands.config.config_args import ClusterConfig

    assert legal.accelerate_keys() - {"fp16", "dynamo_backend"} == names(ClusterConfig)


def test_legal_nested_keys_are_the_real_ones():
    from accelerate.utils import DistributedType, DynamoBackend, GradientAccumulationPlugin
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer_pt_utils import AcceleratorConfig
    from transformers.training_args import trainer_log_levels

    assert legal.accelerator_config_keys() == names(AcceleratorConfig)
    assert legal.gradient_accumulation_keys() == names(GradientAccumulationPlugin)
    assert set(legal.report_integrations()) == set(INTEGRATION_TO_CALLBACK)
    assert set(legal.log_levels()) == set(trainer_log_levels)
    assert set(legal.distributed_types()) == {type_.value for type_ in DistributedType}
    assert set(legal.accelerate_choices()["DynamoBackend"]) == {backend.value for backend in DynamoBackend}


@pytest.mark.parametrize("section", ["deepspeed_config", "fsdp_config", "dynamo_config", "parallelism_config"])
def test_legal_keys_of_sections_are_destinations_of_the_launch_parser(section):
    from accelerate.commands.launch import launch_command_parser

    real = {action.dest for action in launch_command_parser()._actions}
    known = set(legal.accelerate_nested_keys(section))
    prefix = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}.get(section, "")
    assert {key for key in known if not {key, prefix + key} & real} <= {"fsdp_ignored_modules", "ignored_modules"}


def test_legal_zero_keys_are_the_fields_of_the_real_class():
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    fields = config.DeepSpeedZeroConfig.model_fields
    real = set(fields) | {field.alias for field in fields.values() if field.alias}
    assert real <= legal.deepspeed_zero_keys()


def test_a_missing_library_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setattr(source, "package_folder", lambda package: None)
    source.parse_classes.cache_clear()
    legal.trainer_fields.cache_clear()
    try:
        with pytest.raises(UserError, match="pip install transformers"):
            legal.trainer_fields()
    finally:
        source.parse_classes.cache_clear()
