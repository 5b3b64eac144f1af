"""Data that a run.json names is found where the run found it, or from here."""

import pytest

from recipes.run import here, resolve
from tests.launch.output.test_recorded import CPU, recorded


@pytest.fixture
def started_elsewhere(tmp_path, monkeypatch):
    """A run.json whose relative data lay in the folder `then`, and the folder `now` to go on in."""
    for name in ("then", "now"):
        (tmp_path / name).mkdir()
    (tmp_path / "then" / "texts.txt").write_text("a text\n")
    monkeypatch.chdir(tmp_path / "then")
    file = recorded(tmp_path, resolve(["--dataset_name", "texts.txt"], here(hardware=CPU)))
    monkeypatch.chdir(tmp_path / "now")
    return file


def test_a_relative_path_counts_from_where_the_run_was_started(started_elsewhere, tmp_path):
    again = resolve(["--config", started_elsewhere], here(hardware=CPU))
    assert again["dataset_name"] == str(tmp_path / "then" / "texts.txt")


def test_moved_data_is_found_from_here(started_elsewhere, tmp_path):
    (tmp_path / "then" / "texts.txt").rename(tmp_path / "now" / "texts.txt")
    again = resolve(["--config", started_elsewhere], here(hardware=CPU))
    assert (again["dataset_name"], again.problems) == ("texts.txt", ())


def test_data_that_is_named_anew_is_not_looked_for(started_elsewhere):
    named = resolve(["--config", started_elsewhere, "--dataset_name", "other.txt"], here(hardware=CPU))
    assert named["dataset_name"] == "other.txt"


def test_the_parts_of_a_mixture_are_found_where_the_run_was_started(tmp_path, monkeypatch):
    (tmp_path / "then").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "then" / name).write_text("a text\n")
    parts = [{"name": "a.txt", "weight": 2}, {"name": "somebody/code", "weight": 1}, {"name": "*.txt", "weight": 1}]
    monkeypatch.chdir(tmp_path / "then")
    run = resolve([], here(hardware=CPU), settings={"dataset_name": parts}, settings_source="run.yaml")
    file = recorded(tmp_path, run)
    monkeypatch.chdir(tmp_path)
    names = [part["name"] for part in resolve(["--config", file], here(hardware=CPU))["dataset_name"]]
    assert names == [str(tmp_path / "then" / "a.txt"), "somebody/code", str(tmp_path / "then" / "*.txt")]
