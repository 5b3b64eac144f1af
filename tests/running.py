"""Starting train.py from a test: in this process for one rank, through the real launchers for more."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "launch" / "train.py"


@dataclass
class Outcome:
    """`code` the exit code, `output` what was printed, `record` the run.json if there is one."""

    code: int
    output: str
    record: dict


def model_flags(model: Path, data: Path) -> list[str]:
    flags = {"model_name_or_path": model, "dataset_name": data, "max_length": 64}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def train_here(model: Path, data: Path, output: Path | str, *flags: str) -> Outcome:
    """One rank, in this process: everything is imported already."""
    from launch.train import main

    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), _kept_environment():
        code = main([*model_flags(model, data), "--output_dir", str(output), *flags])
    return Outcome(code, stdout.getvalue() + stderr.getvalue(), read_record(Path(output)))


def launch(
    *flags: str, output: Path, processes: int = 1, config: str | None = None, env: dict[str, str] | None = None
) -> Outcome:
    """Through `accelerate launch`, as a user starts it."""
    chosen = ["--config_file", str(ROOT / "accelerate_configs" / config)] if config else []
    command = [sys.executable, "-m", "accelerate.commands.launch", *chosen, "--num_processes", str(processes)]
    return run([*command, "--main_process_port", "0", str(SCRIPT), *flags, "--output_dir", str(output)], output, env)


def run(command: list[str], output: Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> Outcome:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
        timeout=500,
        cwd=cwd,
    )
    return Outcome(done.returncode, done.stdout, read_record(output))


def read_record(output: Path) -> dict:
    file = output / "run.json"
    return json.loads(file.read_text()) if file.exists() else {}


def losses(outcome: Outcome) -> list[float]:
    return [entry["loss"] for entry in outcome.record["log_history"] if "loss" in entry]


@contextlib.contextmanager
def _kept_environment():
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
