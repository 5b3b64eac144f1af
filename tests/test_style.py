"""ruff and mypy, with the settings in pyproject.toml."""

import subprocess
import sys

import pytest

from tests.support.running import ROOT


@pytest.mark.parametrize("words", ["ruff check .", "ruff format --check .", "mypy"])
def test_ruff_and_mypy_find_no_problem(words):
    done = subprocess.run([sys.executable, "-m", *words.split()], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
