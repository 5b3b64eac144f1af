"""The DeepSpeed JSON, and that it agrees with the Accelerate YAML and with the arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes import legal
from recipes.errors import Problem
from recipes.rules.facts import deepspeed_file, deepspeed_section, in_yaml, is_true, rule, uses_deepspeed
from recipes.run import RunSpec, nearest

_SAID_IN_JSON = (
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
    """`When using deepspeed_config_file, the following accelerate config variables will be ignored`: an error."""
    section = deepspeed_section(run)
    if not section.get("deepspeed_config_file"):
        return
    for name in _SAID_IN_JSON:
        if name in section:
            yield in_yaml(
                run, name, "cannot be said beside deepspeed_config_file", "say it in the JSON, and remove it here"
            )
    if run.engine.raw.get("mixed_precision") is not None:
        what = "cannot be said beside deepspeed_config_file"
        yield in_yaml(run, "mixed_precision", what, "remove it here; bf16 or fp16 in the JSON with enabled: auto")


@rule
def deepspeed_file_can_be_read(run):
    """Read in the workers only: every rank fails with the same traceback."""

    file = deepspeed_section(run).get("deepspeed_config_file")
    if not file:
        return
    try:
        content = json.loads(Path(str(file)).read_text(encoding="utf-8"))
    except OSError:
        yield in_yaml(run, "deepspeed_config_file", f"{file} cannot be read", "the path of a JSON file")
    except ValueError as error:
        yield in_yaml(run, "deepspeed_config_file", f"{file} is not valid JSON: {error}", "a JSON object")
    else:
        if not isinstance(content, dict):
            yield in_yaml(run, "deepspeed_config_file", f"{file} holds a {type(content).__name__}", "a JSON object")
        elif "zero_optimization" not in content:
            yield in_yaml(run, "zero_optimization", f"is missing in {file}", '"zero_optimization": {"stage": 2}')


@rule
def deepspeed_json_keys_are_known(run):
    """Unknown top-level keys pass silently (`gradient_cliping`); those in zero_optimization fail in every worker."""
    content = deepspeed_file(run)
    if not content or not legal.deepspeed_keys():
        return
    zero = content.get("zero_optimization")
    for names, known in ((content, legal.deepspeed_keys()), (zero, legal.deepspeed_zero_keys())):
        for key in names if isinstance(names, dict) else ():
            if key not in known:
                fix = nearest(str(key), known) or "a key of DeepSpeed's own reference"
                yield Problem(str(key), "is no key that DeepSpeed reads", fix, _json_source(run))


@rule
def deepspeed_json_agrees_with_arguments(run):
    """`Please correct the following DeepSpeed config values that mismatch TrainingArguments values`, or say "auto"."""
    content = deepspeed_file(run)
    if not content or not uses_deepspeed(run):
        return
    for path, expected, argument in _must_match(run):
        value = _at(content, path)
        if value is None or value == "auto" or value == expected:
            continue
        what = f"{value} contradicts {argument} {expected}"
        yield Problem(path, what, f'"{path.rpartition(".")[2]}": "auto"', _json_source(run))


def _must_match(run: RunSpec) -> Iterator[tuple[str, Any, str]]:
    """Where in the JSON, what the arguments say, and which argument that is."""
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
    if run["warmup_steps"] == 0 or run["warmup_steps"] >= 1:
        yield "scheduler.params.warmup_num_steps", max(1, int(run["warmup_steps"])), "warmup_steps"
    if run["max_steps"] > 0:
        yield "scheduler.params.total_num_steps", run["max_steps"], "max_steps"


@rule
def deepspeed_json_has_one_precision(run):
    """`bfloat16 and fp16 modes cannot be simultaneously enabled` from DeepSpeed's own configuration."""
    content = deepspeed_file(run) or {}
    if is_true(_at(content, "bf16.enabled")) and is_true(_at(content, "fp16.enabled")):
        yield Problem("fp16.enabled", "and bf16.enabled are both on", '"enabled": "auto" in both', _json_source(run))


@rule
def zero_stages_exist(run):
    """`Input should be 0, 1, 2 or 3`, from every worker."""
    stage = _at(deepspeed_file(run) or {}, "zero_optimization.stage")
    if stage is not None and stage not in (0, 1, 2, 3):
        yield Problem("zero_optimization.stage", f"there is no stage {stage}", "0, 1, 2 or 3", _json_source(run))


def _at(content: Any, path: str) -> Any:
    for name in path.split("."):
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _json_source(run: RunSpec) -> str:
    named = (
        run["deepspeed"] if isinstance(run["deepspeed"], str) else deepspeed_section(run).get("deepspeed_config_file")
    )
    return str(named or "DeepSpeed JSON")
