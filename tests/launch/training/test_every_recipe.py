"""Every recipe's demonstration under its own YAML, as in README, with one process and two."""

import shutil

import pytest

from tests.support.running import launch, launch_quickly

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
    """Exit code 0, a finished record, a sample, and no sign of a failure."""
    assert outcome.code == 0, outcome.output
    assert (outcome.record["status"], outcome.record["world_size"]) == ("finished", processes)
    assert "Traceback" not in outcome.output and "note  " not in outcome.output, outcome.output
    sample = outcome.output.partition("a sample from the trained model")[2]
    assert sample.strip().startswith("def "), outcome.output


@pytest.mark.parametrize(("recipe", "processes"), DEMONSTRATIONS)
def test_a_demonstration_finishes_and_shows_a_sample(recipe, processes, tmp_path):
    flags = ["--recipe", recipe, *TWO_STEPS]
    outcome = launch_quickly(*flags, output=tmp_path, processes=processes, config=YAMLS[recipe])
    assert_finished(outcome, processes)


@pytest.mark.slow
def test_accelerate_starts_one_process_for_the_baseline_whatever_number_is_asked_for(tmp_path):
    outcome = launch("--recipe", "baseline", *TWO_STEPS, output=tmp_path, processes=2, config="single.yaml")
    assert_finished(outcome, 1)
