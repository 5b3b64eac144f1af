"""Run one case in this process: `python -m tests.gpu.case NAME --output FOLDER [--rehearse]`.

Status and figures go to a file, which `python -m tests.gpu` reads. What is printed is only a log.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import traceback
from pathlib import Path

from launch.host.memory import ran_out
from launch.host.signals import end_with_parent
from tests.gpu.cases import Setup, all_cases
from tests.gpu.results import OK, OUT_OF_MEMORY

OURS = ("launch", "recipes", "tests")


def log_of(folder: Path, name: str) -> Path:
    """The log of a case. Its status and figures are in a .json file of the same name."""
    return folder / "logs" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.log"


def status_of(error: Exception) -> str:
    """The status of a case that raised this error."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing and missing not in OURS:
        return f"missing: {missing}"
    if ran_out(error):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines()
    return f"failed: {lines[-1][:160] if lines else type(error).__name__}"


def main() -> int:
    end_with_parent()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    case = next(case for case in all_cases(options.rehearse, options.gpus) if case.name == options.name)
    found: dict = {"status": OK}
    try:
        found["figures"] = case.measure(Setup(options.output, options.rehearse))
        if missing := found["figures"].pop("missing", None):
            found["status"] = f"missing: {', '.join(missing)}"
    except Exception as error:
        traceback.print_exc()
        found["status"] = status_of(error)
    log_of(options.output, case.name).with_suffix(".json").write_text(json.dumps(found))
    return int(found["status"] != OK)


if __name__ == "__main__":
    sys.exit(main())
