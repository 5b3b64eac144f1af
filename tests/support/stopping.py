"""Trainings in processes of their own, to be told to stop in the middle."""

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from tests.support.running import ROOT, SCRIPT
from tests.support.waiting import PATIENCE, wait_for


@dataclass
class Run:
    """`starter` is what starts the script."""

    flags: list[str]
    output: Path
    starter: tuple[str, ...] = (sys.executable,)

    def __enter__(self):
        self.log = tempfile.TemporaryFile()
        self.start([str(SCRIPT), *self.flags, "--output_dir", str(self.output)])
        return self

    def start(self, argv: list[str]) -> None:
        printed = {"stdout": self.log, "stderr": subprocess.STDOUT, "env": {**os.environ, "PYTHONUNBUFFERED": "1"}}
        self.process = subprocess.Popen([*self.starter, *argv], start_new_session=True, **printed)

    def __exit__(self, *exception):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def output_so_far(self) -> str:
        return os.pread(self.log.fileno(), 1 << 20, 0).decode()

    def wait_for_output(self, words: str) -> None:
        wait_for(f"{words!r} in the output, or the end", lambda: words in self.output_so_far() or self.has_ended())
        assert words in self.output_so_far(), self.output_so_far()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def ranks(self) -> list[int]:
        """Processes of the training script; the launcher, which names it too, is not among them."""
        found = []
        for process in psutil.process_iter(["cmdline", "name"]):
            words = process.info["cmdline"] or []
            is_launcher = any("accelerate" in word for word in words[:3])
            if str(self.output) in words and not is_launcher and "pt_data_worker" not in process.info["name"]:
                found.append(process.pid)
        return sorted(found)

    def end(self) -> str:
        """Everything it printed, once it and all its ranks have ended."""
        self.process.wait(PATIENCE)
        wait_for("the end of all ranks", lambda: not self.ranks())
        return self.output_so_far()


def launcher(config: str, *words: str) -> partial[Run]:
    file = str(ROOT / "accelerate_configs" / config)
    return partial(Run, starter=(sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, *words))


ONE_PROCESS = launcher("single.yaml")
TWO_RANKS = launcher("standard.yaml", "--num_processes", "2", "--main_process_port", "0")
