"""A target is a class in a table: submitting, status and logs know nothing else of it."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from launch.cli import main
from launch.jobs import submit
from launch.jobs.job import Node, Target
from launch.jobs.slurm import Slurm
from launch.output.submission import Submission, announce, note
from recipes.flags import flag
from recipes.run.hardware import Hardware


@dataclass(frozen=True)
class Moon(Target):
    """A fourth target: it keeps what was sent in `sent`, and its jobs are in `now`."""

    HELP = "the moon"
    sent: ClassVar[list[str]] = []
    now: ClassVar[str] = "LANDED"

    crater: str = flag("tycho", "where to land [tycho]")

    def node(self, processes):
        return Node(Hardware(cores=2), processes or 1)

    def render(self, job):
        return f"land in {self.crater}: {job.title}\n"

    def send(self, text, job):
        self.sent.append(text)
        announce(job.folder, Submission("moon", job.title, "moon.log", "7"), {"crater": self.crater}, "recall 7")
        return 0

    @classmethod
    def state(cls, submission):
        return cls.now

    @classmethod
    def is_over(cls, state):
        return state == "GONE"


@pytest.fixture
def moon(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Moon, "sent", [])
    monkeypatch.setitem(submit.TARGETS, "moon", Moon)
    return Moon


def test_a_new_target_is_submitted_to_with_its_own_flags(moon, capsys):
    assert main(["submit", "moon", "--dry_run"]) == 0
    assert capsys.readouterr().out.startswith("land in tycho") and not moon.sent
    assert main(["submit", "moon", "--crater", "copernicus", "--", "--max_steps", "2"]) == 0
    assert moon.sent[0].startswith("land in copernicus: standard")
    assert "recall 7" in capsys.readouterr().out


def test_status_and_logs_ask_it(moon, tmp_path, capsys):
    main(["submit", "moon"])
    (tmp_path / "moon.log").write_text("one small step\n")
    assert main(["status"]) == 0 and main(["logs"]) == 0
    printed = capsys.readouterr().out
    assert "moon 7" in printed and "LANDED" in printed and printed.endswith("one small step\n")


def test_its_running_job_keeps_the_folder(moon, monkeypatch, capsys):
    main(["submit", "moon"])
    assert main(["submit", "local"]) == 2
    assert "job 7 is still running and writes to outputs/standard" in capsys.readouterr().err
    monkeypatch.setattr(moon, "now", "GONE")
    assert main(["submit", "moon"]) == 0


def test_a_note_of_an_unknown_target_is_ignored(tmp_path):
    note(tmp_path, Submission("mars", "a title", "x"))
    assert submit.submitted(tmp_path) is None


def test_fresh_in_a_file_is_refused_where_a_job_is_restarted(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Slurm, "send", lambda *anything: pytest.fail("it was sent"))
    (tmp_path / "mine.yaml").write_text("fresh: true\n")
    assert main(["submit", "slurm", "--", "--config", str(tmp_path / "mine.yaml")]) == 2
    assert "another --output_dir" in capsys.readouterr().err
