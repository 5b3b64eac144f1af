"""The oracle finds what it should find, and nothing in a fixed part of its runs."""

from __future__ import annotations

from random import Random

import pytest

from tests.campaigns.legality.campaign import DRAWS
from tests.campaigns.legality.case import Case, Change, from_json
from tests.campaigns.legality.shrink import shrink
from tests.support.campaigns import campaign


@pytest.mark.parametrize("kind", DRAWS.values(), ids=DRAWS)
def test_the_same_seed_draws_the_same_runs(kind):
    cases = [[kind(Random(f"seed-{number}")) for number in range(50)] for _ in range(2)]
    assert cases[0] == cases[1]
    assert [from_json(case.as_json()) for case in cases[0]] == cases[0]
    assert len({case.as_json() for case in cases[0]}) > 40


def test_a_case_shrinks_to_what_matters():
    needed = Change("flag", "bf16", ["true"])
    others = [Change("flag", name, ["1"]) for name in ("seed", "lora_r", "save_steps", "eval_steps", "max_steps")]
    case = Case("accelerate", 2, "memory.yaml", "gpt2", "texts.txt", changes=(*others[:2], needed, *others[2:]))
    assert shrink(case, lambda other: needed in other.changes) == Case(changes=(needed,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "runs"), [("plain", 80), ("sharded", 15), ("parallel", 15), ("own", 20), ("cards", 60)]
)
def test_check_and_reality_agree(kind, runs):
    assert "0 disagreements" in campaign("legality", "--runs", str(runs), "--seed", "slow tier", "--kind", kind)
