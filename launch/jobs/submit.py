"""Submit a run to this machine, to Slurm or to Azure ML, and report the state of submitted runs.

Every job is checked before it is sent.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from shlex import join, quote
from typing import Any

from launch.flags import Parser, add_fields, given
from launch.host.files import writing
from launch.jobs.azure import Azure
from launch.jobs.job import Job, Target, checked_job, last_line
from launch.jobs.local import Local, is_written
from launch.jobs.slurm import Slurm
from launch.output import record
from launch.output.submission import NAME, Submission
from launch.terminal import console, print_note
from recipes.errors import UserError, mistake, raise_errors
from recipes.rules.probe import probe_in_child
from recipes.run import with_flags
from recipes.run.files import existing_path, nearest, read_yaml

TARGETS: dict[str, type[Target]] = {"local": Local, "slurm": Slurm, "azureml": Azure}


def submit(
    target: Target,
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
    """Submit train.py with the arguments `argv`, or only show the job. Return the exit code.

    `accelerate_config` is an Accelerate YAML that replaces the recipe's own. `comment` is a line
    for the top of the job's text. Raises `UserError` with every problem of the run or the job.
    Before a job goes to another machine, the libraries here must also accept the settings; a dry
    run skips this check, which takes seconds.
    """
    if output and not dry_run:
        raise mistake("output", "works only with --dry_run", "add --dry_run, or leave out --output")
    if processes_per_node is None and isinstance(target, Azure):  # the GPUs of Azure's nodes cannot be read from here
        print_note("each node gets one process: for N GPUs per node, use --processes_per_node N", console(stderr=True))
    place = target.place(processes_per_node, nodes, accelerate_config)
    job = checked_job(recipe, argv, place, getattr(target, "data", ()), preflight)
    if job.run["fresh"] and not isinstance(target, Local):
        what = "would move the run aside again at every restart of the job"
        raise mistake("fresh", what, "use another --output_dir, or --output_uri on Azure ML")
    text = target.render(job)
    first, _, rest = text.partition("\n")  # `#!` must be the first line
    text = f"{first}\n{comment}{rest}" if first.startswith("#!") else comment + text
    target.check(text, job)
    if dry_run:
        return _show(text, job, target, output)
    if target.WRITES_HERE:
        refuse_while_in_use(job.folder)
    if not isinstance(target, Local):  # on this machine, train.py itself makes this check
        raise_errors(probe_in_child(job.run))
    return target.send(text, job)


def refuse_while_in_use(folder: Path) -> None:
    """Raise `UserError` if the folder's submitted run waits or runs: a second run would fail."""
    earlier = submitted(folder)
    if earlier is None:
        return
    target, who = TARGETS[earlier.target], f"job {earlier.job}" if earlier.job else "another run"
    if target.WRITES_HERE and not target.is_over(target.state(earlier)):
        fix = f"use another --output_dir, or wait: recipes logs -f {quote(str(folder))}"
        raise mistake("output_dir", f"{who} is writing to {folder}", fix)


def _show(text: str, job: Job, target: Target, file: str | None) -> int:
    if file is None:
        sys.stdout.write(text)
        return 0
    path = Path(file)
    with writing(file, "output", "choose another name, or a writable folder"):
        if not path.exists() and (code := target.stage(job, path.parent)):
            print(f"the job's code is in {code}")
        with path.open("x", encoding="utf-8", errors="surrogateescape") as stream:  # an existing file stays
            stream.write(text)
    print(f"written to {file}")
    return 0


# --- The site file --------------------------------------------------------------------------------


def site_file() -> Path:
    """Return the path of the site file (which may not exist) with flags for all jobs, such as

    slurm: {partition: gpu, account: lab, module: [cuda/12.6], venv: /shared/venv}
    azureml: {compute: gpu-cluster, workspace_name: lab}

    The command line overrides the file. A dry run prints which values came from the file.
    """
    folder = os.environ.get("XDG_CONFIG_HOME") or Path(os.environ.get("HOME", "/")) / ".config"
    return Path(folder) / "accelerate-recipes" / "site.yaml"


