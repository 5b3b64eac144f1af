"""A recipe of a user's own goes wherever a shipped one goes: every command, a job, a training."""

import pytest

from launch.cli import main
from tests.support.running import train_here

MINE = "base: standard\npurpose: For our tickets.\nchanges:\n  logging_steps: [3, we watch it closely]\n"


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("mine.yaml").write_text(MINE)


def test_show_prints_values_reasons_and_inherited_values_of_a_users_recipe(capsys):
    assert main(["show", "mine.yaml"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith("mine: For our tickets.")
    assert "logging_steps 3 recipe mine.yaml we watch it closely" in printed
    assert "save_total_limit 2 recipe standard " in printed


def test_plan_recommends_a_users_recipe_with_a_command_that_names_the_file(capsys):
    assert main(["plan", "--model", "100M", "--gpu", "T4", "--recipe", "mine.yaml", "--max_length", "128"]) == 0
    (command,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  recipes train "))
    program, action, *flags = command.split()
    assert (program, action) == ("recipes", "train") and "--recipe mine.yaml" in " ".join(flags)
    assert main(["check", *flags]) == 0


def test_run_json_records_a_users_recipe_and_its_file(tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path / "out", "--recipe", "mine.yaml", "--max_steps", "1")
    assert outcome.code == 0, outcome.output
    assert (outcome.record["recipe"], outcome.record["paths"]["recipe"]) == ("mine", str(tmp_path / "mine.yaml"))
    assert outcome.record["settings"]["logging_steps"]["source"] == "recipe mine.yaml"
