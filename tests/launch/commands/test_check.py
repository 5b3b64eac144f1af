"""`recipes check`: verdict, exit code and JSON. The rules have tests of their own."""

import json

from launch.cli import main
from recipes.catalog import RECIPES


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
