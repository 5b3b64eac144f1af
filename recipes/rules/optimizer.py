"""The optimizer, its arguments, the learning rate schedule and the number of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from recipes import legal
from recipes.errors import Problem
from recipes.rules.facts import (
    advice,
    deepspeed_file,
    mapping,
    optimizer_arguments,
    optimizer_is_offloaded,
    problem,
    rule,
    uses_deepspeed,
)
from recipes.run import RunSpec, nearest

_WORKS_WITH_OFFLOAD = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit")
_CRASHES_WITH_OFFLOAD = (
    "adafactor",
    "adagrad",
    "lion_32bit",
    "paged_lion_32bit",
    "ademamix",
    "paged_ademamix_32bit",
)


@rule
def offload_needs_adamw(run):
    """Offload runs DeepSpeedCPUAdam: it silently replaces SGD and 8-bit Adam, and others crash."""
    content = deepspeed_file(run) or {}
    keeps_the_choice = "optimizer" in content or content.get("zero_force_ds_cpu_optimizer") is False
    if not optimizer_is_offloaded(run) or keeps_the_choice or run["optim"] in _WORKS_WITH_OFFLOAD:
        return
    becomes = "fails with" if run["optim"] in _CRASHES_WITH_OFFLOAD else "is replaced by DeepSpeedCPUAdam under"
    yield problem(run, "optim", f"{run['optim']} {becomes} ZeRO's optimizer offload", "--optim adamw_torch")


@rule
def deepspeed_json_chooses_the_optimizer(run):
    """An `optimizer` or `scheduler` in the DeepSpeed JSON silently replaces Trainer's."""
    content = deepspeed_file(run) or {}
    for section, name in (("optimizer", "optim"), ("scheduler", "lr_scheduler_type")):
        if section in content and run.explicit(name) and uses_deepspeed(run):
            yield advice(
                run, name, f"is ignored: the DeepSpeed JSON has its own {section}", f"remove {section} from the JSON"
            )


@rule
def optimizer_arguments_are_read(run):
    """`ValueError: not enough values to unpack`, without `=`. AdamW of torch ignores all of it."""
    given = run["optim_args"]
    if not given:
        return
    if any(part.count("=") != 1 for part in given.split(",")):
        yield problem(run, "optim_args", f"{given!r} is not name=value,name=value", "--optim_args rank=64,scale=0.5")
    elif run["optim"] in legal.optimizers_without_arguments():
        fix = "--adam_beta1, --adam_beta2, --adam_epsilon and --weight_decay, or leave them out"
        yield advice(run, "optim_args", f"are ignored by {run['optim']}", fix)
    elif "optimizer" not in (deepspeed_file(run) or {}):
        numbers = legal.optimizer_numbers().get(run["optim"], {})
        given = optimizer_arguments(run)
        for key in sorted(given.keys() & numbers):
            if not _is_number(given[key], numbers[key]):
                kind = "whole number" if numbers[key] == "int" else "number"
                yield problem(run, "optim_args", f"{key} is not a {kind}: {given[key]!r}", f"{key}= with a {kind}")


def _is_number(text: str, kind: str) -> bool:
    """Whether `int` or `float` reads the text."""
    try:
        int(text) if kind == "int" else float(text)
    except ValueError:
        return False
    return True


@rule
def layerwise_optimizers_work_alone(run):
    """`Layer-wise ... does not support DDP at this time`, nor `support gradient accumulation`."""
    if not run["optim"].endswith("_layerwise"):
        return
    if run.world_size > 1 or "RANK" in run.environment:  # torchrun starts DDP for one process too
        yield problem(run, "optim", f"{run['optim']} does not work with DDP", run["optim"].removesuffix("_layerwise"))
    elif run["gradient_accumulation_steps"] > 1:
        fix = f"--gradient_accumulation_steps 1, or --optim {run['optim'].removesuffix('_layerwise')}"
        yield problem(run, "optim", f"{run['optim']} does not work with accumulation", fix)


@rule
def target_modules_are_named(run):
    """`You need to define optim_target_modules to use GaLore / APOLLO optimizers`"""
    if run["optim"].startswith(("galore_", "apollo_")) and not run["optim_target_modules"]:
        yield problem(
            run, "optim", f"{run['optim']} needs the modules it works on", "--optim_target_modules all-linear"
        )


@rule
def schedule_needs_evaluation(run):
    """`lr_scheduler_type reduce_lr_on_plateau requires an eval strategy`"""
    if run["lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy") and run["eval_strategy"] == "no":
        yield problem(
            run, "lr_scheduler_type", f"{run['lr_scheduler_type']} needs evaluations", "--eval_strategy epoch"
        )


