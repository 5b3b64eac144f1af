"""Values of the right type that are out of range, or mean something unexpected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recipes import legal
from recipes.rules.facts import advice, available, missing, problem, rule, uses_ddp
from recipes.run import RunSpec, nearest

_COUNT = (lambda value: value >= 1, "is a whole number from 1 up")
_NOT_NEGATIVE = (lambda value: value >= 0, "is 0 or more")
_POSITIVE = (lambda value: value > 0, "is more than 0")
_BELOW_ONE = (lambda value: 0 <= value < 1, "is from 0 to below 1")
_FRACTION = (lambda value: 0 <= value <= 1, "is from 0 to 1")
_SEED = (lambda value: 0 <= value < 2**32, "is a whole number from 0 to 4294967295")
_TORCH_SEED = (lambda value: -(2**63) <= value < 2**64, "is a whole number of 64 bits")

# Most of these TrainingArguments accepts silently. None means: not given.
RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "global_batch_size": _COUNT,
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "eval_accumulation_steps": _COUNT,
    "max_steps": (lambda value: value == -1 or value > 0, "is a number of steps, or -1 for num_train_epochs"),
    "learning_rate": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "adam_epsilon": _NOT_NEGATIVE,
    "max_grad_norm": (lambda value: value >= 0, "is 0 or more, and 0 turns clipping off"),
    "label_smoothing_factor": _FRACTION,
    "neftune_noise_alpha": _NOT_NEGATIVE,
    "torch_empty_cache_steps": _COUNT,
    "eval_steps": (lambda value: value >= 0, "is a number of steps, or a fraction of the run below 1"),
    "eval_delay": _NOT_NEGATIVE,
    "save_total_limit": _COUNT,  # Trainer takes 0 for no limit
    "dataloader_num_workers": _NOT_NEGATIVE,
    "dataloader_prefetch_factor": _COUNT,
    "seed": _SEED,
    "data_seed": _TORCH_SEED,
    "ddp_bucket_cap_mb": _NOT_NEGATIVE,
    "ddp_timeout": _COUNT,
    "early_stopping_patience": _COUNT,
    "memory_limit": _POSITIVE,
    "dataset_num_proc": _COUNT,
    "max_length": (lambda value: value >= 2, "is at least 2: a token and the one to predict"),
    "lora_r": _COUNT,
    "lora_alpha": _POSITIVE,
    "lora_dropout": _BELOW_ONE,
    "log_level": (lambda value: value in legal.log_levels(), "is a level such as info, warning or error"),
    "log_level_replica": (lambda value: value in legal.log_levels(), "is a level such as info, warning or error"),
    "include_num_input_tokens_seen": (
        lambda value: value in (True, False, "all", "non_padding", "no"),
        "is all, non_padding or no",
    ),
}


# Settings that not every run reads, and whether this one does.
_READ_IF: dict[str, Callable[[RunSpec], bool]] = {
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_dropout"), lambda run: run["use_peft"]),
    **dict.fromkeys(
        ("eval_steps", "eval_delay", "eval_accumulation_steps", "per_device_eval_batch_size"),
        lambda run: run["eval_strategy"] != "no",
    ),
    **dict.fromkeys(
        ("adam_beta1", "adam_beta2", "adam_epsilon"), lambda run: run["optim"] not in legal.optimizers_without_betas()
    ),
    "ddp_bucket_cap_mb": uses_ddp,
    "ddp_timeout": lambda run: run.world_size > 1,
}


@rule
def values_are_in_range(run):
    """Other values fail in the first step or mean another thing: `save_total_limit=0` keeps all."""
    for name, (is_legal, range_) in RANGES.items():
        if name not in legal.settings():
            continue
        value = run[name]
        if value is None or is_legal(value):
            continue
        is_read = _READ_IF.get(name, lambda run: True)(run)
        ending = "" if is_read else ", and this run does not read it"
        yield (problem if is_read else advice)(run, name, f"{value} is out of range{ending}", f"{name} {range_}")


@rule
def debug_options_exist(run):
    """`loud is not a valid DebugOption`, from the constructor. In a list it is silently ignored.

    The metrics of a TPU are a `NameError` after the first evaluation, without torch_xla.
    """
    asked = run["debug"] or []
    for word in asked.split() if isinstance(asked, str) else asked:
        if word not in legal.debug_options():
            fix = nearest(word, legal.debug_options()) or "one of " + ", ".join(legal.debug_options())
            yield problem(run, "debug", f"there is no {word!r} to debug", fix)
        elif word.startswith("tpu_") and run["eval_strategy"] != "no" and not available(run, "torch_xla"):
            yield missing(run, "debug", "torch_xla")


@rule
def a_run_has_steps(run):
    """0 epochs train nothing, silently. A step interval of 0 ends in a division by zero."""
    if run["num_train_epochs"] <= 0 and run["max_steps"] <= 0:
        yield problem(run, "num_train_epochs", f"{run['num_train_epochs']:g} trains nothing", "a number above 0")
    for name in ("logging_steps", "save_steps"):
        if run[name] <= 0 and run[name.replace("steps", "strategy")] == "steps":
            fix = f"a number of steps, a fraction of the run below 1, or --{name.replace('steps', 'strategy')} no"
            yield problem(run, name, f"{run[name]:g} is out of range", fix)


@rule
def steps_above_one_are_whole(run):
    """`ValueError: --logging_steps must be an integer if bigger than 1`, in every rank."""
    for name in ("logging_steps", "eval_steps", "save_steps", "warmup_steps"):
        value = run[name]
        used = name == "warmup_steps" or run[name.replace("steps", "strategy")] == "steps"
        if value and value > 1 and value != int(value) and used:
            yield problem(run, name, f"{value} is not a whole number of steps", f"{name} {round(value)}")


@rule
def memory_can_be_limited(run):
    """RLIMIT_DATA counts what a process allocates on Linux only; elsewhere nothing is limited."""
    if run["memory_limit"] is not None and not run.hardware.cuda and run.hardware.platform != "linux":
        yield problem(run, "memory_limit", "limits RAM on Linux only", "leave it out")


@rule
def timings_go_to_a_table(run):
    """The suffix decides the format, and a run must be longer than its warm-up to be measured."""
    if run["measure"] is None:
        return
    from recipes.scaling.timings import SUFFIXES, WARM_UP_STEPS  # most runs are not measured

    if not run["measure"].endswith(SUFFIXES):
        yield problem(run, "measure", f"{run['measure']!r} is not a table", "a name that ends in .jsonl or .csv")
    if 0 < run["max_steps"] <= WARM_UP_STEPS:
        yield problem(run, "max_steps", f"the first {WARM_UP_STEPS} steps are not measured", "a larger --max_steps")
