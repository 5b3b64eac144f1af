"""`check(run)`: every problem of a run, before anything starts.

Names, types and choices of settings were checked when the run was resolved (run/command_line.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from recipes.errors import Problem, UserError
from recipes.rules import data_and_model, engine, table, training
from recipes.rules.facts import Rule
from recipes.run import RunSpec

RULE_MODULES = (training, engine, data_and_model)
# The table first; then in the order of the modules, and in each as the rules are written.
RULES: list[Rule] = [
    *table.ROWS,
    *(item for module in RULE_MODULES for item in vars(module).values() if isinstance(item, Rule)),
    *(row for module in RULE_MODULES for row in getattr(module, "ROWS", ())),
]


def check(run: RunSpec) -> list[Problem]:
    """Everything wrong with the run, errors first, and no advice about a setting that is wrong."""
    found = list(run.problems)
    try:
        found += [problem for _, problem in problems_by_rule(run)]
    except UserError as error:  # a function in a user's own recipe raises
        found += error.problems
    wrong = {problem.subject for problem in found if problem.severity == "error"}
    found = [problem for problem in found if problem.severity == "error" or problem.subject not in wrong]
    return sorted(dict.fromkeys(found), key=lambda problem: problem.severity != "error")


def problems_by_rule(run: RunSpec) -> Iterator[tuple[str, Problem]]:
    """Each problem with the name of the rule that found it."""
    for rule in RULES:
        if not (rule.of_train_py and run.place.own_script):
            yield from ((rule.name, problem) for problem in rule(run))
    if run.outer_engine is None:
        return
    # The launch reads its YAML, though the recipe starts another engine under it.
    for name, problem in problems_by_rule(replace(run, engine=run.outer_engine)):
        if problem.source == run.outer_engine.source:
            yield name, problem


def new_problems(run: RunSpec, before: RunSpec) -> list[Problem]:
    """The problems of a run of which more is known now, without those that were found `before`."""
    known = check(before)
    return [problem for problem in check(run) if problem not in known]


def require_legal(run: RunSpec) -> list[Problem]:
    """The advice about a legal run. Raises `UserError` with every error otherwise."""
    found = check(run)
    errors = [problem for problem in found if problem.severity == "error"]
    if errors:
        raise UserError(*errors)
    return found
