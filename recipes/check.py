"""`check(run)`: every problem of a run, before anything starts."""

from __future__ import annotations

from recipes.errors import Problem, UserError
from recipes.rules import RULES
from recipes.run import RunSpec


def check(run: RunSpec) -> list[Problem]:
    """Everything wrong with the run, errors first."""
    found = [*run.problems, *(problem for rule in RULES for problem in rule(run))]
    return sorted(dict.fromkeys(found), key=lambda problem: problem.severity != "error")


def require_legal(run: RunSpec) -> list[Problem]:
    """The advice about a legal run. Raises `UserError` with every error otherwise."""
    found = check(run)
    errors = [problem for problem in found if problem.severity == "error"]
    if errors:
        raise UserError(*errors)
    return found
