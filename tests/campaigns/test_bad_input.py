"""The campaign of bad input draws the same again, judges an answer, and finds nothing in a part."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest

from tests.campaigns.bad_input import mutate
from tests.campaigns.bad_input.attempt import TAKEN, Answer
from tests.campaigns.bad_input.case import Case
from tests.campaigns.bad_input.draw import SEEDS
from tests.campaigns.bad_input.judge import finding
from tests.support.running import ROOT

CASE = Case("flags", ["check"])
ANSWERS = {
    "a traceback": (
        Answer(1, "Traceback (most recent call last):\nValueError: 3", 0.1), "traceback: outside: ValueError: 0"
    ),
    "a crash": (Answer(-11, "", 0.1), "dies of signal 11"),
    "a hang": (Answer(None, "", 10.0), "hangs: more than 10 s"),
    "a failure": (Answer(1, "sorry", 0.1), "exit code 1: sorry"),
    "an error without a fix": (Answer(2, "error  seed: is odd.", 0.1), "no fix: error  seed: is odd."),
    "silence": (Answer(2, "", 0.1), "no fix: "),
    "an error with a fix": (Answer(2, "error  seed: is odd. Fix: 2.\n1 error: this run would not start.", 0.1), None),
    "a parser's error": (Answer(2, "usage: recipes x\nrecipes x: error: argument --n: '0' is not a count", 0.1), None),
    "a training": (Answer(TAKEN, "", 0.1), None),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_judged_by_what_a_person_can_do_with_it(name):
    answer, expected = ANSWERS[name]
    assert finding(CASE, answer) == expected


@pytest.mark.parametrize(
    "mutator", [mutate.json_file, mutate.json_lines, mutate.yaml_file, mutate.csv_file, mutate.any_bytes]
)
def test_the_same_seed_makes_the_same_file(mutator):
    valid = b'{"a": 1, "b": "c"}\n'
    changed = [[mutator(Random(f"seed-{number}"), valid) for number in range(50)] for _ in range(2)]
    assert changed[0] == changed[1] and len(set(changed[0])) > 10


def test_every_command_is_among_the_seeds():
    from launch.cli import COMMANDS

    assert {seed.argv[0] for seed in SEEDS} == {*COMMANDS, "train.py"}


@pytest.mark.slow
def test_bad_input_is_answered_usably():
    command = [sys.executable, "-m", "tests.campaigns.bad_input", "--seed", "slow tier", "--count", "400"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " 0 findings" in done.stdout
