"""Every recipe's demonstration under its own YAML, as in README, with one process and two. It
prints our lines alone (the first DeepSpeed run of an environment says that it compiles), and no
library's remark on what it did not find or built.
"""

import re
import shutil

import pytest

from recipes.catalog import RECIPES
from tests.support.running import launch_quickly, python

FIRST = "importing compiling reading loading recipe model data engine batch schedule precision output".split()
FIRST += "changed advice step steps loss speed peak written next".split()
# And torch's remark on find_unused_parameters, which baseline asks for as Trainer does.
OURS = re.compile(rf"|  .*|({'|'.join(FIRST)}) .*|\[rank\d\].*find_unused_parameters=True.*")
NEEDS_COMPILER = [pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its CPU Adam: needs g++")]
DEMONSTRATIONS = [
    pytest.param("baseline", 1),
    *(
        pytest.param(recipe, processes, marks=NEEDS_COMPILER * recipe.startswith("memory") + marks)
        for recipe in sorted({*RECIPES} - {"baseline"})
        for processes, marks in ((1, [pytest.mark.slow]), (2, []))
    ),
]


@pytest.mark.parametrize(("recipe", "processes"), DEMONSTRATIONS)
def test_the_demonstration_of_every_recipe_finishes_and_prints_only_our_lines(recipe, processes, tmp_path):
    flags = ["--recipe", recipe, "--max_steps", "2"]
    outcome = launch_quickly(*flags, output=tmp_path, processes=processes, config=RECIPES[recipe]().engine)
    assert outcome.code == 0, outcome.output
    assert (outcome.record["status"], outcome.record["world_size"]) == ("finished", processes)
    assert not [line for line in outcome.output.splitlines() if not OURS.fullmatch(line)], outcome.output


def test_calling_a_recipe_function_in_a_users_script_prints_nothing(tmp_path):
    script = f"from recipes import fast; fast(output_dir={str(tmp_path)!r})"
    done = python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
