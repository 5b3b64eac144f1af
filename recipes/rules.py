"""What cannot work together, one small named rule each, with the failure it prevents in its docstring.

A rule takes a `RunSpec` and yields `Problem`s. An error stops the run, an advice does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from recipes.errors import Problem

if TYPE_CHECKING:
    from recipes.run import RunSpec

Rule = Callable[["RunSpec"], Iterator[Problem]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def problem(run: RunSpec, subject: str, what: str, fix: str = "") -> Problem:
    """An error about the setting `subject`, with where its value came from."""
    return Problem(subject, what, fix, run.setting(subject).source)


def advice(run: RunSpec, subject: str, what: str, fix: str = "") -> Problem:
    return Problem(subject, what, fix, run.setting(subject).source, severity="advice")


# --- Distributed data parallel ---------------------------------------------------------------------------------------


@rule
def static_graph_needs_accumulation_one(run):
    """DDP's static graph expects one backward per step; with accumulation it aborts in the reducer."""
    if run["ddp_static_graph"] and run["gradient_accumulation_steps"] > 1 and run.world_size > 1:
        yield problem(
            run,
            "ddp_static_graph",
            f"cannot be combined with gradient_accumulation_steps {run['gradient_accumulation_steps']}",
            "leave it out, or raise per_device_train_batch_size until accumulation is 1",
        )
