"""The parts of a rule: how it reports a problem, and the facts of a run that it asks.

A rule about a setting whose condition is one expression is an `error_row` or `advice_row`, in
`table` or in the ROWS of `engine` and `training`. Any other is a function there or in
`data_and_model`:

    @rule
    def ddp_settings_need_ddp(run):
        "DeepSpeed, FSDP and a single process do not read them."
        for name in ...:
            yield advice(run, name, "is ignored: the engine is not DDP", "leave it out")

The name says what holds in a legal run; the docstring, or `why`, says which failure the rule
prevents: other training in silence, a hang, or an end after minutes. What the libraries refuse at
once is left to the probe. An error stops the run, advice does not. A rule never refuses a run that
would train as asked: if a setting is only ignored, the rule advises. Its test is one entry in CASES
of the subject's test file: a run in which the rule fires, and the nearest one in which it does not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipes.catalog import DEMONSTRATION_MODEL
from recipes.errors import Problem
from recipes.run import RunSpec
from recipes.run.engine import deepspeed_json
from recipes.run.files import Json, read_json
from recipes.run.local_model import local_config

Judge = Callable[[RunSpec], Iterator[Problem]]


@dataclass(frozen=True)
class Rule:
    """`why` is the failure that the rule prevents, `judge` yields the problems of a run.

    `of_train_py`: the rule is about what train.py does with model, data and metrics. A script of
    the user's own may do otherwise, so its factory calls are not judged by such a rule.
    """

    name: str
    why: str
    judge: Judge
    of_train_py: bool = False

    def __call__(self, run: RunSpec) -> Iterator[Problem]:
        return self.judge(run)


def rule(judge: Judge) -> Rule:
    """Makes a function a rule: `check` collects all of them."""
    return Rule(judge.__name__, judge.__doc__ or "", judge, hasattr(judge, "of_train_py"))


def of_train_py(judge: Judge) -> Judge:
    """Marks a function, below `@rule`, as a rule about train.py alone."""
    judge.of_train_py = True  # type: ignore[attr-defined]
    return judge


def problem(run: RunSpec, subject: str, what: str, fix: str = "") -> Problem:
    """An error about the setting `subject`, with where its value came from."""
    return Problem(subject, what, fix, run.setting(subject).source)


def advice(run: RunSpec, subject: str, what: str, fix: str = "") -> Problem:
    """Advice about the setting `subject`, with where its value came from."""
    return Problem(subject, what, fix, run.setting(subject).source, severity="advice")


def missing(run: RunSpec, subject: str, package: str, what: str = "") -> Problem:
    """A package is not installed: an error, or advice if the run goes to another machine."""
    what = what or f"needs the package {package}"
    if run.place.is_elsewhere:
        return advice(run, subject, f"{what}, and it is not installed here", f"have {package} where it will run")
    return problem(run, subject, what, f"pip install {package}")


def in_yaml(run: RunSpec, subject: str, what: str, fix: str, severity: str = "error") -> Problem:
    """A problem with the key `subject` of the Accelerate YAML."""
    return Problem(subject, what, fix, run.engine.source, severity)


def in_json(run: RunSpec, subject: str, what: str, fix: str, severity: str = "error") -> Problem:
    """A problem with the path `subject` in the DeepSpeed JSON."""
    return Problem(subject, what, fix, json_source(run), severity)


def installed(package: str) -> bool:
    """True if a top-level package is installed here. Looks for it without importing it."""
    return importlib.util.find_spec(package) is not None


def available(run: RunSpec, package: str) -> bool:
    """True if a package is installed here, or known to be where the run goes."""
    return package in (run.place.packages or ()) or installed(package)


def model_config(run: RunSpec) -> Mapping[str, Any] | None:
    """The configuration of the run's model: as loaded, or as its folder has it. None if unknown."""
    if run.model is not None:
        return run.model
    name = run["model_name_or_path"]
    return dict(DEMONSTRATION_MODEL) if name is None and run.place.by_train_py else local_config(name)


