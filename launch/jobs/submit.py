"""Submitting: the same run on this machine, on Slurm or on Azure ML.

Everything is checked before it is sent.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from launch.jobs.here import refuse_while_written
from launch.jobs.job import Job, checked_job
from launch.jobs.site import commented
from launch.jobs.targets import TARGETS, Target, submitted
from recipes.errors import UserError, mistake
from recipes.rules.probe import probe_in_child


def submit(
    target: Target,
    flags: object,
    argv: Sequence[str],
    *,
    recipe: str | None = None,
    accelerate_config: str | None = None,
    nodes: int = 1,
    processes_per_node: int | None = None,
    preflight: bool = False,
    dry_run: bool = False,
    output: str | None = None,
    comment: str = "",
) -> int:
    """Submit train.py with the command line `argv`, or show what would be sent.

    `flags` are the target's own. `accelerate_config` is an Accelerate YAML that replaces the
    recipe's own, `comment` lines for the top of the job's text. Returns the exit code. Raises
    `UserError` with everything that is wrong with the run or the job. What would go to another
    machine is also constructed here first; a dry run is not, which takes no seconds.
    """
    if output and not dry_run:
        raise mistake("output", "is for a dry run; this would be submitted, not written", "--dry_run, or no --output")
    job = checked_job(recipe, argv, target.node(flags, processes_per_node), nodes, preflight, accelerate_config)
    text = commented(target.render(job, flags), comment)
    target.check(text, job, flags)
    if dry_run:
        return _show(text, job, target, output)
    if target.WRITES_HERE:
        refuse_while_in_use(job.folder)
    if target is not TARGETS["local"] and (problems := probe_in_child(job.run)):  # here train.py says it at once
        raise UserError(*problems)
    return target.submit(text, job, flags)


def refuse_while_in_use(folder: Path) -> None:
    """Raises `UserError` if a run writes to the folder: a second one would only fail later."""
    refuse_while_written(folder)
    earlier = submitted(folder)
    if earlier is None or not earlier.job:  # a run on this machine was found above
        return
    target = TARGETS[earlier.target]
    if target.WRITES_HERE and not target.is_over(target.state(earlier)):
        fix = f"another --output_dir, or wait for its end: recipes logs -f {quote(str(folder))}"
        raise mistake("output_dir", f"job {earlier.job} is still running and writes to {folder}", fix)


def _show(text: str, job: Job, target: Target, file: str | None) -> int:
    if file is None:
        sys.stdout.write(text)
        return 0
    path = Path(file)
    try:
        if target.STAGE and not path.exists():
            print(f"its code is in {target.STAGE(job, path.parent)}")
        with path.open(
            "x", encoding="utf-8", errors="surrogateescape"
        ) as stream:  # "x": an existing file is never overwritten
            stream.write(text)
    except FileExistsError:
        raise mistake("output", f"{file} exists already", "another name") from None
    except OSError as error:
        raise mistake("output", f"{file} cannot be written: {error.strerror}", "choose a writable folder") from None
    print(f"written to {file}")
    return 0
