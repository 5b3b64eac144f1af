"""`check(run)`: every problem of a run, before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from recipes import legal
from recipes.errors import Problem, UserError
from recipes.rules import (
    adapters,
    attention,
    batches,
    checkpoints,
    data,
    evaluation,
    models,
    nested,
    optimizer,
    packages,
    precision,
    speed,
    values,
)
from recipes.rules.engine import accelerate_yaml, deepspeed_json, fsdp, parallelism, processes
from recipes.rules.facts import Rule
from recipes.run import RunSpec
from recipes.run.engine import default_accelerate_config, read_yaml

RULE_MODULES = (
    values,
    precision,
    attention,
    processes,
    parallelism,
    fsdp,
    models,
    data,
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
# In the order of the modules, and in each module as the rules are written.
RULES: list[Rule] = [
    item for module in RULE_MODULES for item in vars(module).values() if getattr(item, "is_rule", False)
]


def check(run: RunSpec, accelerate_config_given: bool = True) -> list[Problem]:
    """Everything wrong with the run, errors first.

    With `accelerate_config_given` false, `accelerate launch` will be called without --config_file,
    and reads the user's own default configuration if there is one.
    """
    found = list(run.problems)
    try:
        found += [problem for _, problem in problems_by_rule(run)]
    except UserError as error:  # a function in a user's own recipe raises
        found += error.problems
    if not accelerate_config_given:
        found += stray_accelerate_config(run.environment)
    return sorted(dict.fromkeys(found), key=lambda problem: problem.severity != "error")


def problems_by_rule(run: RunSpec) -> Iterator[tuple[str, Problem]]:
    """Each problem with the name of the rule that found it."""
    for rule in _rules_for(run):
        for problem in rule(run):
            yield rule.__name__, problem
    if run.launcher is None:
        return
    # The launch reads its YAML, though the recipe starts another engine under it.
    for name, problem in problems_by_rule(replace(run, engine=run.launcher, launcher=None)):
        if problem.source == run.launcher.source:
            yield name, problem


def new_problems(run: RunSpec, before: RunSpec) -> list[Problem]:
    """What is wrong with a run of which more is known now, and was not found before."""
    known = check(before)
    return [problem for problem in check(run) if problem not in known]


def _rules_for(run: RunSpec) -> list[Rule]:
    """All rules; for a script of the user's own, without those about what train.py does."""
    return [rule for rule in RULES if not (run.own_script and getattr(rule, "of_train_py", False))]


def require_legal(run: RunSpec) -> list[Problem]:
    """The advice about a legal run. Raises `UserError` with every error otherwise."""
    found = check(run)
    errors = [problem for problem in found if problem.severity == "error"]
    if errors:
        raise UserError(*errors)
    return found


def stray_accelerate_config(environment: Mapping[str, str]) -> Iterator[Problem]:
    """The default configuration that `accelerate launch` silently reads if it is given none."""
    if file := default_accelerate_config(environment):
        fix = "accelerate launch --config_file FILE, with one of `recipes where`; or `recipes train`"
        what = f"accelerate launch reads this file if it is given none: {_summary(file)}"
        yield Problem(str(file), what, fix, "the user's own default", "advice")


def _summary(file: Path) -> str:
    try:
        content = read_yaml(file, str(file))  # JSON is YAML
    except UserError:
        return "it is not valid YAML"
    named = [
        f"{name} {content[name]}"
        for name in ("distributed_type", "mixed_precision", "num_processes")
        if name in content
    ]
    return ", ".join(named) or "it changes nothing of importance"


# --- The real classes -----------------------------------------------------------------------------


def check_deep(run: RunSpec) -> list[Problem]:
    """What the classes of the installed libraries refuse. Importing them takes seconds."""
    from recipes.quiet import silence

    with silence():  # bitsandbytes remarks on a kernel that it did not find
        return [*_refused_by_trainer(run), *_refused_by_accelerate(run)]


def _refused_by_trainer(run: RunSpec) -> Iterator[Problem]:
    import tempfile

    from transformers import TrainingArguments

    with tempfile.TemporaryDirectory() as scratch:
        try:
            TrainingArguments(**{**run.training_arguments(), "output_dir": scratch})
        except Exception as error:
            yield refused_by_library(run, error)


def refused_by_library(run: RunSpec, error: Exception) -> Problem:
    """A problem about the first setting that TrainingArguments' message names, if possible one that
    the user wrote.
    """
    named = [word for word in re.findall(r"\w+", str(error)) if word in legal.trainer_fields()]
    subject = next((name for name in named if "_" in name), "TrainingArguments")
    subject = next((name for name in named if run.explicit(name)), subject)
    is_setting = subject in legal.trainer_fields()
    files = [name for name in ("deepspeed", "fsdp_config", "accelerator_config") if run.explicit(name)]
    source, fix = "transformers", f"correct what --{files[0]} names" if files else ""
    if is_setting:
        source, fix = run.setting(subject).source, "another value, or leave it out"
    first_line = str(error).strip().partition("\n")[0] or type(error).__name__
    return Problem(subject, f"{first_line} ({type(error).__name__})", fix, source)


def _refused_by_accelerate(run: RunSpec) -> Iterator[Problem]:
    if not run.engine.raw or not Path(run.engine.source).is_file():
        return
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        load_config_from_file(run.engine.source)
    except Exception as error:
        fix = "correct it, or one of the files that `recipes where` names"
        yield Problem("accelerate_config", f"{error} ({type(error).__name__})", fix, run.engine.source)
