"""The code that a job uploads: the package, and the files of the user's that the run names."""

from pathlib import Path

import pytest

from launch.cli import main
from launch.jobs.azure import CODE
from tests.support.running import ROOT

RECIPE = """\
base: fast
purpose: Ours.
engine: engines/ours.yaml
changes:
  learning_rate: [2.0e-5, "best of the three that we tried"]
"""
SUBMIT = "submit azureml --compute c --processes_per_node 2 --dry_run".split()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A user's folder, far from any checkout, with files of their own."""
    monkeypatch.chdir(tmp_path)
    Path("engines").mkdir()
    Path("engines/ours.yaml").write_text((ROOT / "accelerate_configs" / "fast.yaml").read_text())
    Path("ours.yaml").write_text(RECIPE)
    Path("settings.yaml").write_text("weight_decay: 0.1\n")
    return tmp_path


def test_files_of_ones_own_travel_under_their_own_paths(project, capsys):
    words = ["--recipe", "ours.yaml", "--accelerate_config", "engines/ours.yaml", "--output", "mine.yaml"]
    assert main([*SUBMIT, *words, "--", "--config", "settings.yaml"]) == 0
    for name in ("ours.yaml", "engines/ours.yaml", "settings.yaml"):
        assert (project / CODE / name).read_text() == (project / name).read_text()
    text = Path("mine.yaml").read_text()
    assert "--config_file engines/ours.yaml " in text and "--recipe ours.yaml" in text
    assert main(["check", "--azureml", "mine.yaml"]) == 0
    assert "legal: ours" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["{project}", ".."])
def test_a_file_that_the_job_would_not_find_is_refused(folder, project, monkeypatch, capsys):
    (project / "below").mkdir()
    monkeypatch.chdir(project / "below")
    assert main([*SUBMIT, "--recipe", f"{folder.format(project=project)}/ours.yaml"]) == 2
    assert "copy it here, and name it ours.yaml" in capsys.readouterr().err


def test_a_model_on_this_machine_is_refused(project, capsys):
    assert main([*SUBMIT, "--", "--model_name_or_path", str(project)]) == 2
    assert "is on this machine only" in capsys.readouterr().err


def test_two_jobs_share_their_code(project, capsys):
    for name in ("one.yaml", "two.yaml"):
        assert main([*SUBMIT, "--output", name]) == 0
    (project / CODE / "recipes" / "catalog.py").write_text("changed\n")
    assert main([*SUBMIT, "--output", "three.yaml"]) == 2
    assert "another folder" in capsys.readouterr().err
    assert not (project / "three.yaml").exists()


def test_a_job_without_its_code_is_refused(project, capsys):
    text = (ROOT / "azureml" / "fast.yaml").read_text()
    (project / "jobs" / "environment").mkdir(parents=True)
    (project / "jobs" / "environment" / "Dockerfile").write_text("FROM x\n")
    (project / "jobs" / "fast.yaml").write_text(text)
    assert main(["check", "--azureml", "jobs/fast.yaml"]) == 2
    assert "there is no launch/train.py in" in capsys.readouterr().err
