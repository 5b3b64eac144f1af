"""The campaign draws the same again, excuses nothing in silence, and finds nothing in a part."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import pytest

from recipes.errors import Problem
from tests.campaigns.drawing import draw
from tests.campaigns.legality import Judgement, compare, shrink
from tests.campaigns.runs import FILES, Case, Change, Outcome, from_json
from tests.support.campaigns import campaign


def test_the_same_seed_draws_the_same_runs_of_every_sort():
    cases = [[draw(Random(f"seed-{number}")) for number in range(300)] for _ in range(2)]
    assert cases[0] == cases[1]
    assert [from_json(case.as_json()) for case in cases[0]] == cases[0]
    assert len({case.as_json() for case in cases[0]}) > 280
    assert {change.where for case in cases[0] for change in case.changes} == {"flag", "variable", *FILES}
    assert any(case.lifted for case in cases[0])


def test_a_case_shrinks_to_what_matters():
    needed = Change("flag", "bf16", ["true"])
    others = [Change("flag", name, ["1"]) for name in ("seed", "lora_r", "save_steps", "eval_steps", "max_steps")]
    case = Case("accelerate", 2, "memory.yaml", "gpt2", "texts.txt", changes=(*others[:2], needed, *others[2:]))
    assert shrink(case, lambda other: needed in other.changes) == Case(changes=(needed,))


CASE = Case(changes=(Change("flag", "do_train", ["false"]),))
PROVABLE, UNKNOWN, AT_ITS_WORD = "a_training_trains", "a_rule_without_a_proof", "sequences_fit_the_model"


def compared(rules: list[str], of: list[str] | None = None, without: float = 2.5):
    """A run that `rules` refuse and that trains, and one `without` the setting: with that loss."""

    def trained(loss: float) -> Outcome:
        return Outcome(0, "", [{"losses": [loss]}], {"status": "finished"})

    judgement = Judgement({rule: [Problem("do_train", "is off", "leave it out")] for rule in rules})
    return compare(judgement, trained(2.5), CASE, of or rules, lambda case, rule: trained(without))


def test_a_refusal_is_right_if_the_same_trains_without_the_setting():
    assert compared([PROVABLE]).proven and not compared([PROVABLE]).disagreement
    assert "a_training_trains" in compared([PROVABLE], without=2.4).disagreement


def test_a_refusal_that_nothing_proves_is_counted():
    assert compared([AT_ITS_WORD]).unproven and not compared([AT_ITS_WORD]).proven


def test_a_wrong_refusal_beside_an_explained_one_is_found_when_it_is_tried_on_its_own():
    assert compared([UNKNOWN]).disagreement
    assert not compared([PROVABLE, UNKNOWN]).disagreement
    assert UNKNOWN in compared([PROVABLE, UNKNOWN], of=[UNKNOWN]).disagreement


def test_a_legal_run_that_fails_is_a_disagreement():
    failed = Outcome(1, "Traceback (most recent call last):\nValueError: no")
    assert compare(Judgement(), failed, CASE, [], SimpleNamespace).disagreement


@pytest.mark.slow
def test_check_and_reality_agree():
    assert " 0 disagreements" in campaign("legality", "--runs", "25", "--seed", "slow tier")
