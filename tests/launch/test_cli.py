"""The `recipes` command: what it prints is what the catalogue holds, and what it writes reads back."""

import json
import subprocess
import sys

import pytest

from launch.cli import main
from recipes.catalog import RECIPES
from recipes.run import resolve


def test_list_names_every_recipe(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in RECIPES)


def test_show_gives_value_source_and_reason(capsys):
    main(["show", "fast", "--num_processes", "2", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["per_device_train_batch_size"] == {
        "value": 8,
        "source": "batch arithmetic",
        "reason": "micro-batch 8: largest divisor of 16/2 = 8 up to 8",
    }


@pytest.mark.parametrize("name", RECIPES)
def test_show_prints_every_chosen_setting(name, capsys):
    main(["show", name])
    printed = capsys.readouterr().out
    assert all(setting in printed for setting in RECIPES[name]().settings)


def test_diff_prints_only_what_differs(capsys):
    main(["show", "fast", "--diff", "standard", "--json"])
    difference = json.loads(capsys.readouterr().out)
    assert difference["logging_steps"] == {"fast": 10, "standard": 5}
    assert "ddp_bucket_cap_mb" not in difference


def test_show_says_that_a_batch_cannot_be_split(capsys):
    assert main(["show", "fast", "--num_processes", "3"]) == 2
    assert "15 or 18" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_a_copied_recipe_reads_back_as_the_same_run(name, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    assert main(["copy", name, str(file)]) == 0
    copied = resolve(["--config", str(file)], world_size=2)
    assert not copied.problems
    assert dict(copied) == dict(resolve(["--recipe", name, "--config", str(file)], world_size=2))
    assert copied.training_arguments() == resolve(["--recipe", name], world_size=2).training_arguments()


def test_copy_never_overwrites(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("precious")
    assert main(["copy", "fast", str(file)]) == 2
    assert file.read_text() == "precious"


def test_a_misspelt_recipe_gets_the_nearest_name(capsys):
    assert main(["show", "fsat"]) == 2
    assert "Fix: fast" in capsys.readouterr().err


def test_check_accepts_every_recipe(capsys):
    assert [main(["check", "--recipe", name]) for name in RECIPES] == [0] * len(RECIPES)


def test_check_reports_all_problems_at_once(capsys):
    assert main(["check", "--lerning_rate", "1", "--max_steps", "many", "--recipe", "fats"]) == 2
    printed = capsys.readouterr().err
    assert all(word in printed for word in ("learning_rate", "max_steps", "fats"))


def test_check_in_json_holds_the_verdict_and_the_settings(capsys):
    assert main(["check", "--recipe", "fast", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["legal"] is True and found["settings"]["logging_steps"]["value"] == 10


def test_check_in_json_stays_json_for_a_mistake(capsys):
    assert main(["check", "--config", "missing.yaml", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["legal"] is False


def test_deep_check_builds_the_real_arguments(capsys):
    assert main(["check", "--recipe", "fast", "--deep"]) == 0


@pytest.mark.parametrize("words", [["list"], ["show", "fast"], ["check", "--recipe", "memory"], ["--help"]])
def test_the_command_imports_no_heavy_library(words):
    code = (
        "import sys\nfrom launch.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'accelerate', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
