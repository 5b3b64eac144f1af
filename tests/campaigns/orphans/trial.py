"""One run that a blow strikes, and the same command again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from launch.output.checkpoints import inspect, numbered
from tests.campaigns.orphans.draw import STEPS, Blow
from tests.support.running import ROOT, SCRIPT, Outcome, losses, read_record

TIMEOUT = 30  # seconds of ddp_timeout: a step takes less than one, on a busy machine some
GRACE = TIMEOUT + 120.0  # until all processes are gone; torch elastic alone may wait 30 before it kills
_PATIENCE = 900.0  # for a run that nobody disturbs
_PAUSE = 5.0  # a stopped process that nobody waits for goes on after it

_TRAINING = (
    f"--model_name_or_path models/llama --dataset_name data/texts.jsonl --max_length 64 --max_steps {STEPS} "
    "--dataset_train_split train[:64] --dataset_test_split train[64:] --eval_strategy steps --eval_steps 4 "
    f"--global_batch_size 4 --logging_steps 1 --learning_rate 1e-3 --save_steps 3 --ddp_timeout {TIMEOUT}"
).split()

_judging = threading.Lock()  # torch's list of safe classes is one for all threads


@dataclass
class Result:
    """`finding` is empty if all is as it should be; `ended` is the status of the struck run."""

    blow: Blow
    finding: str = ""
    ended: str = ""


def words(launcher: str, processes: int) -> list[str]:
    """What starts the training, before its flags."""
    config = ROOT / "accelerate_configs" / ("single.yaml" if processes == 1 else "standard.yaml")
    accelerate = ["-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port", "0"]
    own = {
        "accelerate launch": [*accelerate, "--num_processes", str(processes), str(SCRIPT)],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), str(SCRIPT)],
        "recipes train": ["-m", "launch", "train", "--num_processes", str(processes)],
    }
    return [sys.executable, *own[launcher]]


class Run:
    """A training in a folder with models/ and data/. All its processes name its output folder."""

    def __init__(self, launcher: str, processes: int, folder: Path, name: str) -> None:
        self.output, log = folder / "out", folder / f"{name}.log"
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*words(launcher, processes), *_TRAINING, "--output_dir", str(self.output)],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def processes(self) -> list[psutil.Process]:
        """All that belong to this run and have not ended."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            named = str(self.output) in (process.info["cmdline"] or ())
            if named and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def rank(self, rank: int) -> psutil.Process | None:
        for process in self.processes():
            try:
                is_child = process.ppid() == self.process.pid
                if is_child and int(process.environ().get("RANK", 0)) == rank:
                    return process
            except (psutil.Error, OSError):
                continue
        return None

    def wait_until_gone(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.has_ended or self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def kill(self) -> None:
        for process in self.processes():
            _send(process, signal.SIGKILL)
        self.process.wait()


class Trials:
    """Trials on the same material. `losses` are those of a run of so many processes that nobody
    disturbs.
    """

    def __init__(self, folder: Path, material: Path) -> None:
        self.folder, self.material = folder, material

    @cached_property
    def losses(self) -> dict[int, list[float]]:
        return {processes: self._undisturbed(processes) for processes in (1, 2)}

    def attempt(self, number: int, blow: Blow) -> Result:
        folder = self._new_folder(f"trial-{number}")
        run = Run(blow.launcher, blow.processes, folder, "struck")
        try:
            struck = strike(run, blow)
            finding = self._left(run, blow) if struck else ""
        finally:
            run.kill()
        ended = str(read_record(run.output).get("status", "before it began")) if struck else "not struck"
        finding = finding or (struck and (faults(run, blow) or self._finish(blow, folder))) or ""
        return Result(blow, finding and f"{finding}\n{_last_lines(folder)}", ended)

    def _left(self, run: Run, blow: Blow) -> str:
        """Wait for the end of a run that was struck. Says which processes do not end."""
        if blow.signal == "SIGSTOP" and not blow.hangs:
            time.sleep(_PAUSE)
            for process in run.processes():
                _send(process, signal.SIGCONT)
        finishes = blow.signal == "SIGSTOP" and not blow.hangs
        if not run.wait_until_gone(_PATIENCE if finishes else GRACE):
            left = ", ".join(str(process.pid) for process in run.processes())
            return f"left after {GRACE:.0f} s: {left or 'the launcher'}"
        return ""

    def _finish(self, blow: Blow, folder: Path) -> str:
        """The same command again."""
        outcome = finished(Run(blow.launcher, blow.processes, folder, "again"))
        if outcome.code or outcome.record.get("status") != "finished":
            return f"the same command ends with {outcome.code}, status {outcome.record.get('status')}"
        own, whole = losses(outcome), self.losses[blow.processes]
        same = len(own) == len(whole) and all(abs(a - b) < 1e-5 * b for a, b in zip(own, whole, strict=True))
        return "" if same else f"losses {own} instead of {whole}"

    def _undisturbed(self, processes: int) -> list[float]:
        folder = self._new_folder(f"undisturbed-{processes}")
        outcome = finished(Run("recipes train", processes, folder, "undisturbed"))
        assert outcome.code == 0, outcome.output
        return losses(outcome)

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True)
        for part in ("models", "data"):
            (folder / part).symlink_to(self.material / part)
        return folder


def finished(run: Run) -> Outcome:
    gone = run.wait_until_gone(_PATIENCE)
    run.kill()
    return Outcome(run.process.returncode if gone else -1, run.printed, read_record(run.output))


def strike(run: Run, blow: Blow) -> bool:
    """Whether the blow found its target: the run may end before."""
    deadline = time.monotonic() + _PATIENCE
    while blow.step and f"step {blow.step}/" not in run.printed:
        if run.has_ended or time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    time.sleep(blow.delay)
    while not run.has_ended:
        target = psutil.Process(run.process.pid) if blow.rank is None else run.rank(blow.rank)
        if target is not None:
            _send(target, signal.Signals[blow.signal])
            return True
        time.sleep(0.02)  # the rank has not started yet
    return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def faults(run: Run, blow: Blow) -> str:
    """What is wrong with what a struck run has left. Empty if nothing is."""
    status = read_record(run.output).get("status")
    with _judging:
        checkpoints = [inspect(path) for path in numbered(run.output)]
    if blow.saves and (damaged := [checkpoint for checkpoint in checkpoints if not checkpoint.valid]):
        return f"{damaged[0].path.name} is damaged: {', '.join(damaged[0].faults)}"
    if blow.saves and status not in (None, "preempted", "finished"):
        return f"told to stop, and its status is {status}"
    if blow.saves and status == "preempted" and "step 1/" in run.printed and not checkpoints:
        return "told to stop after a step, and nothing is saved"
    if (
        blow.hangs
        and status != "finished"
        and not any(word in run.printed for word in ("did not answer", "not all there"))
    ):
        return "a rank hangs, and nobody says so"
    if blow.launcher == "recipes train" and "Traceback" in run.printed:
        return "a traceback"
    if (
        blow.launcher == "recipes train"
        and blow.saves
        and blow.signal != "SIGKILL"
        and run.process.returncode not in (0, 75)
    ):
        return f"told to stop, and the exit code is {run.process.returncode}"
    return ""


def _last_lines(folder: Path) -> str:
    logs = (folder / "struck.log", folder / "again.log")
    lines = [line for log in logs if log.exists() for line in (f"--- {log.name}", *log.read_text().splitlines()[-12:])]
    return "\n".join(f"    {line}" for line in lines)