@rule
def least_rate_is_named_once(run):
    """`ValueError: One of min_lr or min_lr_rate should be set`, as training begins."""
    named = {"min_lr", "min_lr_rate"} & set(mapping(run["lr_scheduler_kwargs"]))
    schedule = run["lr_scheduler_type"]
    if schedule in ("cosine_with_min_lr", "cosine_warmup_with_min_lr") and len(named) != 1:
        what = "needs a lowest learning rate" if not named else "takes one lowest learning rate, not two"
        fix = "--lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}'"
        yield problem(run, "lr_scheduler_type", f"{schedule} {what}", fix)


@rule
def schedule_settings_are_its_own(run):
    """`TypeError: get_..._schedule_with_warmup() got an unexpected keyword argument`"""
    given = set(mapping(run["lr_scheduler_kwargs"]))
    schedule = run["lr_scheduler_type"]
    if not given and schedule != "warmup_stable_decay":  # only that one requires a key
        return
    keys = legal.schedule_keys().get(schedule)
    if keys is None:
        return
    if schedule in ("constant", "constant_with_warmup"):
        yield advice(run, "lr_scheduler_kwargs", f"are ignored by the schedule {schedule}", "leave them out")
        return
    for key in sorted(given - set(keys)):
        fix = nearest(key, keys) or ("one of " + ", ".join(keys) if keys else "leave it out")
        yield problem(run, "lr_scheduler_kwargs", f"the schedule {schedule} has no {key!r}", fix)
    for key, required in keys.items():
        if required and key not in given:
            yield problem(run, "lr_scheduler_type", f"{schedule} needs {key}", f"lr_scheduler_kwargs with {key}")


@rule
def schedule_values_have_their_type(run):
    """`ValueError: could not convert string to float`, `TypeError: unsupported operand type(s)`

    A fraction trains where an `int` is declared, and a switch takes any value. The schedules with a
    lower limit hold one for each of the optimizer's groups, so a list is taken too.
    """
    schedule, given = run["lr_scheduler_type"], mapping(run["lr_scheduler_kwargs"])
    types = legal.schedule_types().get(schedule, {}) if given else {}
    for key in sorted(given.keys() & types):
        if not types[key] & {"int", "float"} or (key == "window_size" and not given.get("smooth")):
            continue
        numbers = given[key] if isinstance(given[key], list) and "list" in types[key] else [given[key]]
        takes_none = "None" in types[key]
        if not all(isinstance(number, (int, float)) or (number is None and takes_none) for number in numbers):
            what = f"{key} is not a number: {given[key]!r}"
            yield problem(run, "lr_scheduler_kwargs", what, f"a number for {key}, or leave it out")


@rule
def schedule_values_are_legal(run):
    """`ValueError: Unknown decay type`, `Factor should be < 1.0.`, `lr_end must be smaller than`

    Or `ZeroDivisionError`, for a timescale or a learning rate of 0.
    """
    schedule, given = run["lr_scheduler_type"], mapping(run["lr_scheduler_kwargs"])
    if not given and schedule != "polynomial":  # only its default can be wrong
        return
    for key, values in legal.schedule_choices().get(schedule, {}).items():
        if key in given and given[key] not in values:
            yield problem(run, "lr_scheduler_kwargs", f"{key} has no value {given[key]!r}", _one_of(values))
    rate, end = run["learning_rate"], _schedule_value(run, "lr_end")
    if schedule == "polynomial" and end is not None and end >= rate:
        what = f"ends at lr_end {end:g}, which is not below the learning rate {rate:g}"
        yield problem(run, "lr_scheduler_type", f"polynomial {what}", "lr_scheduler_kwargs with a lower lr_end")
    if schedule == "inverse_sqrt" and given.get("timescale", 1) == 0:
        yield problem(run, "lr_scheduler_kwargs", "a timescale of 0 divides by zero", "a number of steps, or leave it")
    if schedule == "polynomial" and (_schedule_value(run, "power") or 0) < 0:
        yield problem(run, "lr_scheduler_kwargs", "a negative power divides by zero in the last step", "a power from 0")
    if schedule == "greedy" and _schedule_value(run, "factor") == 0:
        yield problem(run, "lr_scheduler_kwargs", "a factor of 0 divides by zero", "one above 0 and below 1")
    if "factor" in given and (_schedule_value(run, "factor") or 0) >= 1:
        yield problem(run, "lr_scheduler_kwargs", f"a factor of {given['factor']} does not reduce", "one below 1")
    if schedule.endswith("with_min_lr") and "min_lr" in given and rate == 0:
        yield problem(run, "learning_rate", "0 divides by zero in this schedule", "a learning rate above 0")


