"""README is true: CI runs its two commands, its quick commands work, and its files exist."""

import importlib.util
import re
import shlex

import pytest

from recipes.catalog import RECIPES
from tests.support.running import ROOT

README = (ROOT / "README.md").read_text()
MEASURED = (ROOT / "tests" / "benchmarks" / "README.md").read_text()
BLOCKS = re.findall(r"```\w*\n(.*?)```", README, flags=re.S)


def test_the_first_block_has_exactly_two_commands():
    assert len(BLOCKS[0].strip().splitlines()) == 2


@pytest.mark.parametrize(
    "file", sorted(set(re.findall(r"\b(?:accelerate_configs|launch|recipes|tests)/[\w/.]+\.\w+", README + MEASURED)))
)
def test_every_file_it_names_exists(file):
    assert (ROOT / file).exists()


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python3? -m (tests[\w.]*)", README + MEASURED))))
def test_every_module_it_starts_can_be_started(module):
    spec = importlib.util.find_spec(module)
    assert spec is not None and (not spec.submodule_search_locations or importlib.util.find_spec(f"{module}.__main__"))


QUICK = re.findall(r"^recipes (check .*|show .*|list|plan .*|submit .*--dry_run.*)$", README, flags=re.M)


@pytest.mark.parametrize("words", sorted(set(QUICK)))
def test_every_quick_command_in_it_works(words, capsys):
    from launch.cli import main

    assert main(shlex.split(words)) == 0


def test_it_names_every_recipe():
    assert all(f"`{name}`" in README for name in RECIPES)
