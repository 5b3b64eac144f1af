"""`recipes list`, `show` and `copy`: they print what the catalogue holds, and a copy reads back."""

import json

import pytest

from launch.cli import main
from launch.output.record import FIELDS
from recipes.catalog import RECIPES
from recipes.run import here, resolve
from tests.support.running import train_here


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


def test_show_reports_a_batch_that_cannot_be_split(capsys):
    assert main(["show", "fast", "--num_processes", "3"]) == 2
    assert "15 or 18" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_a_copied_recipe_reads_back_as_the_same_run(name, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    assert main(["copy", name, str(file)]) == 0
    copied = resolve(["--config", str(file)], here(2))
    assert not copied.problems
    assert dict(copied) == dict(resolve(["--recipe", name, "--config", str(file)], here(2)))
    assert copied.training_arguments() == resolve(["--recipe", name], here(2)).training_arguments()


def test_copy_never_overwrites(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("precious")
    assert main(["copy", "fast", str(file)]) == 2
    assert file.read_text() == "precious"


# --- A run, and what differs ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tiny_model, texts, tmp_path_factory):
    """The folders of two runs: `fast` with its seed, and `standard` with another one."""
    folder = tmp_path_factory.mktemp("runs")
    train_here(tiny_model, texts, folder / "one", "--recipe", "fast", "--max_steps", "2")
    train_here(tiny_model, texts, folder / "other", "--max_steps", "2", "--seed", "7")
    return folder


def test_a_run_is_shown_with_its_status_results_and_settings(runs, capsys):
    for name in ("one", "one/run.json"):
        assert main(["show", str(runs / name)]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("fast, finished\n") and "final_loss" in printed
        assert "command line" in next(line for line in printed.splitlines() if line.startswith("max_steps"))


def test_a_run_as_json_is_its_record(runs, capsys):
    main(["show", str(runs / "one"), "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads((runs / "one" / "run.json").read_text())


def test_a_failed_run_says_why(runs, tmp_path, capsys):
    content = json.loads((runs / "one" / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**content, "status": "failed", "error": "ValueError: no"}))
    main(["show", str(tmp_path)])
    assert capsys.readouterr().out.startswith("fast, failed: ValueError: no\n")


def test_the_help_explains_every_field_of_a_run(capsys):
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in FIELDS)


@pytest.mark.parametrize(("name", "words"), [("outputs/none", "cannot be read"), ("nothing", "there is no recipe")])
def test_a_name_that_is_neither_is_a_mistake(name, words, capsys):
    assert main(["show", name]) == 2
    assert words in capsys.readouterr().err


def test_two_runs_differ_in_settings_and_surroundings(runs, tmp_path, capsys):
    content = json.loads((runs / "other" / "run.json").read_text())
    versions = {**content["versions"], "torch": "1.0"}
    (tmp_path / "run.json").write_text(json.dumps({**content, "versions": versions, "world_size": 2}))
    assert main(["diff", str(runs / "one"), str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    here = json.loads((runs / "one" / "run.json").read_text())["versions"]["torch"]
    assert found["seed"] == {"one": 42, tmp_path.name: 7}
    assert found["torch"] == {"one": here, tmp_path.name: "1.0"}
    assert found["world_size"] == {"one": 1, tmp_path.name: 2}
    assert "max_steps" not in found and "output_dir" not in found


def test_a_run_differs_from_its_recipe_in_what_its_user_wrote(runs, capsys):
    main(["diff", str(runs / "other"), "standard", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"seed", "max_steps", "max_length", "model_name_or_path", "dataset_name"}


def test_diff_of_two_recipes_is_the_diff_of_show(capsys):
    main(["diff", "fast", "standard"])
    of_diff = capsys.readouterr().out
    main(["show", "fast", "--diff", "standard"])
    assert of_diff == capsys.readouterr().out
