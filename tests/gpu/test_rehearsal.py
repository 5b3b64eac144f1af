"""`python -m tests.gpu --rehearse`: every GPU case works, with a tiny model on this CPU.

In the present environment, and in one that has only the packages of a bare GPU machine.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.gpu.cases import all_cases
from tests.gpu.results import NOT_RUN
from tests.support.running import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]  # each case has a deadline of its own

BARE = "torch transformers accelerate peft rich psutil pyyaml pyarrow jinja2 pytest scikit-learn xxhash".split()


def with_requirements(names: list[str]) -> set[str]:
    """These installed distributions, and those that they require without extras."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name in found:
            continue
        found.add(name)
        wanted = map(Requirement, metadata.requires(name) or [])
        names += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def bare_python(folder: Path) -> Path:
    """Python of a new environment that has only the packages of `BARE`, as links to those here."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in map(metadata.distribution, with_requirements(list(BARE))):
        installed = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for name in installed:
            if not (site / name).exists():  # distributions of one namespace package share a folder
                (site / name).symlink_to(distribution.locate_file(name))
    return folder / "bin" / "python"


def rehearse(python: Path, output: Path, *flags: str) -> subprocess.CompletedProcess:
    command = [str(python), "-m", "tests.gpu", "--rehearse", "--output", str(output), *flags]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def rows_of(output: Path) -> list[dict]:
    lines = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    return [line for line in lines if "case" in line]


@pytest.mark.parametrize("environment", ["complete", "bare"])
def test_every_case_works_or_says_which_package_is_missing_and_none_is_run_twice(environment, tmp_path):
    python, output = Path(sys.executable), tmp_path / "out"
    if environment == "bare":
        python = bare_python(tmp_path / "venv")
    done = rehearse(python, output)
    rows = {row["case"]: row for row in rows_of(output)}
    assert list(rows) == [case.name for case in all_cases(rehearse=True)], done.stdout + done.stderr
    missing = {name: row["status"] for name, row in rows.items() if row["status"].startswith("missing: ")}
    failed = {name: row for name, row in rows.items() if name not in missing and row["status"] != "ok"}
    assert (done.returncode, failed) == (0, {}), done.stdout + done.stderr
    by_doctor = missing.pop("doctor", None)
    assert by_doctor == (None if environment == "complete" else "missing: bitsandbytes, datasets, deepspeed")
    needs = {case.name: f"missing: {', '.join(case.needs)}" for case in all_cases(rehearse=True)}
    assert missing.items() <= needs.items()
    assert environment == "bare" or not missing
    assert all(row["figures"] for row in rows.values() if row["status"] == "ok")
    table = (output / "results.md").read_text()
    assert table in done.stdout and all(f"| {name} |" in table for name in rows)

    before = rows_of(output)
    assert rehearse(python, output).returncode == 0
    assert rows_of(output) == before


def test_what_a_small_budget_does_not_hold_is_listed_as_not_run(tmp_path):
    done = rehearse(Path(sys.executable), tmp_path / "out", "--budget", "10")
    assert done.returncode == 0 and {row["status"] for row in rows_of(tmp_path / "out")} == {NOT_RUN}
    assert (tmp_path / "out" / "results.md").read_text().count(NOT_RUN) == len(all_cases(rehearse=True))
