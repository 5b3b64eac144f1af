"""ruff and mypy, with the settings in pyproject.toml."""

import pytest

from tests.support.running import python


@pytest.mark.parametrize("words", ["ruff check .", "ruff format --check .", "mypy"])
def test_ruff_and_mypy_find_no_problem(words):
    done = python("-m", *words.split())
    assert done.returncode == 0, done.stdout + done.stderr
