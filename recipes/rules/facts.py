"""What every rule is made of: how to report a problem, and what rules ask about a run.

To add a rule, write one function in the file of its subject:

    @rule
    def tf32_needs_sm80(run):
        "`ValueError: --tf32 requires Ampere or a newer GPU arch`"
        if run["tf32"] and run.hardware.capability < (8, 0):
            yield problem(run, "tf32", "needs a GPU of compute capability 8.0", "leave it out")

Its name says what holds in a legal run, its docstring which failure it prevents. An error stops the run, an advice does
not. A rule never refuses a run that trains as it was asked to: if a setting is only ignored, the rule advises. A new
file of rules is listed in `check.RULE_MODULES`. Every rule has a case in which it fires and one in which it does not,
in tests/recipes/rules/.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.errors import Problem
from recipes.run import RunSpec
from recipes.run.engine import deepspeed_json

Rule = Callable[[RunSpec], Iterator[Problem]]


def rule(function: Rule) -> Rule:
    """Marks a function as a rule, for `check` to collect it."""
    function.is_rule = True  # type: ignore[attr-defined]
    return function


def problem(run: RunSpec, subject: str, what: str, fix: str = "") -> Problem:
    """An error about the setting `subject`, with where its value came from."""
    return Problem(subject, what, fix, run.setting(subject).source)


def advice(run: RunSpec, subject: str, what: str, fix: str = "") -> Problem:
    return Problem(subject, what, fix, run.setting(subject).source, severity="advice")


def missing(run: RunSpec, subject: str, package: str, what: str = "") -> Problem:
    """A package that is not installed: an error here, an advice where the run goes to an installation of its own."""
    what = what or f"needs the package {package}"
    if run.elsewhere is not None:
        return advice(run, subject, f"{what}, and it is not installed here", f"have {package} where it will run")
    return problem(run, subject, what, f"pip install {package}")


def in_yaml(run: RunSpec, subject: str, what: str, fix: str, severity: str = "error") -> Problem:
    """A problem in the Accelerate YAML."""
    return Problem(subject, what, fix, run.engine.source, severity)


def installed(package: str) -> bool:
    """Whether a top-level package can be imported here; it is not."""
    return importlib.util.find_spec(package) is not None


def available(run: RunSpec, package: str) -> bool:
    """Whether a package is known to be where the run is to be; elsewhere what is here counts until more is known."""
    return package in (run.elsewhere or ()) or installed(package)


def uses_deepspeed(run: RunSpec) -> bool:
    return run.engine.kind == "deepspeed" or run["deepspeed"] is not None


def deepspeed_section(run: RunSpec) -> Mapping[str, Any]:
    return dict(sections(run)).get("deepspeed_config", {})


def deepspeed_file(run: RunSpec) -> dict[str, Any] | None:
    """The DeepSpeed JSON of this run: `--deepspeed`, the Accelerate YAML's, or the launcher's. None without one."""
    if isinstance(run["deepspeed"], dict):
        return run["deepspeed"]
    section = run.engine.raw.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    launched = run.environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") if run.engine.kind == "deepspeed" else None
    return deepspeed_json({"deepspeed_config_file": run["deepspeed"] or named or launched})


def zero_section(run: RunSpec) -> dict[str, Any]:
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
    return run.engine.kind == "fsdp" or bool(run["fsdp"])


def fsdp_section(run: RunSpec) -> dict[str, Any]:
    """fsdp_config of the YAML and of the arguments, keys without `fsdp_`."""
    both = {**mapping(run.engine.raw.get("fsdp_config")), **mapping(run["fsdp_config"])}
    return {str(key).removeprefix("fsdp_"): value for key, value in both.items()}


def uses_ddp(run: RunSpec) -> bool:
    """Whether DDP wraps the model. Which engine runs several processes of a `single` one is up to the launcher."""
    if uses_deepspeed(run) or uses_fsdp(run):
        return False
    return run.engine.kind == "ddp" or run.engine.kind.startswith("multi_") or run.world_size > 1


def mixed_precision(run: RunSpec) -> str:
    """What trains: the arguments win over the Accelerate YAML."""
    if run["bf16"] or run["fp16"]:
        return "bf16" if run["bf16"] else "fp16"
    return run.engine.mixed_precision


def accelerator_config(run: RunSpec) -> dict[str, Any]:
    return mapping(run["accelerator_config"])


def gradient_accumulation_kwargs(run: RunSpec) -> dict[str, Any]:
    return mapping(accelerator_config(run).get("gradient_accumulation_kwargs"))


SECTIONS = (
    "deepspeed_config",
    "fsdp_config",
    "dynamo_config",
    "parallelism_config",
    "mpirun_config",
    "fp8_config",
    "megatron_lm_config",
)


def sections(run: RunSpec) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in SECTIONS:
        if isinstance(run.engine.raw.get(name), Mapping):
            yield name, run.engine.raw[name]


def mapping(value: Any) -> dict[str, Any]:
    """`value` if it is settings, else what the JSON file it names holds, else nothing."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        return {}
    try:
        content = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")
