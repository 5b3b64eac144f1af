"""What was submitted, noted in the run's output folder, by which `recipes status` and `recipes logs` find it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launch import record

NAME = "submission.json"
LOCAL_LOG = "train.log"
KEPT_HERE = (NAME, LOCAL_LOG)  # they belong to the submission, not to the run that --fresh moves aside


@dataclass(frozen=True)
class Submission:
    """`target` is local, slurm or azureml; `job` Slurm's job id or Azure ML's job name; `log` a file or an address."""

    target: str
    title: str
    log: str
    job: str = ""
    submitted: str = field(default_factory=record.now)
    workspace: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"slurm {self.job}" if self.target == "slurm" else self.target  # Azure ML's job names the folder


def note(folder: Path, submission: Submission) -> None:
    """Write it into the output folder. Raises OSError."""
    record.write(folder, asdict(submission), NAME)


def noted(folder: Path) -> Submission | None:
    """What was submitted to write into this folder last; None where nothing was, or the note is damaged."""
    try:
        return Submission(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
