"""submission.json in the output folder: how `recipes status` and `recipes logs` find a job."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from launch.output import record
from recipes.run import FIT

NAME = "submission.json"
TARGETS = ("local", "slurm", "azureml")
LOCAL_LOG = "train.log"
# They belong to the folder, so --fresh does not archive them with a run.
KEPT_HERE = (NAME, LOCAL_LOG, FIT)


@dataclass(frozen=True)
class Submission:
    """`target` is local, slurm or azureml; `job` Slurm's job id or Azure ML's job name; `log` a
    file or an address.

    `exit_code` is that of a local run. None until it ends.
    """

    target: str
    title: str
    log: str
    job: str = ""
    exit_code: int | None = None
    submitted: str = field(default_factory=record.now)
    workspace: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        # An Azure ML job has the name of its folder.
        return f"slurm {self.job}" if self.target == "slurm" else self.target


def note(folder: Path, submission: Submission) -> None:
    """Write it into the output folder. Raises OSError."""
    record.write(folder, asdict(submission), NAME)


def noted(folder: Path) -> Submission | None:
    """The last submission whose run writes into this folder.

    None if there is none, or the file is damaged.
    """
    try:
        submission = Submission(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    texts = (submission.title, submission.log, submission.job, submission.submitted)
    whole = submission.target in TARGETS and all(isinstance(text, str) for text in texts)
    known = isinstance(submission.workspace, dict) and (
        submission.target != "azureml" or len(submission.workspace) == 3
    )
    return submission if whole and known else None
