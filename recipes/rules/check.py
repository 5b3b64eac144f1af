"""`check(run)`: every problem of a run, before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from recipes import legal
from recipes.errors import Problem, UserError
from recipes.rules import (
    accelerate_yaml,
    adapters,
    batches,
    checkpoints,
    deepspeed_json,
    engines,
    evaluation,
    nested,
    optimizer,
    packages,
    parallelism,
    precision,
    speed,
    values,
)
from recipes.rules.facts import Rule
from recipes.run import RunSpec
from recipes.run.engine import read_yaml

RULE_MODULES = (
    values,
    precision,
    engines,
    parallelism,
    batches,
    optimizer,
    adapters,
    evaluation,
    checkpoints,
    packages,
    speed,
    nested,
    accelerate_yaml,
    deepspeed_json,
)
# In the order of the modules, and in each as they are written. What a module imports is never a rule.
RULES: list[Rule] = [
    item for module in RULE_MODULES for item in vars(module).values() if getattr(item, "is_rule", False)
]


def check(run: RunSpec, accelerate_config_given: bool = True) -> list[Problem]:
    """Everything wrong with the run, errors first.

    `accelerate_config_given` false: `accelerate launch` is to be called without --config_file, so that a default
    configuration of the user's own counts.
    """
    found = [*run.problems, *(problem for rule in RULES for problem in rule(run))]
    if not accelerate_config_given:
        found += stray_accelerate_config(run.environment)
    return sorted(dict.fromkeys(found), key=lambda problem: problem.severity != "error")


def require_legal(run: RunSpec) -> list[Problem]:
    """The advice about a legal run. Raises `UserError` with every error otherwise."""
    found = check(run)
    errors = [problem for problem in found if problem.severity == "error"]
    if errors:
        raise UserError(*errors)
    return found


def stray_accelerate_config(environment: Mapping[str, str]) -> Iterator[Problem]:
    """The file that `accelerate launch` reads when it is given none: what it says counts, and nothing mentions it."""
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    for name in ("default_config.yaml", "default_config.json"):
        file = (Path(home) / "accelerate" / name).expanduser()
        if file.is_file():
            fix = "accelerate launch --config_file FILE, with one of accelerate_configs/"
            what = f"accelerate launch reads it when given no configuration: {_summary(file)}"
            yield Problem(str(file), what, fix, "the user's own default", "advice")


def _summary(file: Path) -> str:
    try:
        content = read_yaml(file, str(file))  # JSON is YAML
    except UserError:
        return "and it is not valid YAML"
    said = [
        f"{name} {content[name]}"
        for name in ("distributed_type", "mixed_precision", "num_processes")
        if name in content
    ]
    return ", ".join(said) or "it says nothing of consequence"


# --- Against the real classes ----------------------------------------------------------------------------------------


def check_deep(run: RunSpec) -> list[Problem]:
    """What the installed libraries' own classes refuse. Imports them, which takes seconds."""
    return [*_refused_by_trainer(run), *_refused_by_accelerate(run)]


def _refused_by_trainer(run: RunSpec) -> Iterator[Problem]:
    import tempfile

    from transformers import TrainingArguments

    with tempfile.TemporaryDirectory() as scratch:
        try:
            TrainingArguments(**{**run.training_arguments(), "output_dir": scratch})
        except Exception as error:
            yield _as_problem(run, error)


def _as_problem(run: RunSpec, error: Exception) -> Problem:
    """Named after the first setting that the message mentions."""
    words = re.findall(r"\w+", str(error))
    subject = next((word for word in words if word in legal.settings() and "_" in word), "TrainingArguments")
    subject = next((word for word in words if run_explicitly(run, word)), subject)
    source = run.setting(subject).source if subject in legal.settings() else "transformers"
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    return Problem(subject, f"{first_line} ({type(error).__name__})", "", source)


def run_explicitly(run: RunSpec, word: str) -> bool:
    return word in legal.settings() and run.explicit(word)


def _refused_by_accelerate(run: RunSpec) -> Iterator[Problem]:
    if not run.engine.raw or not Path(run.engine.source).is_file():
        return
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        load_config_from_file(run.engine.source)
    except Exception as error:
        yield Problem("accelerate_config", f"{error} ({type(error).__name__})", "", run.engine.source)
