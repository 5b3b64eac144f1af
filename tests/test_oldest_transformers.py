"""The oldest supported transformers: recipes build, files are legal, trainings are the same."""

import os

import pytest

from tests.support.running import ROOT, python

WORLDS = "test_a_run_of_4_processes_resumed_by_2_then_1_then_3_trains_as_if_never_stopped"
TESTS = (
    "recipes/legal",
    "recipes/rules/test_check.py",
    "recipes/test_catalog.py",
    "recipes/run/test_resolve.py",
    "recipes/run/test_command_line.py",
    "recipes/run/test_spec.py",
    "recipes/test_factories.py",
    "launch/training/test_equals_handwritten_loop.py::test_a_recipe_has_the_losses_of_a_handwritten_loop[standard-4-4-False]",
    "launch/scaling/test_scale.py::test_the_flag_measure_does_not_change_the_losses_or_weights_of_a_training",
    "launch/training/test_sharded.py",
    f"launch/training/test_other_world.py::{WORLDS}[zero3]",
    f"launch/training/test_other_world.py::{WORLDS}[fsdp2]",
)


@pytest.mark.slow
def test_selected_tests_pass_with_the_oldest_supported_transformers(tmp_path):
    words = ["install", "--quiet", "--no-deps", "--target", str(tmp_path), "-r", str(ROOT / "tests" / "oldest.txt")]
    installed = python("-m", "pip", *words)
    if installed.returncode and not os.environ.get("CI"):
        pytest.skip("the oldest transformers cannot be installed here")
    assert installed.returncode == 0, installed.stderr
    version = "import transformers; print(f'transformers=={transformers.__version__}')"
    found = python("-c", version, PYTHONPATH=tmp_path).stdout.strip()
    assert found and found in (ROOT / "tests" / "oldest.txt").read_text()
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    done = python(*words, *(f"tests/{name}" for name in TESTS), PYTHONPATH=tmp_path)
    # Indented, so that nobody takes its last line for the outer run's.
    assert done.returncode == 0, "\n".join(f"  {line}" for line in done.stdout.splitlines()[-60:])
