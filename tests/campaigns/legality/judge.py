"""What `recipes check` says of a case: rules, in milliseconds, and for --deep the probe."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from unittest import mock

from recipes.errors import Problem, UserError
from recipes.rules.check import problems_by_rule
from recipes.rules.probe import probe_in_child
from recipes.run import RunSpec, here, resolve, with_fit
from recipes.run.hardware import Hardware, read
from tests.campaigns.legality.case import YAML, Case, flags, variables

PARSING = "what is written"  # the errors that no rule reports: unknown names, wrong types, the batch
PROBE = "the probe"  # the errors of the libraries


@dataclass
class Judgement:
    """`errors` by the name of the rule that reports them; none if the run is legal.

    `batch` is the global batch that check prints, `world` the number of processes. `advised` are
    the rules that only advise.
    """

    errors: dict[str, list[Problem]] = field(default_factory=dict)
    world: int = 1
    batch: int = 0
    run: RunSpec | None = None
    advised: frozenset[str] = frozenset()

    @property
    def legal(self) -> bool:
        return not self.errors


def judge(case: Case) -> Judgement:
    """As `recipes check` does, in the current folder, which must be the case's own.

    torchrun and plain python are another launch than it expects: there train.py's own check counts.
    """
    announced = {"RANK": "0", "WORLD_SIZE": str(case.processes)} if case.launcher == "torchrun" else {}
    try:
        run = resolve(
            flags(case),
            here(
                case.processes,
                accelerate_config=YAML if case.yaml else None,
                hardware=_hardware(case),
                launched=case.launcher != "accelerate",
                environment={**os.environ, **variables(case), **announced},
            ),
        )
        return _of(with_fit(run))
    except UserError as error:
        return Judgement({PARSING: list(error.problems)})


def judge_deep(case: Case) -> Judgement:
    """As `recipes check --deep`: the probe judges what no rule refuses, in a child of this process,
    which has imported the libraries, and with the variables of the case.
    """
    judgement = judge(case)
    if judgement.run and judgement.legal:
        with mock.patch.dict(os.environ, variables(case)):
            problems = probe_in_child(judgement.run)
        judgement.errors |= {PROBE: problems} if problems else {}
    return judgement


class _Lifted(Hardware):
    can_shard = True  # type: ignore[assignment]


def _hardware(case: Case) -> Hardware:
    return _Lifted(**vars(read())) if case.lifted else read()


def _of(run: RunSpec) -> Judgement:
    found = [(PARSING, problem) for problem in run.problems]
    found += problems_by_rule(run)
    errors: dict[str, list[Problem]] = {}
    for name, problem in found:
        if problem.severity == "error":
            errors.setdefault(name, []).append(problem)
    advised = frozenset(name for name, problem in found if problem.severity != "error")
    return Judgement(errors, run.world_size, run.batch.total, run, advised)
