"""The building blocks of rules: helpers that report a problem, and facts about a run.

A rule whose condition is one expression is an `error_row` or `advice_row`: in `table`, or in the
ROWS of `engine`, `training` and `data_and_model`. Any other rule is a function in one of the last
three modules:

    @rule
    def ddp_settings_need_ddp(run):
        "Under DeepSpeed, FSDP and a single process the run ignores DDP's settings silently."
        for name in ...:
            yield advice(name, "is ignored: the engine is not DDP", "leave it out")

A rule's name states a fact about legal runs. The docstring, or `why`, names the failure that
the rule prevents: silently different training, a hang, or a failure after minutes. The probe finds
the errors that the libraries raise at once. An error stops the run, advice does not.
A run that would train as asked gets no error: an ignored setting gets advice. A rule's test is an
entry in CASES of its module's test file: a run that breaks the rule, and the nearest legal run.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from recipes.catalog import DEMONSTRATION_MODEL
from recipes.errors import Problem
from recipes.mixture import parts_of, paths_of
from recipes.rules.local_model import local_config
from recipes.run import RunSpec
from recipes.run.files import Json, files_in, read_json

Judge = Callable[[RunSpec], Iterator[Problem]]
HELD_OUT = "--dataset_test_split 'train[90%:]' --dataset_train_split 'train[:90%]'"  # flags that hold out a tenth
# Names of files and folders that `datasets` reads as a split to evaluate on (data_files.py).
_TEST_FILE = re.compile(r"(?<![a-z])(test|testing|dev|val|valid|validation|eval|evaluation)(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Rule:
    """A named check. `judge` yields a run's problems. `why` is the failure that the rule prevents.

    `of_train_py` is True if the rule depends on how train.py handles model, data and metrics. The
    user's own script may handle them differently, so `check` skips such a rule for a script.
    """

    name: str
    why: str
    judge: Judge
    of_train_py: bool = False

    def __call__(self, run: RunSpec) -> Iterator[Problem]:
        """Yield the run's problems. A problem about a setting gets the source of the setting."""
        return map(run.with_source, self.judge(run))


def rule(judge: Judge) -> Rule:
    """Turn a function into a `Rule`, which `check` then collects."""
    return Rule(judge.__name__, judge.__doc__ or "", judge)


def rule_of_train_py(judge: Judge) -> Rule:
    return replace(rule(judge), of_train_py=True)


advice = partial(Problem, severity="advice")


def missing(run: RunSpec, subject: str, package: str, what: str = "") -> Problem:
    """Return an error about a missing package, or advice if another machine will train."""
    what = what or f"needs the package {package}"
    if run.place.is_elsewhere:
        return advice(subject, f"{what}, which is not installed here", f"install {package} where the job runs")
    return Problem(subject, what, f"pip install {package}")


def in_yaml(run: RunSpec, subject: str, what: str, fix: str, severity: str = "error") -> Problem:
    """Return a problem about the key `subject` of the Accelerate YAML."""
    return Problem(subject, what, fix, run.engine.source, severity)


def in_json(run: RunSpec, subject: str, what: str, fix: str) -> Problem:
    """Return an error about the DeepSpeed JSON's key `subject`, such as `scheduler.params`."""
    return Problem(subject, what, fix, run.engine.json_source)


def installed(package: str) -> bool:
    """True if a top-level package is installed here. The package is not imported."""
    return importlib.util.find_spec(package) is not None


def available(run: RunSpec, package: str) -> bool:
    """True if a package is installed here, or known to be installed where the job runs."""
    return package in (run.place.packages or ()) or installed(package)


def model_config(run: RunSpec) -> Mapping[str, Any] | None:
    """The configuration of the model: loaded, local or the demonstration's; None if unknown."""
    if run.model is not None:
        return run.model
    name = run["model_name_or_path"]
    return dict(DEMONSTRATION_MODEL) if name is None and run.place.by_train_py else local_config(name)


def known_config(run: RunSpec) -> Json:
    """The model's configuration as `model_config` finds it; an empty dict if it is unknown."""
    return dict(model_config(run) or {})


def uses_deepspeed(run: RunSpec) -> bool:
    return run.engine.kind == "deepspeed" or bool(run["deepspeed"])


def deepspeed_section(run: RunSpec) -> Json:
    """The section `deepspeed_config` of the Accelerate YAML; empty if another engine trains."""
    return mapping(run.engine.raw.get("deepspeed_config")) if run.engine.kind == "deepspeed" else {}


def uses_fsdp(run: RunSpec) -> bool:
    """True if FSDP shards the model. On a CPU accelerate ignores FSDP and uses plain DDP. With
    `--deepspeed`, train.py switches FSDP off.
    """
    return run.hardware.can_shard and not uses_deepspeed(run) and (run.engine.kind == "fsdp" or bool(run["fsdp"]))


def fsdp_version(run: RunSpec) -> int:
    """The version of FSDP; 0 without FSDP. `accelerate launch` defaults to 1, Trainer to 2."""
    return run.engine.fsdp_version if uses_fsdp(run) else 0


def mixed_precision(run: RunSpec) -> str:
    """Return `no`, `bf16`, `fp16` or `fp8`. The arguments win over the Accelerate YAML."""
    if run["bf16"] or not run["fp16"]:
        return "bf16" if run["bf16"] else run.engine.mixed_precision
    return "fp16" if run.hardware.cuda or uses_deepspeed(run) else "no"  # on a CPU, fp16 does nothing


def accelerator_config(run: RunSpec) -> Json:
    return mapping(run["accelerator_config"])


def gradient_accumulation_kwargs(run: RunSpec) -> Json:
    return mapping(accelerator_config(run).get("gradient_accumulation_kwargs"))


def syncs_each_micro_batch(run: RunSpec) -> bool:
    """True if DDP and FSDP reduce gradients in every micro-batch, not once per step."""
    return is_true(gradient_accumulation_kwargs(run).get("sync_each_batch"))


def mapping(value: object) -> Json:
    """Return a mapping, or the content of the JSON file that `value` names, as a dict; else {}."""
    if isinstance(value, Mapping):
        return dict(value)
    return (read_json(value)[0] or {}) if isinstance(value, str) else {}


def is_true(value: object) -> bool:
    """True if a value from YAML, JSON or the environment means true."""
    return str(value).lower() in ("true", "1", "yes")


def has_test_split(run: RunSpec) -> bool:
    """True if a local folder in the run's data holds a split to evaluate on, such as test.jsonl."""
    folders = [path for part in parts_of(run["dataset_name"]) for path in paths_of(part.name) if path.is_dir()]
    return any(_TEST_FILE.search(str(file.relative_to(folder))) for folder in folders for file in files_in(folder))
