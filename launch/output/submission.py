"""submission.json in the output folder: how `recipes status` and `recipes logs` find a job."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote

from launch.output import record
from recipes.run import FIT

NAME = "submission.json"
LOCAL_LOG = "train.log"
# These files belong to the folder, so --fresh does not archive them with a run.
KEPT_HERE = (NAME, LOCAL_LOG, FIT)


@dataclass(frozen=True)
class Submission:
    """A job at `target` (slurm, azureml, local): its id or name there, its log's path or URL."""

    target: str
    title: str
    log: str
    job: str = ""
    submitted: str = field(default_factory=record.now)
    workspace: dict[str, str] = field(default_factory=dict)


def note(folder: Path, submission: Submission) -> None:
    """Write submission.json into the output folder. Raises `OSError` if the write fails."""
    record.write(folder, asdict(submission), NAME)


def announce(folder: Path, submission: Submission, found_at: Mapping[str, str], cancel: str) -> None:
    """Record a submitted job, and print where to find it (`found_at`) and how to follow it.

    The job exists already, so a failure to write submission.json is only printed.
    """
    try:
        note(folder, submission)
    except OSError as error:
        print(f"{folder / NAME} not written ({error.strerror}): `recipes status` cannot show the job", file=sys.stderr)
    print(f"submitted job {submission.job}: {submission.title}")
    here = quote(str(folder))
    commands = {"status": f"recipes status {here}", "follow": f"recipes logs -f {here}", "cancel": cancel}
    for name, text in {**found_at, **commands}.items():
        print(f"{name:<8}{text}")
