"""run.json keeps every start of a run: compare adds their times up, an exact rerun knows them."""

import json

import pytest

from launch.cli import main
from launch.commands.compare import results
from launch.output import record
from tests.support.running import train_here


@pytest.fixture(scope="module")
def resumed(tiny_model, texts, tmp_path_factory):
    """A run of three steps, and then of two more."""
    output = tmp_path_factory.mktemp("resumed")
    assert train_here(tiny_model, texts, output, "--max_steps", "3").code == 0
    assert train_here(tiny_model, texts, output, "--max_steps", "5").code == 0
    return output


def test_run_json_records_the_steps_processes_and_time_of_each_start(resumed):
    first, second = record.read(resumed)["sessions"]
    assert (first["from_step"], second["from_step"]) == (0, 3)
    assert first["status"] == second["status"] == "finished" and min(first["seconds"], second["seconds"]) > 0
    assert first["world_size"] == 1 and first["versions"] == second["versions"] == record.read(resumed)["versions"]


def test_compare_sums_the_train_runtime_of_all_starts_and_omits_it_if_one_is_missing(resumed):
    whole = record.read(resumed)
    earlier = whole["sessions"][0]["seconds"]
    assert results([whole])["train_runtime"] == [whole["train_runtime"] + earlier]
    del whole["sessions"][0]["seconds"]
    assert "train_runtime" not in results([whole])


def test_rerun_exact_refuses_a_run_that_was_resumed_with_other_process_counts(resumed, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = record.read(resumed)
    whole["sessions"][0]["world_size"] = 2
    (tmp_path / "run.json").write_text(json.dumps(whole))
    assert main(["rerun", "run.json", "--dry_run"]) == 0
    resumed = "a resume changed the recorded run (processes: 2, then 1; max_steps)"
    assert resumed in " ".join(capsys.readouterr().err.split())
    assert main(["rerun", "run.json", "--dry_run", "--exact"]) == 2
    assert "leave out --exact" in capsys.readouterr().err