def site_defaults(target: str) -> dict[str, Any]:
    """Return a target's flags from the site file, parsed like a command line; empty without a file.

    Raises `UserError` for a mistake in the file.
    """
    file = existing_path(str(site_file()))
    content = read_yaml(file, "site.yaml", as_text=True) if file else {}
    for name in content.keys() - TARGETS.keys():
        raise mistake(name, "is not a target", nearest(name, TARGETS) or "one of " + ", ".join(TARGETS), str(file))
    section = content.get(target) or {}
    if not isinstance(section, Mapping):
        fix = f"write `name: value` on each line below `{target}:`, indented"
        raise mistake(target, "holds no flags", fix, str(file))
    known = {field.name: isinstance(field.default, bool) for field in fields(TARGETS[target])}
    words: list[str] = []
    for name, value in section.items():
        if known.get(name.replace("-", "_")) and value in ("true", "false", "yes", "no", "on", "off"):
            words += [f"--{name}"] if value in ("true", "yes", "on") else []
        elif value not in ("", "null", "~"):
            words += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    parser = Parser(exit_on_error=False, add_help=False)
    add_fields(parser, TARGETS[target])
    try:
        options, rest = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        name = str(error.argument_name).partition("/")[0].strip("-")
        raise mistake(name, error.message, f"see `recipes submit {target} --help`", str(file)) from None
    if rest:
        name = rest[0].lstrip("-").partition("=")[0]
        fix = nearest(name, known) or f"see `recipes submit {target} --help`"
        raise mistake(name, f"is not a flag of `recipes submit {target}`", fix, str(file))
    return given(TARGETS[target], options)


def from_site(site: Mapping[str, Any]) -> str:
    """Return a comment line with the flags from the site file; empty if there are no such flags."""
    return f"# From {site_file()}: {join(with_flags([], site))}\n" if site else ""


# --- How runs are doing ---------------------------------------------------------------------------


def submitted(folder: Path) -> Submission | None:
    """Return the last submission; None if its record is missing, damaged or names no target."""
    with contextlib.suppress(TypeError):  # a field is missing or unknown
        submission = Submission(**record.read(folder, NAME))
        return submission if submission.target in TARGETS else None
    return None


def rows(folder: Path) -> list[list[str]]:
    """Return folder, target, state and last log line per run. Raises `UserError` without runs."""
    return [[str(run), *_described(run)] for run in _runs_in(folder)]


def newest(folder: Path) -> tuple[Path, Submission]:
    """Return the folder and the submission of the newest submitted run in a folder.

    Raises `UserError` if the folder has no submitted run.
    """
    for run in _runs_in(folder):
        if submission := submitted(run):
            return run, submission
    what = f"no run in {folder} was started by `recipes submit`"
    raise mistake("FOLDER", what, "read the output in the terminal that started the run")


def _runs_in(folder: Path) -> list[Path]:
    """Return the run folders in `folder`, newest first. Raises `UserError` if there are none."""
    runs = [run for run in (folder, *folder.glob("*")) if (run / NAME).is_file() or (run / record.NAME).is_file()]
    if not runs:
        raise mistake("FOLDER", f"no run was submitted or started in {folder}", "give the --output_dir of a run")
    return sorted(runs, key=_begun, reverse=True)


def _begun(folder: Path) -> str:
    submission = submitted(folder)
    return submission.submitted if submission else str(record.read(folder).get("started", ""))


def _described(folder: Path) -> tuple[str, str, str]:
    """Return a run's target, state, and last log line (or why the target gives no state)."""
    submission, content = submitted(folder), record.read(folder)
    is_older = submission and str(content.get("ended", content.get("started", ""))) < submission.submitted
    outcome = "" if is_older else str(content.get("status", ""))  # running, finished, preempted, failed, ...
    if submission is None:
        if outcome == "running" and not is_written(folder):
            outcome = "ended unexpectedly (killed?), or runs on another machine"
        return "started by hand", outcome, ""
    target, where = TARGETS[submission.target], f"{submission.target} {submission.job}".strip()
    try:
        state = target.state(submission)
    except UserError as error:  # the other runs can still be described
        return where, outcome or "unknown", str(error)
    if target.is_over(state):
        if outcome == "running":  # the run died before it could write its outcome
            outcome = "ended unexpectedly (killed?)"
        before = content.get("status", "unknown")  # a start with nothing to train changes no status
        state = ", ".join(filter(None, (state, outcome))) or f"ended; run.json's status is still {before}"
    return where, state, last_line(submission.log)
