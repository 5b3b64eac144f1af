"""The DeepSpeed JSON: its keys, and whether it agrees with the YAML and the arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator

from recipes import legal
from recipes.errors import Problem
from recipes.rules.facts import (
    absent_classes,
    advice,
    deepspeed_file,
    deepspeed_section,
    in_yaml,
    is_true,
    known_config,
    rule,
    uses_deepspeed,
)
from recipes.run import RunSpec, nearest
from recipes.run.engine import Json, launch_with, read_json

_BELONGS_IN_JSON = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)


@rule
def deepspeed_is_configured_once(run):
    """`When using deepspeed_config_file, the following accelerate config variables will be ignored`

    It sounds like a warning, and is an error. A launcher hands on the names in its YAML.
    """
    section = deepspeed_section(run)
    written = [name for name in _BELONGS_IN_JSON if name in section]
    if run.engine.kind == "deepspeed" and run.engine.raw.get("mixed_precision") is not None:
        written.append("mixed_precision")
    if run["deepspeed"]:
        handed_on = run.environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",") if not run.engine.raw else []
        written += [name for name in (*_BELONGS_IN_JSON, "mixed_precision") if name in handed_on]
        if written:
            what = f"sets {', '.join(written)}, which cannot be set together with --deepspeed"
            fix = f"{launch_with('standard.yaml')}, or leave --deepspeed out"
            yield Problem("deepspeed_config", what, fix, run.engine.source if section else "the launcher")
    elif section.get("deepspeed_config_file"):
        what = "cannot be set together with deepspeed_config_file"
        for name in written:
            fix = "set it in the JSON, and remove it here"
            if name == "mixed_precision":
                fix = 'remove it here, and set bf16 or fp16 in the JSON to "enabled": "auto"'
            yield in_yaml(run, name, what, fix)


@rule
def deepspeed_file_can_be_read(run):
    """The launcher does not read it: every rank fails, with the same traceback."""

    file = deepspeed_section(run).get("deepspeed_config_file")
    if not file:
        return
    content, what = read_json(str(file))
    if what:
        yield in_yaml(run, "deepspeed_config_file", what, "the path of a JSON file that holds an object")
    elif content is not None and "zero_optimization" not in content:
        yield in_yaml(run, "zero_optimization", f"is missing in {file}", '"zero_optimization": {"stage": 2}')


# Sections that transformers reads as objects.
_SECTIONS = ("zero_optimization", "optimizer", "scheduler", "bf16", "fp16", "tensor_parallel")


@rule
def deepspeed_json_sections_are_objects(run):
    """`AttributeError: 'int' object has no attribute 'get'`, in TrainingArguments."""
    content = deepspeed_file(run) or {}
    paths = [*_SECTIONS, "zero_optimization.offload_optimizer", "zero_optimization.offload_param"]
    for path in paths if uses_deepspeed(run) else ():
        value = _at(content, path)
        if value is not None and not isinstance(value, dict):
            fix = '{"stage": 2}' if path == "zero_optimization" else "an object, or leave it out"
            yield Problem(path, f"takes an object, got {value!r}", fix, _json_source(run))


@rule
def deepspeed_json_names_the_batch(run):
    """`Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided`

    Trainer fills in what is "auto", and adds nothing. An Accelerate YAML's file gets the batch.
    Without accumulation, which is 1 then, a global batch is `train_batch_size is not equal to ...`,
    and in the YAML's file it is `ds gradient_accumulation_steps=1 vs hf
    gradient_accumulation_steps=4`.
    """
    content = deepspeed_file(run)
    if not content:
        return
    in_arguments = run["deepspeed"] is not None
    name = "train_micro_batch_size_per_gpu"
    if in_arguments and content.get(name) is None and content.get("train_batch_size") is None:
        yield Problem(name, "is missing, and so is train_batch_size", f'"{name}": "auto"', _json_source(run))
    accumulation = run["gradient_accumulation_steps"]
    if accumulation > 1 and (not in_arguments or (content.get(name) and content.get("train_batch_size"))):
        name = "gradient_accumulation_steps"
        if content.get(name) is None:
            yield Problem(name, f"is missing, and it is {accumulation}", f'"{name}": "auto"', _json_source(run))


_OF_A_YAML = {
    "zero3_save_16bit_model": "stage3_gather_16bit_weights_on_model_save, below zero_optimization",
    "zero_stage": "stage, below zero_optimization",
}


@rule
def deepspeed_json_keys_are_known(run):
    """Silently ignored (`gradient_cliping`), or fatal in every worker: `Extra inputs are not
    permitted`, below `zero_optimization` and in every other section that is a class of DeepSpeed's.
    """
    content = deepspeed_file(run)
    if not content or not legal.deepspeed_keys():
        return
    for section, known in {"": legal.deepspeed_keys(), **legal.deepspeed_section_keys()}.items():
        names = _at(content, section) if section else content
        for key in names if isinstance(names, dict) else ():
            if key not in known:
                fix = _OF_A_YAML.get(key) or nearest(str(key), known) or "a key of DeepSpeed's own reference"
                subject = f"{section}.{key}" if section else str(key)
                yield Problem(subject, "is not a key that DeepSpeed reads", fix, _json_source(run))


@rule
def deepspeed_json_agrees_with_arguments(run):
    """`Please correct the following DeepSpeed config values that mismatch TrainingArguments`"""
    content = deepspeed_file(run)
    if not content or not uses_deepspeed(run):
        return
    for path, expected, argument in _must_match(run):
        value = _at(content, path)
        if value is None or value == "auto" or expected is None or value == expected:
            continue
        what = f"{value} contradicts {argument} {expected}"
        yield Problem(path, what, f'"{path.rpartition(".")[2]}": "auto"', _json_source(run))


def _must_match(run: RunSpec) -> Iterator[tuple[str, object, str]]:
    """A path in the JSON, the value that it must have, and the argument that has this value.

    The value is None if only the data tell it.
    """
    yield "train_micro_batch_size_per_gpu", run["per_device_train_batch_size"], "per_device_train_batch_size"
    yield "gradient_accumulation_steps", run["gradient_accumulation_steps"], "gradient_accumulation_steps"
    yield "train_batch_size", run.batch.total, "the global batch"
    yield "gradient_clipping", run["max_grad_norm"], "max_grad_norm"
    yield "optimizer.params.lr", run["learning_rate"], "learning_rate"
    yield "optimizer.params.betas", [run["adam_beta1"], run["adam_beta2"]], "adam_beta1 and adam_beta2"
    yield "optimizer.params.eps", run["adam_epsilon"], "adam_epsilon"
    yield "optimizer.params.weight_decay", run["weight_decay"], "weight_decay"
    yield "scheduler.params.warmup_max_lr", run["learning_rate"], "learning_rate"
    yield "fp16.enabled", bool(run["fp16"] or run["fp16_full_eval"]), "fp16"
    yield "bf16.enabled", bool(run["bf16"] or run["bf16_full_eval"]), "bf16"
    yield "scheduler.params.warmup_num_steps", _warmup_steps(run), "warmup_steps"
    yield "scheduler.params.total_num_steps", run["max_steps"] if run["max_steps"] > 0 else None, "max_steps"


def _warmup_steps(run: RunSpec) -> int | None:
    """What Trainer fills in for "auto": DeepSpeed wants at least 1."""
    steps, total = run["warmup_steps"], run["max_steps"]
    if 0 < steps < 1:
        return max(1, math.ceil(total * steps)) if total > 0 else None
    return max(1, int(steps))


@rule
def deepspeed_json_names_what_trains(run):
    """What the JSON leaves out has DeepSpeed's default: Trainer fills in "auto", and adds nothing.

    Seen on a CPU: a WarmupLR without parameters warms up for 1000 steps, a WarmupDecayLR to 0.001,
    whatever learning_rate and warmup_steps say.
    """
    content = deepspeed_file(run)
    if not content or not uses_deepspeed(run) or not legal.deepspeed_keys():
        return
    defaults = _defaults(content)
    for path, expected, argument in _must_match(run):
        if _at(content, path) is not None or path not in defaults:
            continue
        default, name = defaults[path], path.rpartition(".")[2]
        fix = f'"{name}": "auto"' + (f" in {path.rpartition('.')[0]}" if "." in path else "")
        if default is not ... and default != expected:
            instead = f"instead of {expected} " if expected is not None else ""
            what = f"is missing: DeepSpeed would take {default} {instead}({argument})"
            yield Problem(path, what, fix, _json_source(run))


def _defaults(content: Json) -> Json:
    """Path -> DeepSpeed's default of what the JSON may leave out, where that has an effect."""
    known: Json = {"gradient_clipping": legal.deepspeed_clipping_default()}
    known |= {f"{name}.enabled": False for name in ("bf16", "fp16") if name in content}  # absent ones are added
    optimizer, scheduler = _at(content, "optimizer.type"), _at(content, "scheduler.type")
    if isinstance(optimizer, str):
        of_torch = is_true(_at(content, "optimizer.params.torch_adam"))
        for key, value in legal.deepspeed_optimizer_defaults(optimizer, of_torch).items():
            known[f"optimizer.params.{key}"] = list(value) if isinstance(value, tuple) else value
    for key, value in legal.deepspeed_scheduler_defaults(str(scheduler)).items():
        known[f"scheduler.params.{key}"] = value
    highest = "scheduler.params.warmup_max_lr"
    if highest in known and known[highest] is None:
        del known[highest]  # the optimizer's
    elif highest in known:
        known.pop("optimizer.params.lr", None)  # the schedule sets it
    return known


@rule
def deepspeed_sections_have_a_type(run):
    """`zero stage 2 requires an optimizer`, `'DummyScheduler' object has no attribute`: Trainer
    leaves both to their sections, and a section without a type builds none.
    """
    for name, example in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        section = (deepspeed_file(run) or {}).get(name)
        if uses_deepspeed(run) and isinstance(section, dict) and section.get("type") is None:
            fix = f'"type": "{example}", or leave {name} out: the run has one'
            yield Problem(f"{name}.type", f"is missing, and without it there is no {name}", fix, _json_source(run))


@rule
def deepspeed_schedulers_have_their_parameters(run):
    """`WarmupDecayLR.__init__() missing 1 required positional argument: 'total_num_steps'`, `got an
    unexpected keyword argument`, and without `params`: `argument after ** must be a mapping`
    """
    section = (deepspeed_file(run) or {}).get("scheduler")
    if not uses_deepspeed(run) or not isinstance(section, dict) or not isinstance(section.get("type"), str):
        return
    name, given = section["type"], section.get("params")
    if given is None:
        yield Problem("scheduler.params", "is missing", '"params": {...}', _json_source(run))
    known = legal.deepspeed_scheduler_defaults(name)
    for key, default in known.items():
        if default is ... and key not in (given or {}):
            fix = '"auto"' if key == "total_num_steps" else "a number"
            what = f"is missing, and {name} needs it"
            yield Problem(f"scheduler.params.{key}", what, f'"{key}": {fix}', _json_source(run))
    for key in given if known and isinstance(given, dict) else ():
        if key not in known:
            fix = nearest(key, known) or "leave it out"
            yield Problem(f"scheduler.params.{key}", f"is not a parameter of {name}", fix, _json_source(run))


@rule
def deepspeed_schedulers_of_own_rates_replace_the_learning_rate(run):
    """OneCycle and LRRangeTest set rates of their own in every step, silently."""
    name = _at(deepspeed_file(run) or {}, "scheduler.type")
    known = legal.deepspeed_scheduler_defaults(str(name))
    if uses_deepspeed(run) and run.explicit("learning_rate") and known and "warmup_num_steps" not in known:
        what = f"is not read: {name} of the DeepSpeed JSON has its own rates"
        yield advice(run, "learning_rate", what, "leave it out, or remove scheduler from the JSON")


@rule
def deepspeed_json_has_one_precision(run):
    """`bfloat16 and fp16 modes cannot be simultaneously enabled`, when DeepSpeed reads it."""
    content = deepspeed_file(run) or {}
    if is_true(_at(content, "bf16.enabled")) and is_true(_at(content, "fp16.enabled")):
        yield Problem("fp16.enabled", "and bf16.enabled are both on", '"enabled": "auto" in both', _json_source(run))


@rule
def deepspeed_json_names_classes(run):
    """`DeepSpeed does not recognize LR scheduler X`, `X is not a supported DeepSpeed Optimizer`"""
    content = deepspeed_file(run) or {}
    if not uses_deepspeed(run) or not legal.deepspeed_keys():
        return
    for section, known in (("optimizer", legal.deepspeed_optimizers()), ("scheduler", legal.deepspeed_schedulers())):
        name = _at(content, f"{section}.type")
        if isinstance(name, str) and name not in known and name.lower() not in known:
            fix = nearest(name, known) or f"no {section}: Trainer's own is used then"
            yield Problem(f"{section}.type", f"DeepSpeed has no {section} {name!r}", fix, _json_source(run))


@rule
def zero_stages_exist(run):
    """`Input should be 0, 1, 2 or 3`, from every worker."""
    stage = _at(deepspeed_file(run) or {}, "zero_optimization.stage")
    if stage is None or (not isinstance(stage, str) and stage in (0, 1, 2, 3)):
        return
    what = f"takes a whole number, got {stage!r}" if isinstance(stage, str) else f"there is no stage {stage}"
    yield Problem("zero_optimization.stage", what, "0, 1, 2 or 3", _json_source(run))


def _at(content: object, path: str) -> object:
    for name in path.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _json_source(run: RunSpec) -> str:
    named = (
        run["deepspeed"] if isinstance(run["deepspeed"], str) else deepspeed_section(run).get("deepspeed_config_file")
    )
    return str(named or "DeepSpeed JSON")


@rule
def the_model_has_the_experts_to_keep_whole(run):
    """`Could not find a transformer layer class called 'LlamaMLP' to wrap in the model.`"""
    named = deepspeed_section(run).get("deepspeed_moe_layer_cls_names")
    if not named or not uses_deepspeed(run):
        return
    for name in absent_classes(run, str(named).split(",")):
        kind = known_config(run)["model_type"]
        yield in_yaml(run, "deepspeed_moe_layer_cls_names", f"{name} is not a part of a {kind} model", "leave it out")
