"""Drawn blows: the same seed draws the same, and a fixed part of them leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from tests.campaigns.orphans.draw import LAUNCHERS, SIGNALS, draw, from_json
from tests.support.running import ROOT


def test_the_same_seed_draws_the_same_blows():
    blows = [[draw(Random(f"seed-{number}")) for number in range(200)] for _ in range(2)]
    assert blows[0] == blows[1]
    assert [from_json(blow.as_json()) for blow in blows[0]] == blows[0]
    drawn = {(blow.launcher, blow.signal, blow.rank is None) for blow in blows[0]}
    assert len(drawn) == 2 * len(LAUNCHERS) * len(SIGNALS)


@pytest.mark.slow
def test_nothing_is_left_of_a_run_and_the_same_command_finishes_it():
    words = [sys.executable, "-m", "tests.campaigns.orphans", "--seed", "slow tier", "--count", "5"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and " 0 findings" in done.stdout, done.stdout + done.stderr
