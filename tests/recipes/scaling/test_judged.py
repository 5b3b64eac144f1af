"""How often a verdict is right, rightly undecided, or wrong where the judging is hard.

The confusion matrix is printed: `pytest -rP tests/recipes/scaling/test_judged.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from recipes.scaling.advice import advise
from recipes.scaling.verdicts import analyse
from tests.support import judged
from tests.support.simulated import IDEAL


def strong(rows):
    return next(series for series in analyse(rows) if series.scaling == "strong")


@pytest.fixture(scope="module")
def verdicts():
    """Each case with its verdict at the largest size and its outcome."""
    found = [(case, strong(case.rows).verdicts[-1]) for case in judged.cases(of_each=7)]
    return [(case, verdict, case.outcome(verdict)) for case, verdict in found]


def test_98_of_100_are_right_or_rightly_undecided_and_one_is_wrong(verdicts):
    print(_matrix(verdicts))
    for case, verdict, outcome in verdicts:
        if outcome in ("wrong", "timid"):
            print(f"{outcome}: {case.kind} {case.seed}, {case.noise:.0%} noise, {case.first}: {verdict.words}")
    outcomes = Counter(outcome for *_, outcome in verdicts)
    assert len(verdicts) >= 400
    assert outcomes["right"] + outcomes["undecided"] >= 0.98 * len(verdicts), outcomes
    assert outcomes["wrong"] <= 0.01 * len(verdicts), outcomes


def test_most_are_decided(verdicts):
    """To be undecided is no way out: where every part was measured it is rare."""
    outcomes = Counter(outcome for case, _, outcome in verdicts if case.kind in ("one cause", "two causes"))
    assert outcomes["right"] >= 0.9 * outcomes.total()


def _matrix(verdicts) -> str:
    named, outcomes = defaultdict(Counter), defaultdict(Counter)
    for case, verdict, outcome in verdicts:
        named[case.first][verdict.cause or ("undecided" if verdict.undecided else "healthy")] += 1
        outcomes[f"{case.kind}, {case.noise:.0%} noise"][outcome] += 1
    columns = [*IDEAL, "healthy", "undecided"]
    lines = [f"{len(verdicts)} trainings; rows: the largest cause, columns: the cause that is named", ""]
    lines += [f"{'':14}" + "".join(f"{column:>14}" for column in columns)]
    lines += [f"{row:14}" + "".join(f"{named[row][column] or '':>14}" for column in columns) for row in columns[:-1]]
    lines += ["", *(f"{kind:24}{dict(found)}" for kind, found in sorted(outcomes.items()))]
    return "\n".join(lines)


def test_nothing_is_advised_where_noise_hides_the_cause(verdicts):
    noisy = [case for case, verdict, _ in verdicts if verdict.undecided == "noise"]
    advised = {one.key for case in noisy for one in advise(strong(case.rows).sizes[-1], strong(case.rows))}
    assert noisy and advised <= {"fewer"}  # fewer processes are faster by more than the repeats differ
