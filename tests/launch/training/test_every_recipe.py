"""Every recipe's demonstration under its own YAML, as in README, with one process and two. It
prints our lines alone (the first DeepSpeed run of an environment says that it compiles), and no
library's remark on what it did not find or built.
"""

import re
import shutil
import subprocess
import sys

import pytest

from tests.support.running import launch, launch_quickly

FIRST = "importing compiling reading loading recipe model data engine batch precision output changed advice".split()
FIRST += "step steps loss speed peak written".split()
# And torch's remark on find_unused_parameters, which baseline asks for as Trainer does.
OURS = re.compile(rf"|  .*|({'|'.join(FIRST)}) .*|\[rank\d\].*find_unused_parameters=True.*")
NEEDS_COMPILER = [pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its CPU Adam: needs g++")]
YAMLS = {
    "baseline": "single.yaml",
    "standard": "standard.yaml",
    "fast": "fast.yaml",
    "sharded": "sharded.yaml",
    "memory": "memory.yaml",
    "memory_zero3": "memory_zero3.yaml",
}
DEMONSTRATIONS = [
    pytest.param("baseline", 1),
    *(
        pytest.param(recipe, processes, marks=NEEDS_COMPILER * recipe.startswith("memory") + marks)
        for recipe in list(YAMLS)[1:]
        for processes, marks in ((1, [pytest.mark.slow]), (2, []))
    ),
]
TWO_STEPS = ("--max_steps", "2")


def assert_finished(outcome, processes):
    """Exit code 0, a finished record, and our lines alone."""
    assert outcome.code == 0, outcome.output
    assert (outcome.record["status"], outcome.record["world_size"]) == ("finished", processes)
    assert not [line for line in outcome.output.splitlines() if not OURS.fullmatch(line)], outcome.output


@pytest.mark.parametrize(("recipe", "processes"), DEMONSTRATIONS)
def test_a_demonstration_finishes(recipe, processes, tmp_path):
    flags = ["--recipe", recipe, *TWO_STEPS]
    outcome = launch_quickly(*flags, output=tmp_path, processes=processes, config=YAMLS[recipe])
    assert_finished(outcome, processes)


@pytest.mark.slow
def test_accelerate_starts_one_process_for_the_baseline_whatever_number_is_asked_for(tmp_path):
    outcome = launch("--recipe", "baseline", *TWO_STEPS, output=tmp_path, processes=2, config="single.yaml")
    assert_finished(outcome, 1)


def test_a_recipe_in_a_script_of_ones_own_prints_nothing(tmp_path):
    script = f"from recipes import fast; fast(output_dir={str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
