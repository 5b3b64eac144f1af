"""What Trainer itself raises, in its constructor or in training, for a run that a rule reports."""

from __future__ import annotations

import pytest

from tests.support.real_failures import arguments, assert_fires, train

pytestmark = pytest.mark.usefixtures("fresh_state")

REFUSED_BY_THE_CONSTRUCTOR = [
    ("one_precision", dict(fp16=True, bf16=True), ValueError, "At most one of fp16 and bf16"),
    ("tf32_needs_sm80", dict(tf32=True), ValueError, "requires Ampere"),
    ("steps_above_one_are_whole", dict(logging_steps=2.5), ValueError, "must be an integer"),
    ("schedule_needs_evaluation", dict(lr_scheduler_type="reduce_lr_on_plateau"), ValueError, "requires an eval"),
    ("worker_settings_need_workers", dict(dataloader_prefetch_factor=2), ValueError, "prefetch_factor can only be set"),
    ("values_are_in_range", dict(warmup_steps=-1), ValueError, "warmup_steps"),
    ("values_are_in_range", dict(torch_empty_cache_steps=0), ValueError, "bigger than 0"),
    ("nested_settings_are_known", dict(accelerator_config={"even_batch": True}), TypeError, "even_batch"),
    ("nested_settings_can_be_read", dict(accelerator_config="nowhere.json"), FileNotFoundError, "nowhere.json"),
    ("ddp_backend_needs_processes", dict(ddp_backend="gloo"), ValueError, "Default process group"),
    ("debug_options_exist", dict(debug="loud"), ValueError, "not a valid DebugOption"),
    (
        "no_state_is_configured_before",
        dict(accelerator_config={"use_configured_state": True}),
        ValueError,
        "requires a",
    ),
    (
        "best_model_needs_matching_strategies",
        dict(load_best_model_at_end=True, save_strategy="steps"),
        ValueError,
        "requires the save and eval strategy to match",
    ),
    (
        "best_model_needs_matching_strategies",
        dict(load_best_model_at_end=True, save_strategy="steps", save_steps=7, eval_strategy="steps", eval_steps=3),
        ValueError,
        "round multiple",
    ),
]


@pytest.mark.parametrize(("rule", "settings", "error", "message"), REFUSED_BY_THE_CONSTRUCTOR)
def test_the_constructor_raises(rule, settings, error, message, tmp_path):
    with pytest.raises(error, match=message):
        arguments(tmp_path, **settings)
    assert_fires(rule, {"recipe": "baseline", **settings})


FAILS_IN_TRAINING = [
    ("worker_settings_need_workers", dict(dataloader_persistent_workers=True), ValueError, "persistent_workers option"),
    (
        "worker_settings_need_workers",
        dict(dataloader_multiprocessing_context="spawn"),
        ValueError,
        "multi-process loading",
    ),
    ("values_are_in_range", dict(gradient_accumulation_steps=0), ZeroDivisionError, "zero"),
    ("values_are_in_range", dict(seed=-1), Exception, "(?i)seed"),
    ("values_are_in_range", dict(adam_beta1=1.0), ValueError, "Invalid beta"),
    ("values_are_in_range", dict(learning_rate=-1.0), ValueError, "Invalid learning rate"),
    ("values_are_in_range", dict(dataloader_num_workers=-1), ValueError, "non-negative"),
    ("values_are_in_range", dict(log_level="loud"), KeyError, "loud"),
    (
        "nested_settings_are_known",
        dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_rentrant": False}),
        ValueError,
        "use_rentrant",
    ),
    (
        "accumulation_is_said_once",
        dict(gradient_accumulation_steps=2, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}}),
        ValueError,
        "num_steps",
    ),
    ("saving_the_best_needs_evaluation", dict(save_strategy="best"), ValueError, "metric_for_best_model"),
    ("reports_go_somewhere", dict(report_to="tensorbord"), ValueError, "is not supported"),
    ("reports_go_somewhere", dict(report_to="clearml"), RuntimeError, "to be installed"),
    ("optimizer_is_installed", dict(optim="schedule_free_adamw"), ImportError, "schedulefree"),
    ("optimizer_is_installed", dict(optim="lomo"), ImportError, "lomo"),
    ("liger_is_installed", dict(use_liger_kernel=True), ImportError, "liger"),
    ("optimizer_arguments_are_read", dict(optim_args="rank"), ValueError, "not enough values to unpack"),
    ("least_rate_is_named_once", dict(lr_scheduler_type="cosine_with_min_lr"), ValueError, "One of min_lr or"),
    ("least_rate_is_named_once", dict(lr_scheduler_type="cosine_warmup_with_min_lr"), ValueError, "One of min_lr or"),
    (
        "least_rate_is_named_once",
        dict(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.0, "min_lr_rate": 0.1}),
        ValueError,
        "Only one of min_lr or",
    ),
    ("schedule_settings_are_its_own", dict(lr_scheduler_type="warmup_stable_decay"), TypeError, "num_decay_steps"),
    (
        "schedule_settings_are_its_own",
        dict(lr_scheduler_type="linear", lr_scheduler_kwargs={"num_cycles": 2}),
        TypeError,
        "unexpected keyword argument 'num_cycles'",
    ),
    (
        "schedule_values_are_legal",
        dict(lr_scheduler_type="polynomial", learning_rate=1e-8),
        ValueError,
        "must be smaller",
    ),
    (
        "schedule_values_are_legal",
        dict(lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 1, "decay_type": "x"}),
        ValueError,
        "Unknown decay type",
    ),
    (
        "schedule_values_are_legal",
        dict(lr_scheduler_type="inverse_sqrt", lr_scheduler_kwargs={"timescale": 0}),
        ZeroDivisionError,
        "zero",
    ),
    (
        "schedule_values_are_legal",
        dict(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", lr_scheduler_kwargs={"factor": 2}),
        ValueError,
        "Factor should be",
    ),
    (
        "schedule_settings_are_its_own",
        dict(lr_scheduler_type="greedy", eval_strategy="steps", lr_scheduler_kwargs={"factr": 0.5}),
        TypeError,
        "unexpected keyword argument 'factr'",
    ),
    ("evaluating_needs_data", dict(eval_on_start=True), ValueError, "evaluation requires an eval_dataset"),
    ("output_has_a_folder", dict(output_dir=""), FileNotFoundError, "No such file or directory: ''"),
    ("compile_backend_is_known", dict(torch_compile_backend="foo"), ValueError, "not a valid DynamoBackend"),
    (
        "nested_settings_can_be_read",
        dict(lr_scheduler_kwargs="nowhere.json"),
        TypeError,
        "must be a mapping, not str",
    ),
    (
        "nested_settings_can_be_read",
        dict(gradient_checkpointing=True, gradient_checkpointing_kwargs="nowhere.json"),
        ValueError,
        "dictionary update sequence",
    ),
    ("fsdp_words_are_known", dict(fsdp="zero3"), ValueError, "Unknown `fsdp` option: zero3"),
    ("fsdp_words_are_known", dict(fsdp="hybrid_shard"), ValueError, "only available with FSDP1"),
    (
        "fsdp_argument_needs_a_distributed_launch",
        dict(fsdp="full_shard"),
        ValueError,
        "fsdp only works in distributed training",
    ),
]


@pytest.mark.parametrize(("rule", "settings", "error", "message"), FAILS_IN_TRAINING)
def test_training_fails(rule, settings, error, message, tmp_path):
    with pytest.raises(error, match=message):
        train(tmp_path, evaluates="eval_strategy" in settings, **settings)
    assert_fires(rule, {"recipe": "baseline", **settings})
