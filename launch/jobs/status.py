"""How a run is doing, wherever it runs: one that was submitted, or one that was only started."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from launch.jobs.here import is_written
from launch.jobs.targets import TARGETS, submitted
from launch.output import record
from launch.output.submission import NAME, Submission
from recipes.errors import UserError, mistake


def rows(folder: Path) -> list[list[str]]:
    """For each run, the newest first: its folder, where it runs, its state, its log's last line."""
    return [[str(run), *_described(run)] for run in _runs_in(folder)]


def newest(folder: Path) -> tuple[Path, Submission]:
    """The folder and the submission of the newest submitted run in a folder.

    Raises `UserError` if there is none.
    """
    for run in _runs_in(folder):
        submission = submitted(run)
        if submission:
            return run, submission
    raise mistake(
        "FOLDER", f"the run in {folder} was started without `recipes submit`", "read its output where you started it"
    )


def _runs_in(folder: Path) -> list[Path]:
    """The folder itself if a run writes to it, and those in it, the newest first."""
    try:
        runs = [inner for inner in [folder, *(folder.iterdir() if folder.is_dir() else [])] if _is_run(inner)]
    except OSError as error:
        raise mistake("FOLDER", f"{folder} cannot be read: {error.strerror}", "choose a readable folder") from None
    if not runs:
        raise mistake("FOLDER", f"no run was submitted or started in {folder}", "the --output_dir of one")
    return sorted(runs, key=_begun, reverse=True)


def _is_run(folder: Path) -> bool:
    return (folder / NAME).is_file() or (folder / record.NAME).is_file()


def _begun(folder: Path) -> str:
    submission = submitted(folder)
    return submission.submitted if submission else str(record.read(folder).get("started", ""))


def _described(folder: Path) -> tuple[str, str, str]:
    """Where it runs, its state, and the last line of its log."""
    submission = submitted(folder)
    outcome = _outcome(folder, submission)
    if submission is None:
        if outcome == "running" and not is_written(folder):
            outcome = "ended unexpectedly (killed?), or runs on another machine"
        return "started by hand", outcome, ""
    target, where = TARGETS[submission.target], _where(folder, submission)
    try:
        state = target.state(submission)
    except UserError as error:  # the other runs can still be described
        return where, outcome or "unknown", str(error)
    if target.is_over(state):
        state = _ended(state, outcome)
    return where, state, target.last_line(submission)


def _where(folder: Path, submission: Submission) -> str:
    """The target, and the job's name unless the folder has it already."""
    named = submission.job and submission.job != folder.name
    return f"{submission.target} {submission.job}" if named else submission.target


def _ended(state: str, outcome: str) -> str:
    """What became of a run that its target no longer runs."""
    if outcome == "running":  # the run could not write anything else any more
        return f"{state}: ended unexpectedly (killed?)".removeprefix(": ")
    return ", ".join(word for word in (state, outcome) if word) or "ended, outcome unknown"


def _outcome(folder: Path, submission: Submission | None) -> str:
    """The status in run.json: running, finished, preempted, failed, ...

    Empty if run.json is missing, or older than this submission.
    """
    content = record.read(folder)
    if submission and _before(str(content.get("ended", content.get("started", ""))), submission.submitted):
        return "failed before it trained" if submission.exit_code else ""
    return str(content.get("status", ""))


def _before(one: str, other: str) -> bool:
    try:
        return datetime.fromisoformat(one) < datetime.fromisoformat(other)
    except (ValueError, TypeError):
        return not one
