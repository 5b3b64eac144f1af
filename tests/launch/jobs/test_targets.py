"""A target is a module in a table: submitting, status and logs know nothing else of it."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from launch.cli import main
from launch.jobs import slurm, targets
from launch.jobs.job import Node
from launch.output.submission import Submission, announce, note
from recipes.flags import flag
from recipes.run.hardware import Hardware


@dataclass(frozen=True)
class Moon:
    crater: str = flag("tycho", "where to land [tycho]")


@pytest.fixture
def moon(monkeypatch, tmp_path):
    """A fourth target: it keeps what was sent in `sent`, and its jobs are in `now`."""
    monkeypatch.chdir(tmp_path)
    module = SimpleNamespace(HELP="the moon", WRITES_HERE=True, FOLDER=None, FLAGS=Moon, sent=[], now="LANDED")

    def submit(text, job, flags):
        module.sent.append(text)
        announce(job.folder, Submission("moon", job.title, "moon://log", "7"), {"crater": flags.crater}, "recall 7")
        return 0

    module.node = lambda flags, processes: Node(Hardware(cores=2), processes or 1)
    module.render = lambda job, flags: f"land in {flags.crater}: {job.title}\n"
    module.check = lambda text, job, flags: None
    module.submit = submit
    module.state = lambda submission: module.now
    module.is_over = lambda state: state == "GONE"
    module.print_log = lambda submission, folder, following: print("one small step")
    module.last_line = lambda submission: "one small step"
    monkeypatch.setitem(targets.TARGETS, "moon", module)
    return module


def test_a_new_target_is_submitted_to_with_its_own_flags(moon, capsys):
    assert main(["submit", "moon", "--crater", "copernicus", "--", "--max_steps", "2"]) == 0
    assert moon.sent[0].startswith("land in copernicus: standard")
    assert "recall 7" in capsys.readouterr().out


def test_a_dry_run_prints_its_text_and_sends_nothing(moon, capsys):
    assert main(["submit", "moon", "--dry_run"]) == 0
    assert capsys.readouterr().out.startswith("land in tycho") and not moon.sent


def test_status_and_logs_ask_it(moon, capsys):
    main(["submit", "moon"])
    assert main(["status"]) == 0 and main(["logs"]) == 0
    printed = capsys.readouterr().out
    assert "moon 7" in printed and "LANDED" in printed and printed.endswith("one small step\n")


def test_its_running_job_keeps_the_folder(moon, capsys):
    main(["submit", "moon"])
    assert main(["submit", "local"]) == 2
    assert "job 7 is still running and writes to outputs/standard" in capsys.readouterr().err
    moon.now = "GONE"
    assert main(["submit", "moon"]) == 0


def test_a_note_of_an_unknown_target_is_ignored(tmp_path):
    submission = Submission("mars", "a title", "x")
    note(tmp_path, submission)
    assert targets.submitted(tmp_path) is None
    note(tmp_path, replace(submission, target="local"))
    assert targets.submitted(tmp_path) is not None


def test_a_note_without_its_workspace_says_so(tmp_path, capsys):
    note(tmp_path, Submission("azureml", "a title", "https://studio/7", "7"))
    assert main(["status", str(tmp_path)]) == 0
    assert "does not name the workspace" in " ".join(capsys.readouterr().out.split())


def test_fresh_in_a_file_is_refused_where_a_job_is_restarted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(slurm, "submit", lambda *anything: pytest.fail("it was sent"))
    (tmp_path / "mine.yaml").write_text("fresh: true\n")
    assert main(["submit", "slurm", "--", "--config", str(tmp_path / "mine.yaml")]) == 2
    assert "another --output_dir" in capsys.readouterr().err
