"""`recipes status` and `recipes logs`: a run that was submitted, wherever it runs, and one that was only started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

from launch.jobs import azure_workspace
from launch.jobs import local as local_job
from launch.jobs import slurm as slurm_job
from launch.jobs.azure_workspace import Workspace
from launch.jobs.tail import follow, last_words
from launch.output import record
from launch.output.submission import NAME, Submission, noted
from recipes.errors import UserError, mistake


def add_parsers(commands: Any) -> None:
    status = commands.add_parser("status", help="how submitted runs are doing", allow_abbrev=False)
    status.add_argument("folder", metavar="FOLDER", nargs="?", default="outputs", help="a run's, or of runs [outputs]")
    status.set_defaults(run=show_status)
    logs = commands.add_parser("logs", help="what a submitted run has printed", allow_abbrev=False)
    logs.add_argument(
        "folder", metavar="FOLDER", nargs="?", default="outputs", help="a run's, or of runs: the newest [outputs]"
    )
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")
    logs.set_defaults(run=show_logs)


def show_status(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from launch.terminal import print_table

    rows = [[str(folder), *_described(folder)] for folder in _runs_in(Path(options.folder))]
    print_table(["folder", "where", "state", "last words"], rows)
    return 0


def show_logs(options: argparse.Namespace, rest: Sequence[str]) -> int:
    folder, submission = _newest(Path(options.folder))
    try:
        return _show_log(options, folder, submission)
    except KeyboardInterrupt:
        print(f"\nthe run goes on: recipes status {quote(str(folder))}")
        return 0


def _show_log(options: argparse.Namespace, folder: Path, submission: Submission) -> int:
    if submission.target == "azureml":
        _azure_log(folder, submission, options.follow)
        return 0
    log = Path(submission.log)
    if not log.exists() and not (options.follow and _going_on(submission)):
        waits = f"recipes logs -f {quote(str(folder))}, which waits" if _going_on(submission) else "submit it again"
        raise mistake("logs", f"there is no {log}: {_state(submission) or 'the run has ended'}", waits)
    every = 0.2 if submission.target == "local" else 10  # a controller serves many
    follow(log, (lambda: not _going_on(submission)) if options.follow else (lambda: True), ask_every=every)
    return 0


def _runs_in(folder: Path) -> list[Path]:
    """The folder if a run is or was to write to it, else those in it, the newest first."""
    try:
        runs = [inner for inner in [folder, *(folder.iterdir() if folder.is_dir() else [])] if _is_run(inner)]
    except OSError as error:
        raise mistake("FOLDER", f"{folder} cannot be read: {error.strerror}", "a folder that can") from None
    if not runs:
        raise mistake("FOLDER", f"no run was submitted or started in {folder}", "the --output_dir of one")
    return sorted(runs, key=_begun, reverse=True)


def _is_run(folder: Path) -> bool:
    return (folder / NAME).is_file() or (folder / record.NAME).is_file()


def _begun(folder: Path) -> str:
    submission = noted(folder)
    return submission.submitted if submission else str(record.read(folder).get("started", ""))


def _newest(folder: Path) -> tuple[Path, Submission]:
    for run in _runs_in(folder):
        submission = noted(run)
        if submission:
            return run, submission
    raise mistake("FOLDER", f"the run in {folder} was started without `recipes submit`", "the place its output went to")


def _described(folder: Path) -> tuple[str, str, str]:
    """Where it runs, its state, and the last line of its log."""
    submission = noted(folder)
    outcome = _outcome(folder, submission)
    if submission is None:
        return "started by hand", outcome, ""
    try:
        state = _state(submission)
    except UserError as error:  # the others can still be told
        return submission.where, outcome or "unknown", str(error)
    words = last_words(Path(submission.log)) if submission.target != "azureml" else submission.log
    if _is_over(submission, state):
        state = _ended(submission, state, outcome)
    return submission.where, state, words


def _ended(submission: Submission, state: str, outcome: str) -> str:
    """What became of a run that its target no longer runs."""
    if outcome == "running":  # and did not live to write anything else
        return f"{state}: ended without a word, killed perhaps".removeprefix(": ")
    return ", ".join(word for word in (state, outcome) if word) or "ended, how is not known"


def _outcome(folder: Path, submission: Submission | None) -> str:
    """What run.json says: running, finished, preempted, failed, ...; empty without one of this submission."""
    content = record.read(folder)
    if submission and _before(str(content.get("ended", content.get("started", ""))), submission.submitted):
        return "failed before it trained" if submission.exit_code else ""
    return str(content.get("status", ""))


def _before(one: str, other: str) -> bool:
    try:
        return datetime.fromisoformat(one) < datetime.fromisoformat(other)
    except (ValueError, TypeError):
        return not one


def _state(submission: Submission) -> str:
    """What its target says of it; empty where that knows nothing of it any more."""
    if submission.target == "local":
        return "running" if local_job.running(Path(submission.log)) else ""
    if submission.target == "slurm":
        return slurm_job.state(submission.job)
    return azure_workspace.state(_client(submission), submission.job)


def _going_on(submission: Submission) -> bool:
    return not _is_over(submission, _state(submission))


def _is_over(submission: Submission, state: str) -> bool:
    if submission.target == "azureml":
        return azure_workspace.over(state)
    return not state or (submission.target == "slurm" and not slurm_job.going_on(state))


def _client(submission: Submission) -> Any:
    return azure_workspace.connected(Workspace(**submission.workspace))


def _azure_log(folder: Path, submission: Submission, following: bool) -> None:
    client = _client(submission)
    state = azure_workspace.state(client, submission.job)
    if azure_workspace.over(state):
        for file in azure_workspace.download_logs(client, submission.job, folder):
            print(file.read_text(encoding="utf-8", errors="replace"), end="")
        print(f"{state}: {submission.log}")
    elif following:
        azure_workspace.stream(client, submission.job)
    else:
        raise mistake("logs", f"job {submission.job} is {state}", f"recipes logs -f {folder}, or {submission.log}")
