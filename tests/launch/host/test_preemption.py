"""Told to stop, wherever the signal lands: one agreed step, a valid checkpoint, and a run that
goes on as if it had not been stopped.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.host.signals import EXIT_CODE, PASSED_ON, StopRequest
from launch.output.checkpoints import newest_valid
from tests.support.running import ROOT, launch_quickly, losses, model_flags, read_record, train_here
from tests.support.stopping import ONE_PROCESS, TWO_RANKS, Forked, Run
from tests.support.waiting import PATIENCE

STEPS = "--max_steps 100 --logging_steps 1 --learning_rate 1e-3 --save_steps 1000 --global_batch_size 4".split()

# Whose end no test needs: however late a signal is seen, it is in time.
ENDLESS = ["1000000" if word == "100" else word for word in STEPS]


def stopped(run: Run, tell) -> str:
    with run:
        run.wait_for_output("step 5/")
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


def rank(number: int, which: int = 0):
    return lambda run: os.kill(run.ranks()[which], number)


def launcher_twice(run: Run) -> None:
    for _ in range(2):
        time.sleep(0.3)
        run.process.send_signal(signal.SIGTERM)


def everybody(run: Run) -> None:
    os.killpg(run.process.pid, signal.SIGTERM)


def ctrl_c(run: Run) -> None:
    os.killpg(run.process.pid, signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "tell"),
    [
        (Run, rank(signal.SIGHUP)),
        (Run, rank(signal.SIGUSR1)),
        (ONE_PROCESS, launcher_twice),
        (TWO_RANKS, launcher_twice),
        (TWO_RANKS, everybody),
        (Run, ctrl_c),
        (TWO_RANKS, ctrl_c),
    ],
    ids=[
        "SIGHUP",
        "SIGUSR1",
        "a launcher of one, twice",
        "a launcher of two, twice",
        "two and their launcher",
        "Ctrl-C",
        "Ctrl-C of two",
    ],
)
def test_a_run_that_was_told_to_stop_has_saved_its_last_step(start, tell, tiny_model, texts, tmp_path):
    run = start([*model_flags(tiny_model, texts), *ENDLESS], tmp_path)
    output = stopped(run, tell)
    assert assert_resumable(tmp_path) >= 5
    assert "at step" in output and "run the same command again" in output
    assert start is not Run or (run.process.returncode == EXIT_CODE == 75 and "Traceback" not in output)


def test_a_second_ctrl_c_stops_at_once(capfd):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = StopRequest()
    stop.step = 1
    try:
        stop.defer(patience=1)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == "SIGINT" and "Ctrl-C again kills" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_stopped_run_goes_on_as_if_it_had_not_been(flags, tiny_model, texts, tmp_path, uninterrupted):
    stopped(Forked(flags, tmp_path), rank(signal.SIGTERM))
    assert assert_resumable(tmp_path) >= 5
    again = train_here(tiny_model, texts, tmp_path, *STEPS)
    assert "resuming from" in again.output
    assert losses(again) == pytest.approx(losses(uninterrupted), rel=1e-6)


@pytest.mark.slow
def test_two_ranks_of_which_the_last_was_told_go_on_as_if_it_had_not_been(flags, tmp_path, uninterrupted):
    stopped(TWO_RANKS(flags, tmp_path), rank(signal.SIGTERM, which=-1))
    again = launch_quickly(*flags, output=tmp_path, processes=2)
    assert "resuming from" in again.output
    assert losses(again) == pytest.approx(losses(uninterrupted), rel=1e-3)


@pytest.mark.slow
def test_a_signal_during_a_save_lets_it_end(flags, tmp_path):
    def during_a_save(run):
        deadline = time.monotonic() + PATIENCE
        while not any(not (f / "trainer_state.json").exists() for f in tmp_path.glob("checkpoint-*")):
            assert time.monotonic() < deadline, "no save was seen"  # it is short: look without a pause
        os.kill(run.ranks()[0], signal.SIGTERM)

    often = ["2" if word == "1000" else word for word in flags]
    stopped(Forked([*often, "--save_total_limit", "1000"], tmp_path), during_a_save)
    assert_resumable(tmp_path)


def test_signals_wait_while_train_py_imports_and_end_it_before_the_first_step(flags, tmp_path):
    """psutil is the first library that it imports."""
    (tmp_path / "psutil.py").write_text(
        "import os, signal, sys\n"
        "print(*sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.path.remove(os.path.dirname(__file__))\ndel sys.modules['psutil']\nimport psutil\n"
    )
    words = [sys.executable, str(ROOT / "launch" / "train.py"), *flags, "--output_dir", str(tmp_path / "out")]
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout.split() == [str(int(number)) for number in sorted(PASSED_ON)]
    assert done.returncode == EXIT_CODE and "told to stop by SIGTERM" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_checkpoint_survives_beside_the_best_one(tiny_model, texts, tmp_path):
    """At its end Trainer deletes the last checkpoint where another one is the best and one is to
    be kept.
    """
    first_is_best = "--load_best_model_at_end --metric_for_best_model loss --greater_is_better true".split()
    every_second = "--eval_strategy steps --eval_steps 2 --save_steps 2 --save_total_limit 1".split()
    split = "--dataset_train_split train[:90%] --dataset_test_split train[90%:] --logging_steps 1".split()
    flags = [*model_flags(tiny_model, texts), *first_is_best, *every_second, *split, "--learning_rate", "1e-3"]
    stopped(Forked([*flags, "--max_steps", "150"], tmp_path), rank(signal.SIGTERM))
    assert assert_resumable(tmp_path) >= 5
    assert (tmp_path / "checkpoint-2").exists()
