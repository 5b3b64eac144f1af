"""Told to stop, wherever the signal lands: one agreed step, a valid checkpoint, and a run that goes on as if nothing
had happened."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launch.checkpoints import newest_valid
from launch.preemption import EXIT_CODE
from tests.running import ROOT, SCRIPT, Outcome, losses, model_flags, read_record, train_here

STEPS = "--max_steps 100 --logging_steps 1 --learning_rate 1e-3 --save_steps 1000 --global_batch_size 4".split()
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
ONE = [*ACCELERATE, "--config_file", str(ROOT / "accelerate_configs" / "single.yaml")]
TWO = [*ACCELERATE, "--config_file", str(ROOT / "accelerate_configs" / "standard.yaml"), "--num_processes", "2"]
LAUNCHERS = {"python": [sys.executable], "one process": ONE, "two ranks": [*TWO, "--main_process_port", "0"]}


@dataclass
class Run:
    """A training in processes of its own, to be told to stop in the middle."""

    launcher: str
    flags: list[str]
    output: Path
    lines: list[str] = field(default_factory=list)

    def __enter__(self):
        command = [*LAUNCHERS[self.launcher], str(SCRIPT), *self.flags, "--output_dir", str(self.output)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def read_until(self, words: str) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return
        raise AssertionError(f"{words!r} was never said:\n" + "".join(self.lines))

    def ranks(self) -> list[int]:
        """Processes of the training script; the launcher, which names it too, is not among them."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                workers = "pt_data_worker" in (folder / "comm").read_text()
            except OSError:
                continue
            if str(self.output) in words and not any("accelerate" in word for word in words[:3]) and not workers:
                found.append(int(folder.name))
        return sorted(found)

    def end(self) -> str:
        """Everything it said, once it and all its ranks have ended."""
        self.lines.append(self.process.communicate(timeout=120)[0])
        deadline = time.monotonic() + 60
        while self.ranks() and time.monotonic() < deadline:
            time.sleep(0.1)
        return "".join(self.lines)


def stopped(run: Run, tell) -> str:
    with run:
        run.read_until("step 5/")
        tell(run)
        return run.end()


@pytest.fixture
def flags(tiny_model, texts):
    return [*model_flags(tiny_model, texts), *STEPS]


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, texts, tmp_path_factory):
    """The same training, never stopped, in one process."""
    return train_here(tiny_model, texts, tmp_path_factory.mktemp("whole"), *STEPS)


def assert_resumable(output: Path) -> int:
    """Preempted, with a valid checkpoint of its last step and no final model; returns that step."""
    newest, damaged = newest_valid(output)
    assert newest is not None and not damaged
    assert read_record(output)["status"] == "preempted"
    assert not (output / "model.safetensors").exists()
    return newest.step


TELL = {
    "SIGTERM": lambda run: os.kill(run.ranks()[0], signal.SIGTERM),
    "SIGUSR1": lambda run: os.kill(run.ranks()[0], signal.SIGUSR1),
    "the last rank": lambda run: os.kill(run.ranks()[-1], signal.SIGTERM),
    "the launcher": lambda run: os.kill(run.process.pid, signal.SIGTERM),
    "the launcher twice": lambda run: [(time.sleep(0.3), run.process.send_signal(signal.SIGTERM)) for _ in range(2)],
    "everybody": lambda run: os.killpg(run.process.pid, signal.SIGTERM),
}


@pytest.mark.parametrize(
    ("launcher", "told"),
    [
        ("python", "SIGUSR1"),
        ("one process", "the launcher"),
        ("two ranks", "the launcher twice"),
        ("two ranks", "everybody"),
    ],
)
def test_a_run_that_was_told_to_stop_has_saved_its_last_step(launcher, told, flags, tmp_path):
    stopped(Run(launcher, flags, tmp_path), TELL[told])
    assert 5 <= assert_resumable(tmp_path) < 100


def test_the_exit_code_says_try_again(flags, tmp_path):
    run = Run("python", flags, tmp_path)
    output = stopped(run, TELL["SIGTERM"])
    assert run.process.returncode == EXIT_CODE == 75
    assert "told to stop by SIGTERM at step" in output and "run the same command again" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(("launcher", "tolerance"), [("python", 1e-6), ("two ranks", 1e-3)])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(launcher, tolerance, flags, tmp_path, uninterrupted):
    stopped(Run(launcher, flags, tmp_path), TELL["the last rank"])
    with Run(launcher, flags, tmp_path) as again:
        output = again.end()
    assert "resuming from" in output
    finished = Outcome(again.process.returncode, output, read_record(tmp_path))
    assert losses(finished) == pytest.approx(losses(uninterrupted), rel=tolerance)


def test_a_signal_during_a_save_lets_it_end(flags, tmp_path):
    def during_a_save(run):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            unfinished = [f for f in tmp_path.glob("checkpoint-*") if not (f / "trainer_state.json").exists()]
            if unfinished:
                return os.kill(run.ranks()[0], signal.SIGTERM)
        raise AssertionError("no save was seen")

    often = ["2" if word == "1000" else word for word in flags]
    stopped(Run("python", [*often, "--save_total_limit", "1000"], tmp_path), during_a_save)
    assert_resumable(tmp_path)


def test_a_signal_before_the_first_step_ends_at_once(flags, tmp_path):
    with Run("python", flags, tmp_path) as run:
        time.sleep(2)
        os.kill(run.process.pid, signal.SIGTERM)
        output = run.end()
    assert run.process.returncode == EXIT_CODE, output
    assert not list(tmp_path.glob("checkpoint-*"))


def test_the_checkpoint_survives_beside_the_best_one(tiny_model, texts, tmp_path):
    """At its end Trainer deletes the last checkpoint where another one is the best and one is to be kept."""
    first_is_best = "--load_best_model_at_end --metric_for_best_model loss --greater_is_better true".split()
    every_second = "--eval_strategy steps --eval_steps 2 --save_steps 2 --save_total_limit 1".split()
    split = "--dataset_train_split train[:90%] --dataset_test_split train[90%:] --logging_steps 1".split()
    flags = [*model_flags(tiny_model, texts), *first_is_best, *every_second, *split, "--learning_rate", "1e-3"]
    stopped(Run("python", [*flags, "--max_steps", "150"], tmp_path), TELL["SIGTERM"])
    assert assert_resumable(tmp_path) >= 5
    assert (tmp_path / "checkpoint-2").exists()
