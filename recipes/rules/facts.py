"""What rules are made of: how to report a problem, and what rules ask about a run.

To add a rule, write one function in the file of its subject:

    @rule
    def tf32_needs_sm80(run):
        "`ValueError: --tf32 requires Ampere or a newer GPU arch`"
        if run["tf32"] and run.hardware.capability < (8, 0):
            yield problem(run, "tf32", "needs a GPU of compute capability 8.0", "leave it out")

Its name says what holds in a legal run, its docstring which failure it prevents. An error stops
the run, advice does not. A rule never refuses a run that would train as asked: if a setting is
only ignored, the rule advises. Its test is one entry in CASES of the subject's test file: a run in
which the rule fires, and the nearest one in which it does not. Only a new file of rules must be
made known, in `check.RULE_MODULES`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from recipes.catalog import DEMONSTRATION_MODEL
from recipes.errors import Problem
from recipes.legal import models
from recipes.run import RunSpec
from recipes.run.engine import Json, deepspeed_json, read_json
from recipes.run.local_model import local_config

Rule = Callable[[RunSpec], Iterator[Problem]]


def rule(function: Rule) -> Rule:
    """Marks a function as a rule: `check` collects all that are marked."""
    function.is_rule = True  # type: ignore[attr-defined]
    return function


def of_train_py(function: Rule) -> Rule:
    """Marks a rule about what train.py does with model, data and metrics.

    A script of the user's own may do otherwise: its factory calls are not judged by such a rule.
    """
    function.of_train_py = True  # type: ignore[attr-defined]
    return function


def problem(run: RunSpec, subject: str, what: str, fix: str = "") -> Problem:
    """An error about the setting `subject`, with where its value came from."""
    return Problem(subject, what, fix, run.setting(subject).source)


def advice(run: RunSpec, subject: str, what: str, fix: str = "") -> Problem:
    """Advice about the setting `subject`, with where its value came from."""
    return Problem(subject, what, fix, run.setting(subject).source, severity="advice")


def missing(run: RunSpec, subject: str, package: str, what: str = "") -> Problem:
    """A package is not installed: an error, or advice if the run goes to another machine."""
    what = what or f"needs the package {package}"
    if run.elsewhere is not None:
        return advice(run, subject, f"{what}, and it is not installed here", f"have {package} where it will run")
    return problem(run, subject, what, f"pip install {package}")


def in_yaml(run: RunSpec, subject: str, what: str, fix: str, severity: str = "error") -> Problem:
    """A problem with the key `subject` of the Accelerate YAML."""
    return Problem(subject, what, fix, run.engine.source, severity)


def optimizer_arguments(run: RunSpec) -> dict[str, str]:
    """The pairs of `--optim_args`, as Trainer reads them."""
    words = (run["optim_args"] or "").replace(" ", "").split(",")
    return dict(part.split("=") for part in words if part.count("=") == 1)


def installed(package: str) -> bool:
    """Whether a top-level package is installed here. Looks for it without importing it."""
    return importlib.util.find_spec(package) is not None


def available(run: RunSpec, package: str) -> bool:
    """Whether a package is installed here, or known to be where the run goes."""
    return package in (run.elsewhere or ()) or installed(package)


def model_config(run: RunSpec) -> Mapping[str, Any] | None:
    """The configuration of the run's model: as loaded, or as its folder has it. None if unknown."""
    if run.model is not None:
        return run.model
    name = run["model_name_or_path"]
    return dict(DEMONSTRATION_MODEL) if name is None and run.demonstrate else local_config(name)


def known_config(run: RunSpec) -> Json:
    """The configuration of the run's model; empty if it is unknown."""
    return dict(model_config(run) or {})


def of_class(run: RunSpec, attribute: str) -> object:
    """An attribute of the model's class; None if the class cannot be read.

    A class that sets none has PreTrainedModel's: it supports nothing.
    """
    model_type = known_config(run).get("model_type")
    if not isinstance(model_type, str):
        return None
    name = models.model_class(model_type, run["task"])
    if name is None or name not in models.class_names(model_type):
        return None  # code of its own, or a class that another model's file holds
    return models.class_attribute(model_type, name, attribute, False)


def absent_classes(run: RunSpec, names: Iterable[str]) -> list[str]:
    """Which of these classes are no part of the model.

    Empty if that is unknown: of a model with its own code, or made from several.
    """
    config = known_config(run)
    known = models.class_names(str(config.get("model_type")))
    composed = any(isinstance(value, dict) and "model_type" in value for value in config.values())
    if composed or "auto_map" in config or not known:
        return []
    return [name for name in names if name not in known]


def on_gpu(run: RunSpec) -> bool:
    return run.hardware.cuda and not run["use_cpu"]


def uses_deepspeed(run: RunSpec) -> bool:
    return run.engine.kind == "deepspeed" or run["deepspeed"] is not None


def deepspeed_section(run: RunSpec) -> Json:
    return dict(sections(run)).get("deepspeed_config", {})


