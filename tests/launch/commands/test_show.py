"""`recipes list`, `show` and `copy`: they print what the catalogue holds, and a copy reads back."""

import json

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


def test_show_reports_a_batch_that_cannot_be_split(capsys):
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
