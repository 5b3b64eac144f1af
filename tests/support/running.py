"""Starts train.py from a test: one rank in this process, or through the real launchers."""

import contextlib
import io
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from unittest import mock

from launch.host.processes import free_port
from launch.output import record
from tests.support.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "train.py"


@dataclass
class Outcome:
    """`code` the exit code, `output` what was printed, `record` the run.json if there is one."""

    code: int
    output: str
    record: dict


def model_flags(model: Path, data: Path | None) -> list[str]:
    flags = {"model_name_or_path": model, "dataset_name": data, "max_length": 64}
    return [word for name, value in flags.items() if value for word in (f"--{name}", str(value))]


def train_here(model: Path, data: Path | None, output: Path | str, *flags: str) -> Outcome:
    """One rank, in this process: everything is imported already."""
    from launch.train import main

    stdout, stderr = io.StringIO(), io.StringIO()
    environment = mock.patch.dict(os.environ)  # as before, afterwards
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), environment:
        code = main([*model_flags(model, data), "--output_dir", str(output), *flags])
    return Outcome(code, stdout.getvalue() + stderr.getvalue(), read_record(Path(output)))


def launch(*flags: str, output: Path, processes: int = 1, config: str) -> Outcome:
    """Through `accelerate launch`, as a user starts it."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
    command += ["--config_file", str(ROOT / "accelerate_configs" / config), "--main_process_port", "0"]
    return run([*command, str(SCRIPT), *flags, "--output_dir", str(output)], output)


def launch_quickly(
    *flags: str, output: Path, processes=2, config="standard.yaml", env: dict[str, str] | None = None, script=SCRIPT
) -> Outcome:
    """As `launch`, but without the launcher's process, in the environment that it would set.

    The ranks are forked from a process that has imported everything already. Like the launcher's,
    the exit code is 1 if a rank's is not 0.
    """
    of_launcher = launched(ROOT / "accelerate_configs" / config, "--num_processes", str(processes))
    argv = [str(script), *flags, "--output_dir", str(output)]
    codes, printed = run_ranks(processes, {**of_launcher, **(env or {})}, argv)
    return Outcome(int(any(codes)), printed, read_record(output))


def launched(file: Path, *flags: str) -> dict[str, str]:
    """The environment that `accelerate launch` sets for its processes, by its own functions."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch

    parsed = launch_command_parser().parse_args(["--config_file", str(file), *flags, "train.py"])
    args, yaml, _ = _validate_launch_command(parsed)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(yaml.deepspeed_config)
        return launch.prepare_deepspeed_cmd_env(args)[1]
    if args.multi_gpu or args.use_fsdp:
        return launch.prepare_multi_gpu_env(args)
    return launch.prepare_simple_launcher_cmd_env(args)[1]


def run_ranks(processes: int, environment: dict[str, str], argv: list[str]) -> tuple[list[int], str]:
    """Run the script `argv` in all ranks of a world on this machine. Returns their exit codes, and
    what all of them printed.
    """
    world = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with tempfile.TemporaryFile() as log:
        ranks = []
        for rank in range(processes):
            own = {**environment, **{name: str(value) for name, value in world.items()}}
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            ranks.append(fork(own, argv, log.fileno()))
        for process in ranks:
            process.join(PATIENCE)  # DeepSpeed's first run compiles
            process.kill()
        log.seek(0)
        return [process.exitcode for process in ranks], log.read().decode()


def fork(environment: dict[str, str], argv: list[str], log: int) -> BaseProcess:
    """Start `python argv...` in a fork that has imported everything. Its output goes to `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    process = context.Process(target=_run_script, args=(environment, argv, DupFd(log)))
    process.start()
    return process


def _run_script(environment: dict[str, str], argv: list[str], log: DupFd) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(log.detach(), 1)
    os.dup2(1, 2)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


def run(command: list[str], output: Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> Outcome:
    printed = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env={**os.environ, **(env or {})}, cwd=cwd, timeout=PATIENCE, **printed)
    return Outcome(done.returncode, done.stdout, read_record(output))


def python(*words: object, cwd: Path = ROOT, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run Python with `words`, by default in this checkout, with more variables."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True)


def read_record(output: Path) -> dict:
    file = output / "run.json"
    return json.loads(file.read_text()) if file.exists() else {}


def rewrite(folder: Path, values: dict[str, object] | None = None, **changes) -> None:
    """Replace the values of settings, and other fields, of the run.json in a folder."""
    content = read_record(folder) | changes
    for name, value in (values or {}).items():
        content["settings"][name]["value"] = value
    record.write(folder, content)


def losses(outcome: Outcome) -> list[float]:
    return [entry["loss"] for entry in outcome.record["log_history"] if "loss" in entry]


def eval_losses(outcome: Outcome) -> list[tuple[int, float]]:
    """The step and the loss of each evaluation."""
    return [(entry["step"], entry["eval_loss"]) for entry in outcome.record["log_history"] if "eval_loss" in entry]