def deepspeed_file(run: RunSpec) -> Json | None:
    """The DeepSpeed JSON of `--deepspeed`, the YAML or the launcher. None without one."""
    if isinstance(run["deepspeed"], dict):
        return run["deepspeed"]
    named = deepspeed_section(run).get("deepspeed_config_file")
    launched = run.environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") if run.engine.kind == "deepspeed" else None
    return deepspeed_json({"deepspeed_config_file": run["deepspeed"] or named or launched})


def zero_section(run: RunSpec) -> Json:
    section = (deepspeed_file(run) or {}).get("zero_optimization")
    return section if isinstance(section, dict) else {}


def zero_stage(run: RunSpec) -> int:
    return zero_section(run).get("stage", run.engine.zero_stage) if uses_deepspeed(run) else 0


def optimizer_is_offloaded(run: RunSpec) -> bool:
    if not uses_deepspeed(run):
        return False
    section = zero_section(run).get("offload_optimizer")
    if isinstance(section, dict):
        return section.get("device", "none") not in (None, "none")
    return run.engine.offload_optimizer != "none"


def uses_fsdp(run: RunSpec) -> bool:
    """Whether FSDP shards the model. On a CPU accelerate ignores it, and trains plain DDP; beside
    `--deepspeed`, train.py switches it off.
    """
    return run.hardware.shards and not uses_deepspeed(run) and (run.engine.kind == "fsdp" or bool(run["fsdp"]))


def fsdp_version(run: RunSpec) -> int:
    """1 or 2; 0 without FSDP. The launcher's default is 1, Trainer's own 2."""
    return run.engine.fsdp_version if uses_fsdp(run) else 0


# What Trainer's `--fsdp` sets if `fsdp_config` does not: `_process_fsdp_args`. It wins over a YAML.
_SET_BY_TRAINER = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "min_num_params": 0,
    "cpu_ram_efficient_loading": False,
    "reshard_after_forward": True,
    "state_dict_type": "FULL_STATE_DICT",
}


def fsdp_section(run: RunSpec, launched: bool = True) -> Json:
    """`fsdp_config` of the YAML and, with `--fsdp`, of the arguments, which win. Keys are without
    `fsdp_`.

    With `launched`, what `accelerate launch` made of a YAML, its defaults included, if that is all
    that is known.
    """
    written = mapping(run.engine.raw.get("fsdp_config"))
    if launched and run.engine.kind == "fsdp" and not run.engine.raw:
        written = {key.lower(): value for key, value in run.environment.items() if key.startswith("FSDP_")}
        written["transformer_layer_cls_to_wrap"] = written.pop("fsdp_transformer_cls_to_wrap", None)
    given = mapping(run["fsdp_config"]) if run["fsdp"] else {}  # nothing reads it without --fsdp
    written, given = (
        {str(key).removeprefix("fsdp_"): value for key, value in section.items()} for section in (written, given)
    )
    return {**written, **(_SET_BY_TRAINER if run["fsdp"] else {}), **given}


def uses_ddp(run: RunSpec) -> bool:
    """Whether DDP wraps the model, as it does when a launcher starts several `single` processes."""
    if uses_deepspeed(run) or uses_fsdp(run):
        return False
    return run.engine.kind == "ddp" or run.engine.kind.startswith("multi_") or run.world_size > 1


def mixed_precision(run: RunSpec) -> str:
    """`no`, `bf16`, `fp16` or `fp8`. The arguments win over the Accelerate YAML."""
    if run["bf16"] or run["fp16"]:
        return "bf16" if run["bf16"] else "fp16"
    return run.engine.mixed_precision


def accelerator_config(run: RunSpec) -> Json:
    return mapping(run["accelerator_config"])


def gradient_accumulation_kwargs(run: RunSpec) -> Json:
    return mapping(accelerator_config(run).get("gradient_accumulation_kwargs"))


SECTIONS = (  # of an Accelerate YAML
    "deepspeed_config",
    "fsdp_config",
    "dynamo_config",
    "parallelism_config",
    "mpirun_config",
    "fp8_config",
    "megatron_lm_config",
)


READ_BY = {"deepspeed_config": "deepspeed", "fsdp_config": "fsdp", "megatron_lm_config": "megatron_lm"}


def is_read(run: RunSpec, section: str) -> bool:
    """Whether the launcher reads a section: some are for one distributed type only."""
    return READ_BY.get(section, run.engine.kind) == run.engine.kind


def sections(run: RunSpec) -> Iterator[tuple[str, Json]]:
    """The sections of the Accelerate YAML that are read, by name."""
    for name in SECTIONS:
        if is_read(run, name) and isinstance(run.engine.raw.get(name), Mapping):
            yield name, run.engine.raw[name]


def mapping(value: object) -> Json:
    """`value` itself if it is a mapping, the content of the JSON file that it names, or {}."""
    if isinstance(value, Mapping):
        return dict(value)
    return (read_json(value)[0] or {}) if isinstance(value, str) else {}


def is_true(value: object) -> bool:
    """Whether a value from YAML, JSON or the environment means true."""
    return str(value).lower() in ("true", "1", "yes")
