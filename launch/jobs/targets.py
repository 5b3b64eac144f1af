"""Where a job can go. A new target is a module with this interface, and a line in `TARGETS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from launch.jobs import azure, local, slurm
from launch.jobs.job import Job, Node
from launch.output.submission import Submission, noted


class Target(Protocol):
    """What a target's module holds. `flags` is an instance of its dataclass `FLAGS`."""

    HELP: str  # one line for `recipes submit --help`
    WRITES_HERE: bool  # whether the job writes to the output folder on this machine
    STAGE: Callable[[Job, Path], Path] | None  # writes what the job uploads beside its text; None for nothing
    FLAGS: type

    def node(self, flags: Any, processes: int | None) -> Node:
        """A node of the target, with one process per GPU unless `processes` says otherwise."""

    def render(self, job: Job, flags: Any) -> str:
        """The job's text. A pure function: what a dry run prints is what would be sent."""

    def check(self, text: str, job: Job, flags: Any) -> None:
        """Raises `UserError` for what must not be sent."""

    def submit(self, text: str, job: Job, flags: Any) -> int:
        """Send the text, and note and announce the submission. Returns the exit code."""

    def state(self, submission: Submission) -> str:
        """The job's state in the target's own words; empty if it has forgotten the job.

        Raises `UserError` if the target cannot be asked.
        """

    def is_over(self, state: str) -> bool:
        """Whether a job in this state neither waits nor runs."""

    def print_log(self, submission: Submission, folder: Path, following: bool) -> None:
        """Print what the job has printed; with `following` until it has ended."""

    def last_line(self, submission: Submission) -> str:
        """The last line of the job's log, or the log's address."""


TARGETS: dict[str, Target] = {"local": local, "slurm": slurm, "azureml": azure}


def submitted(folder: Path) -> Submission | None:
    """The last submission into this folder; None if there is none, or its note is damaged."""
    submission = noted(folder)
    return submission if submission and submission.target in TARGETS else None
