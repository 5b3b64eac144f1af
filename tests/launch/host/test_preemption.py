"""Told to stop, wherever the signal lands: one agreed step, a valid checkpoint, and a run that
goes on as if it had not been stopped.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from launch.host.signals import EXIT_CODE, PASSED_ON, StopRequest
from launch.output.checkpoints import newest_valid
from tests.support.running import SCRIPT, model_flags, python, read_record
from tests.support.stopping import ONE_PROCESS, TWO_RANKS, Run

STEPS = "--max_steps 100 --logging_steps 1 --learning_rate 1e-3 --save_steps 1000 --global_batch_size 4".split()

# Whose end no test needs: however late a signal is seen, it is in time.
ENDLESS = ["1000000" if word == "100" else word for word in STEPS]


def assert_resumable(output: Path, status: str = "preempted") -> int:
    """Stopped, with a valid checkpoint of its last step and no final model; returns that step."""
    newest, damaged = newest_valid(output)
    assert newest is not None and not damaged
    assert read_record(output)["status"] == status
    assert not (output / "model.safetensors").exists()
    return newest.step


def rank(number: int):
    return lambda run: os.kill(run.ranks()[-1], number)


def launcher_twice(run: Run) -> None:
    for _ in range(2):
        time.sleep(0.3)
        run.process.send_signal(signal.SIGTERM)


def all_at_once(number: int):
    return lambda run: os.killpg(run.process.pid, number)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "tell"),
    [
        pytest.param(Run, rank(signal.SIGHUP), id="SIGHUP"),
        pytest.param(TWO_RANKS, rank(signal.SIGTERM), id="the last of two"),
        pytest.param(ONE_PROCESS, launcher_twice, id="a launcher of one, twice"),
        pytest.param(TWO_RANKS, launcher_twice, id="a launcher of two, twice"),
        pytest.param(TWO_RANKS, all_at_once(signal.SIGTERM), id="two and their launcher"),
        pytest.param(Run, all_at_once(signal.SIGINT), id="Ctrl-C"),
        pytest.param(TWO_RANKS, all_at_once(signal.SIGINT), id="Ctrl-C of two"),
    ],
)
def test_a_run_stopped_by_a_signal_saves_a_checkpoint_of_its_last_step(start, tell, tiny_model, texts, tmp_path):
    with start([*model_flags(tiny_model, texts), *ENDLESS], tmp_path) as run:
        run.wait_for_output("step 5/")
        tell(run)
        output = run.end()
    assert assert_resumable(tmp_path, "interrupted" if "SIGINT" in output else "preempted") >= 5
    assert "at step" in output and "run the same command again" in output
    assert start is not Run or (run.process.returncode == EXIT_CODE == 75 and "Traceback" not in output)


def test_a_second_ctrl_c_raises_keyboard_interrupt_at_once(capfd):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = StopRequest()
    stop.step = 1
    try:
        stop.defer()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == "SIGINT" and "press Ctrl-C again to kill the run" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_during_the_imports_of_train_py_ends_the_run_before_the_first_step(tiny_model, texts, tmp_path):
    """psutil is the first library that it imports."""
    (tmp_path / "psutil.py").write_text(
        "import os, signal, sys\n"
        "print(*sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.path.remove(os.path.dirname(__file__))\ndel sys.modules['psutil']\nimport psutil\n"
    )
    flags = [*model_flags(tiny_model, texts), *STEPS, "--output_dir", str(tmp_path / "out")]
    done = python(SCRIPT, *flags, PYTHONPATH=tmp_path)
    assert done.stdout.split() == [str(int(number)) for number in sorted(PASSED_ON)]
    assert done.returncode == EXIT_CODE and "told to stop by SIGTERM" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()