@rule
def lowest_rate_is_below_the_rate(run):
    """Above it, the schedule rises; greedy never reduces, and its own lowest rate is 0.001."""
    schedule, rate = run["lr_scheduler_type"], run["learning_rate"]
    if not run["lr_scheduler_kwargs"] and schedule != "greedy":
        return
    lowest, share = _schedule_value(run, "min_lr"), _schedule_value(run, "min_lr_rate")
    if lowest is not None and lowest > rate > 0:
        what = f"the lowest rate of {schedule} is {lowest:g}, above the learning rate {rate:g}"
        yield advice(run, "lr_scheduler_type", what, f"lr_scheduler_kwargs with a min_lr below {rate:g}")
    if share is not None and share > 1:
        what = f"a min_lr_rate of {share:g} raises the learning rate"
        yield advice(run, "lr_scheduler_kwargs", what, "a share of the learning rate, such as 0.1")


def _schedule_value(run: RunSpec, key: str) -> float | None:
    """A number that the schedule reads: the given one, or its default. None for anything else."""
    default = legal.schedule_defaults().get(run["lr_scheduler_type"], {}).get(key)
    value = mapping(run["lr_scheduler_kwargs"]).get(key, default)
    return float(value) if isinstance(value, (int, float)) else None


def _one_of(values: Iterable[str]) -> str:
    return "one of " + ", ".join(values)


@rule
def deepspeed_takes_no_absolute_rates(run):
    """`'DeepSpeedZeroOptimizer' object has no attribute 'defaults'`, which these schedules read.

    With an optimizer of the DeepSpeed JSON's own, the schedule is made before DeepSpeed wraps it.
    """
    content, schedule = deepspeed_file(run) or {}, run["lr_scheduler_type"]
    if not uses_deepspeed(run) or "optimizer" in content or "scheduler" in content:
        return
    if schedule == "polynomial":
        yield problem(run, "lr_scheduler_type", "polynomial fails under DeepSpeed", "--lr_scheduler_type linear")
    lowest = _schedule_value(run, "min_lr") if schedule.endswith("with_min_lr") else None
    if lowest is not None and run["learning_rate"] > 0:
        fix = f"min_lr_rate: {lowest / run['learning_rate']:.4g}, a share of the learning rate"
        yield problem(run, "lr_scheduler_kwargs", f"{schedule} fails with min_lr under DeepSpeed", fix)


@rule
def warmup_is_used(run):
    """get_scheduler hands no warm-up to these schedules: it is dropped silently."""
    schedule = run["lr_scheduler_type"]
    if run.explicit("warmup_steps") and run["warmup_steps"] > 0 and schedule in legal.schedules_without_warmup():
        fix = "--lr_scheduler_type constant_with_warmup" if schedule == "constant" else "leave it out"
        yield advice(run, "warmup_steps", f"is ignored: the schedule {schedule} has no warm-up", fix)


@rule
def warmup_ends_before_the_run(run):
    """The learning rate never reaches its value, or the decay begins in its middle: silently.

    Where epochs say how long the run is, train.py asks once it has the data.
    """
    if run["max_steps"] > 0:
        yield from warmup_within(run, run["max_steps"])


def warmup_within(run: RunSpec, steps: int) -> Iterator[Problem]:
    """Advice about a warm-up that does not end within `steps` optimizer steps."""
    schedule = run["lr_scheduler_type"]
    if not (run.explicit("warmup_steps") or schedule == "warmup_stable_decay"):
        return
    if schedule in legal.schedules_without_warmup():
        return
    warmup = run["warmup_steps"] if run["warmup_steps"] >= 1 else round(run["warmup_steps"] * steps)
    if run.explicit("warmup_steps") and warmup >= steps:
        what = f"{warmup:g} steps of warm-up do not end before the run, which has {steps}"
        yield advice(run, "warmup_steps", what, f"fewer than {steps}, or a value below 1 for a fraction of the run")
    decay = _schedule_value(run, "num_decay_steps") or 0
    if schedule == "warmup_stable_decay" and warmup < steps < warmup + decay:
        what = f"{warmup:g} steps of warm-up and {decay:g} of decay are more than the {steps} of the run"
        yield advice(run, "lr_scheduler_kwargs", what, f"num_decay_steps of at most {steps - warmup:g}")


@rule
def one_warmup_step_is_one_step(run):
    """Below 1 it is a fraction of the run, but 1.0 is one step, not the whole run."""
    written_so = run.explicit("warmup_steps") and run["warmup_steps"] == 1
    if written_so and run["lr_scheduler_type"] not in legal.schedules_without_warmup():
        yield advice(
            run, "warmup_steps", "1.0 is one step, not the whole run", "a value below 1 for a fraction of the run"
        )


@rule
def max_steps_wins_over_epochs(run):
    """With `max_steps`, the number of epochs is not read."""
    if run.explicit("num_train_epochs") and run["max_steps"] > 0:
        yield advice(run, "num_train_epochs", "is ignored: max_steps wins", "leave one of them out")
