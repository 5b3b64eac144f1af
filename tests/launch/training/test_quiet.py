"""A terminal shows our lines alone, and no library's remark on what it did not find or built."""

import os
import re
import subprocess
import sys

import pytest

from recipes.catalog import RECIPES
from tests.launch.training.test_every_recipe import NEEDS_COMPILER
from tests.support.running import ROOT, SCRIPT, model_flags

FIRST = "recipe model data engine batch precision output changed advice step steps loss speed peak written".split()
OURS = re.compile(rf"|  .*|({'|'.join(FIRST)}) .*")


def foreign_lines(*argv):
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    argv = [sys.executable, *map(str, argv)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if not OURS.fullmatch(line)]
    return [re.sub(r"^\[[\d ,:-]*\]", "", line) for line in lines]  # without the time of day


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS_COMPILER * name.startswith("memory")) for name in RECIPES]
)
def test_a_recipe_prints_only_our_lines(name, tiny_model, texts, tmp_path):
    flags = [*model_flags(tiny_model, texts), "--recipe", name, "--max_steps", "1", "--output_dir", tmp_path]
    config = ROOT / "accelerate_configs" / RECIPES[name]().engine
    start = ["-m", "accelerate.commands.launch", "--config_file", config, "--main_process_port", "0"]
    before = foreign_lines(*start, ROOT / "tests" / "__init__.py")  # what the launcher itself prints
    assert foreign_lines(*start, SCRIPT, *flags) == before


def test_a_recipe_in_a_script_of_ones_own_prints_nothing(tmp_path):
    assert foreign_lines("-c", f"from recipes import fast; fast(output_dir={str(tmp_path)!r})") == []
