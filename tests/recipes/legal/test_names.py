"""Legal names are those of the real classes, and reading them imports no library."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest

from recipes import legal
from recipes.errors import UserError
from recipes.legal import deepspeed, source


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


def test_legal_keys_of_a_deepspeed_json_are_the_fields_of_the_real_classes():
    pytest.importorskip("deepspeed")
    assert set(legal.deepspeed_section_keys()) == set(deepspeed._SECTIONS)
    for section, (file, name) in deepspeed._SECTIONS.items():
        module = importlib.import_module("deepspeed." + file.removesuffix(".py").replace("/", "."))
        fields = getattr(module, name).model_fields
        real = set(fields) | {field.alias for field in fields.values() if field.alias}
        assert real <= legal.deepspeed_section_keys()[section]


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"])
def test_defaults_of_deepspeeds_schedules_are_those_of_the_real_class(name):
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    real = dict(list(inspect.signature(getattr(schedules, name)).parameters.items())[1:])
    known = legal.deepspeed_scheduler_defaults(name)
    assert set(known) == set(real)
    for key, parameter in real.items():
        if not isinstance(parameter.default, str):  # constants, which nothing needs
            assert known[key] == (... if parameter.default is inspect.Parameter.empty else parameter.default)


@pytest.mark.parametrize(("name", "cls"), [("AdamW", "FusedAdam"), ("adam", "DeepSpeedCPUAdam")])
def test_defaults_of_deepspeeds_optimizers_are_those_of_the_real_class(name, cls):
    adam = pytest.importorskip("deepspeed.ops.adam")
    real = inspect.signature(getattr(adam, cls)).parameters
    known = legal.deepspeed_optimizer_defaults(name)
    assert all(known[key] == real[key].default for key in ("lr", "betas", "eps", "weight_decay"))
    assert legal.deepspeed_optimizer_defaults(name, torch_adam=True)["lr"] == 1e-3


def test_a_deepspeed_json_without_clipping_clips_where_deepspeed_does():
    constants = pytest.importorskip("deepspeed.runtime.constants")
    assert legal.deepspeed_clipping_default() == constants.GRADIENT_CLIPPING_DEFAULT


def test_a_missing_library_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setattr(source, "package_folder", lambda package: None)
    source.parse_classes.cache_clear()
    legal.trainer_fields.cache_clear()
    try:
        with pytest.raises(UserError, match="pip install transformers"):
            legal.trainer_fields()
    finally:
        source.parse_classes.cache_clear()