def known_config(run: RunSpec) -> Json:
    """The configuration of the run's model; empty if it is unknown."""
    return dict(model_config(run) or {})


def on_gpu(run: RunSpec) -> bool:
    return run.hardware.cuda and not run["use_cpu"]


def uses_deepspeed(run: RunSpec) -> bool:
    return run.engine.kind == "deepspeed" or run["deepspeed"] is not None


def deepspeed_section(run: RunSpec) -> Json:
    """`deepspeed_config` of the Accelerate YAML if DeepSpeed trains; else empty."""
    return mapping(run.engine.raw.get("deepspeed_config")) if run.engine.kind == "deepspeed" else {}


def deepspeed_file(run: RunSpec) -> Json | None:
    """The DeepSpeed JSON of `--deepspeed`, the YAML or the launcher. None without one."""
    if isinstance(run["deepspeed"], dict):
        return run["deepspeed"]
    named = deepspeed_section(run).get("deepspeed_config_file")
    launched = run.place.environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") if run.engine.kind == "deepspeed" else None
    return deepspeed_json({"deepspeed_config_file": run["deepspeed"] or named or launched})


def json_source(run: RunSpec) -> str:
    """The path of the DeepSpeed JSON, or `DeepSpeed JSON` if it is no file."""
    named = run["deepspeed"] or deepspeed_section(run).get("deepspeed_config_file")
    return named if isinstance(named, str) else "DeepSpeed JSON"


def zero_stage(run: RunSpec) -> int:
    if not uses_deepspeed(run):
        return 0
    return mapping((deepspeed_file(run) or {}).get("zero_optimization")).get("stage", run.engine.zero_stage)


def uses_fsdp(run: RunSpec) -> bool:
    """True if FSDP shards the model. On a CPU accelerate ignores it, and trains plain DDP; beside
    `--deepspeed`, train.py switches it off.
    """
    return run.hardware.can_shard and not uses_deepspeed(run) and (run.engine.kind == "fsdp" or bool(run["fsdp"]))


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


def fsdp_section(run: RunSpec) -> Json:
    """`fsdp_config` without `fsdp_` before its keys, from the YAML. In a launched process it is
    what `accelerate launch` exported, defaults included. With `--fsdp` the arguments win.
    """
    written = mapping(run.engine.raw.get("fsdp_config"))
    if run.engine.kind == "fsdp" and not run.engine.raw:
        written = {key.lower(): value for key, value in run.place.environment.items() if key.startswith("FSDP_")}
        written["transformer_layer_cls_to_wrap"] = written.pop("fsdp_transformer_cls_to_wrap", None)
    given = {**_SET_BY_TRAINER, **_plain(mapping(run["fsdp_config"]))} if run["fsdp"] else {}
    return {**_plain(written), **given}  # without --fsdp nothing reads fsdp_config


def _plain(section: Json) -> Json:
    return {str(key).removeprefix("fsdp_"): value for key, value in section.items()}


def mixed_precision(run: RunSpec) -> str:
    """`no`, `bf16`, `fp16` or `fp8`. The arguments win over the Accelerate YAML."""
    if run["bf16"] or run["fp16"]:
        return "bf16" if run["bf16"] else "fp16"
    return run.engine.mixed_precision


def accelerator_config(run: RunSpec) -> Json:
    return mapping(run["accelerator_config"])


def gradient_accumulation_kwargs(run: RunSpec) -> Json:
    return mapping(accelerator_config(run).get("gradient_accumulation_kwargs"))


def mapping(value: object) -> Json:
    """`value` itself if it is a mapping, the content of the JSON file that it names, or {}."""
    if isinstance(value, Mapping):
        return dict(value)
    return (read_json(value)[0] or {}) if isinstance(value, str) else {}


def is_true(value: object) -> bool:
    """True if a value from YAML, JSON or the environment means true."""
    return str(value).lower() in ("true", "1", "yes")
