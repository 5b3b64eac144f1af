"""What is legal: read from the source of the installed libraries, without importing them."""

from recipes.legal.compiling import compile_backends, compile_modes
from recipes.legal.names import (
    ALIASES,
    accelerate_choices,
    accelerate_keys,
    accelerate_nested_keys,
    accelerator_config_keys,
    checkpoint_keys,
    ddp_keywords,
    deepspeed_keys,
    deepspeed_zero_keys,
    distributed_types,
    fsdp_config_keys,
    gradient_accumulation_keys,
    log_levels,
    optimizers_without_arguments,
    report_integrations,
    run_flags,
    settings,
    trainer_fields,
)
from recipes.legal.schedules import schedule_choices, schedule_defaults, schedule_keys, schedules_without_warmup
from recipes.legal.source import Field, version

__all__ = [
    "ALIASES",
    "Field",
    "accelerate_choices",
    "accelerate_keys",
    "accelerate_nested_keys",
    "accelerator_config_keys",
    "checkpoint_keys",
    "compile_backends",
    "compile_modes",
    "ddp_keywords",
    "deepspeed_keys",
    "deepspeed_zero_keys",
    "distributed_types",
    "fsdp_config_keys",
    "gradient_accumulation_keys",
    "log_levels",
    "optimizers_without_arguments",
    "report_integrations",
    "run_flags",
    "schedule_choices",
    "schedule_defaults",
    "schedule_keys",
    "schedules_without_warmup",
    "settings",
    "trainer_fields",
    "version",
]
