"""`recipes status` and `recipes logs` of local runs; other targets have files of their own."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main
from launch.jobs.job import last_line
from launch.output import record, submission
from launch.output.submission import Submission
from tests.support.running import model_flags, read_record
from tests.support.waiting import wait_for


def status(folder, capsys) -> str:
    capsys.readouterr()
    assert main(["status", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()[1]


@pytest.fixture
def orphan(tiny_model, texts, tmp_path):
    """The output folder and process group of a run whose `recipes submit local` was killed."""
    folder = tmp_path / "run"
    flags = [*model_flags(tiny_model, texts), "--max_steps", "100000", "--output_dir", str(folder)]
    command = [sys.executable, "-m", "launch", "submit", "local", "--", *flags]
    submit = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    log = folder / "train.log"
    wait_for("step 5", lambda: log.exists() and "step 5/" in log.read_text())
    group = int(Path(f"/proc/{submit.pid}/task/{submit.pid}/children").read_text())
    submit.kill()
    submit.wait()
    yield folder, group
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def test_status_and_logs_find_a_local_run_that_survived_the_kill_of_recipes_submit(orphan, tiny_model, texts, capsys):
    folder, group = orphan
    assert "local" in status(folder, capsys) and "running" in status(folder, capsys)
    second = ["submit", "local", "--", *model_flags(tiny_model, texts), "--output_dir", str(folder)]
    assert main(second) == 2 and "another run is writing to" in capsys.readouterr().err
    steps = len((folder / "train.log").read_text())
    wait_for("a longer log", lambda: len((folder / "train.log").read_text()) > steps)
    os.kill(group, signal.SIGTERM)
    assert main(["logs", "-f", str(folder)]) == 0
    assert "told to stop by SIGTERM at step" in capsys.readouterr().out
    assert read_record(folder)["status"] == "preempted" and "preempted" in status(folder, capsys)


def test_status_of_a_run_started_by_hand_is_running_while_its_folder_is_locked(tmp_path, capsys):
    (tmp_path / "run.json").write_text('{"status": "running"}')
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert "started by hand  running" in status(tmp_path, capsys)
    os.close(handle)
    assert "ended unexpectedly (killed?)" in status(tmp_path, capsys)
    assert main(["logs", str(tmp_path)]) == 2
    assert "was started by `recipes submit`" in capsys.readouterr().err


def test_status_lists_the_newest_run_first(tmp_path, capsys):
    for name, day in (("old", 1), ("new", 2)):
        record.write(tmp_path / name, {"status": "finished", "started": f"2026-01-0{day}T00:00:00+0000"})
    assert str(tmp_path / "new") in status(tmp_path, capsys)


@pytest.mark.parametrize(
    ("recorded", "state"),
    [
        ({"status": "finished", "ended": "2026-01-01T00:00:00+0000"}, "ended; run.json's status is still finished"),
        ({"status": "running", "started": "2026-01-03T00:00:00+0000"}, "ended unexpectedly (killed?)"),
    ],
)
def test_status_does_not_show_the_outcome_of_a_start_before_the_submission(recorded, state, tmp_path, capsys):
    record.write(tmp_path / "run", recorded)
    note = Submission("local", "a title", str(tmp_path / "log"), "", "2026-01-02T00:00:00+0000")
    submission.note(tmp_path / "run", note)
    assert state in status(tmp_path, capsys)


@pytest.mark.parametrize(
    ("text", "last"), [("one\ntwo\n\n", "two"), ("0: step 3/9  loss 1\nTraceback\n", "0: step 3/9  loss 1")]
)
def test_status_shows_the_last_step_line_of_a_log_or_else_its_last_nonempty_line(text, last, tmp_path):
    (tmp_path / "log").write_text(text)
    assert last_line(str(tmp_path / "log")) == last
