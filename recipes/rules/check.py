"""Report every problem of a run before anything starts: `check(run)`.

`run.problems` already holds `resolve`'s findings: wrong names and types, an impossible batch.
"""

from collections.abc import Iterator
from dataclasses import replace

from recipes.errors import Problem, UserError, raise_errors
from recipes.rules import data_and_model, engine, table, training
from recipes.rules.facts import Rule
from recipes.run import RunSpec

RULE_MODULES = (training, engine, data_and_model)
# The rows of the table come first, then the functions of all modules, then the ROWS of all modules.
RULES: list[Rule] = [
    *table.ROWS,
    *(item for module in RULE_MODULES for item in vars(module).values() if isinstance(item, Rule)),
    *(row for module in RULE_MODULES for row in module.ROWS),
]


def check(run: RunSpec) -> list[Problem]:
    """Return every problem of the run, errors first. A setting with an error gets no advice."""
    found = list(run.problems)
    # In place of a refused value the run holds a default, which rules must not judge.
    refused = {problem.subject.removeprefix("--") for problem in found if problem.severity == "error"} - {*run.given}
    try:
        found += [problem for _, problem in problems_by_rule(run) if problem.subject not in refused]
    except UserError as error:  # a function in the user's own recipe raised an error
        found += error.problems
    wrong = {problem.subject for problem in found if problem.severity == "error"}
    found = [problem for problem in found if problem.severity == "error" or problem.subject not in wrong]
    return sorted(dict.fromkeys(found), key=lambda problem: problem.severity != "error")


def problems_by_rule(run: RunSpec) -> Iterator[tuple[str, Problem]]:
    """Yield each problem together with the name of the rule that found the problem."""
    for rule in RULES:
        if not (rule.of_train_py and run.place.own_script):
            yield from ((rule.name, problem) for problem in rule(run))
    if run.outer_engine is None:
        return
    # train.py starts another engine, but the launch still reads the Accelerate YAML: check both.
    for name, problem in problems_by_rule(replace(run, engine=run.outer_engine)):
        if problem.source == run.outer_engine.source:
            yield name, problem


def new_problems(run: RunSpec, before: RunSpec) -> list[Problem]:
    """Return the problems that are new since `before`, the same run with fewer facts known."""
    known = check(before)
    return [problem for problem in check(run) if problem not in known]


def require_legal(run: RunSpec) -> list[Problem]:
    """Return the advice about a legal run. Raise `UserError` with every error of an illegal run."""
    return raise_errors(check(run))
