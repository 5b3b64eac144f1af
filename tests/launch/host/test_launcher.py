"""Our launcher: exit codes and signals arrive, and it prints hardly anything itself."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from launch.host import launcher
from launch.host.elastic import PRINTED
from launch.host.parent import LAUNCHER
from tests.support.running import ROOT
from tests.support.waiting import PATIENCE, wait_for

CONFIGS = ROOT / "accelerate_configs"
ONE = ["--config_file", str(CONFIGS / "single.yaml")]
TWO = ["--config_file", str(CONFIGS / "standard.yaml"), "--num_processes", "2", "--main_process_port", "0"]
WORLDS = pytest.mark.parametrize(
    "world", [pytest.param(ONE, marks=pytest.mark.slow, id="one process"), pytest.param(TWO, id="two")]
)


@pytest.fixture
def script(tmp_path):
    """Writes a training script, which needs no library of ours, and returns its path."""

    def written(code: str) -> str:
        (tmp_path / "script.py").write_text(f"import os, signal, sys, time\n{code}\n")
        return str(tmp_path / "script.py")

    return written


def launched(*words: str) -> tuple[int, str]:
    """The exit code of a launch, and all that was printed."""
    done = subprocess.run([sys.executable, str(LAUNCHER), *words], capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


@WORLDS
def test_a_rank_has_the_last_word_and_the_exit_code(world, script):
    code, output = launched(*world, script("if os.environ.get('RANK', '0') == '0': print('why'), sys.exit(75)"))
    assert (code, output) == (75, "why\n")


@WORLDS
def test_a_rank_that_was_killed_is_named(world, script):
    """The other one fails first in torch's eyes: it has lost its connection."""
    code, output = launched(
        *world, script("if os.environ.get('RANK') == '0': sys.exit(1)\nos.kill(os.getpid(), signal.SIGSEGV)")
    )
    assert code == 128 + signal.SIGSEGV
    assert output.startswith(f"rank {1 if world is TWO else 0} was killed by SIGSEGV") and output.count("\n") == 1


@WORLDS
@pytest.mark.parametrize(
    ("number", "arrives", "code"),
    [
        (signal.SIGTERM, signal.SIGTERM, 75),
        pytest.param(signal.SIGUSR1, signal.SIGUSR1, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, signal.SIGTERM, 75, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGQUIT, signal.SIGKILL, 130, marks=pytest.mark.slow),
    ],
)
def test_signals_reach_the_ranks_and_their_exit_code_comes_back(world, number, arrives, code, script, tmp_path):
    """A terminal interrupts the launcher's whole process group."""
    ended = (
        "def end(number, frame):\n    open(f'{sys.argv[1]}/{os.getpid()}-{number}', 'w')\n"
        "    sys.exit(130 if number == signal.SIGINT else 75)\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT): signal.signal(number, end)\n"
        "open(f'{sys.argv[1]}/{os.getpid()}-ready', 'w')\ntime.sleep(600)"
    )
    words = [sys.executable, str(LAUNCHER), *world, script(ended), str(tmp_path)]
    ranks = 2 if world is TWO else 1
    with subprocess.Popen(
        words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        wait_for("all ranks", lambda: len(list(tmp_path.glob("*-ready"))) == ranks)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        assert process.wait(PATIENCE) == code
    told = len(list(tmp_path.glob(f"*-{int(arrives)}")))
    assert told == (0 if arrives == signal.SIGKILL else ranks)


@pytest.mark.parametrize("blocked", [False, True], ids=["while it listens", "before it listens"])
@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGTERM, 75, "told to stop before the training began: run the same command again\n"),
        (signal.SIGINT, 130, "interrupted\n"),
    ],
)
def test_a_signal_before_the_ranks_are_started_ends_at_once(number, code, line, blocked):
    """`recipes train` blocks signals until the launcher listens."""
    send, listen = f"os.kill(os.getpid(), {int(number)})", "Signals().listen()"
    block = f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])"
    steps = [block, send, listen] if blocked else [listen, send]
    words = "; ".join(["import os, signal, time; from launch.host.launcher import Signals", *steps, "time.sleep(600)"])
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (code, line)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGTERM, "told to stop before"), (signal.SIGKILL, "")])
def test_a_rank_that_a_signal_has_ended_while_it_started_is_spoken_for(number, said, capsys):
    signals = SimpleNamespace(received={signal.SIGTERM}, exit_code=75)
    signals.say_why = lambda: launcher.Signals.say_why(signals)
    assert launcher._exit_code(0, -number, signals) == 75
    printed = capsys.readouterr().err
    assert printed.startswith(said) and bool(printed) == bool(said)


@pytest.mark.slow
@WORLDS
def test_a_rank_that_was_told_to_stop_before_it_listened_ends_as_if_it_had(world, script):
    code, output = launched(*world, script("os.kill(os.getpid(), signal.SIGTERM)"))
    assert (code, output) == (75, "told to stop before the training began: run the same command again\n")


ACCELERATES_OWN = {
    "an unknown flag": (["--num_proceses", "2"], "num_proceses"),
    "a file that is not there": (["--config_file", "nowhere.yaml"], "nowhere.yaml"),
    "a misspelt key": (["--config_file", "{folder}/mine.yaml"], "num_proceses"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCELERATES_OWN)
def test_a_mistake_of_accelerates_own_is_one_line(name, script, tmp_path):
    words, printed = ACCELERATES_OWN[name]
    (tmp_path / "mine.yaml").write_text((CONFIGS / "standard.yaml").read_text() + "num_proceses: 2\n")
    code, output = launched(*(word.format(folder=tmp_path) for word in words), script("print('started')"))
    assert (code, output.count("\n")) == (2, 1), output
    assert output.startswith("accelerate launch: ") and printed in output


# --- What torch elastic reports -------------------------------------------------------------------


def failed(exitcode: int, at: int = 100, **file: object) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode, timestamp=at, error_file_data={"message": "<NONE>", **file})


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: failed(2), 1: failed(-15, at=99)}, (0, 2)),  # torch ended rank 1
        ({0: failed(1), 1: failed(-9, at=101)}, (1, -9)),  # rank 0 lost its connection
        ({0: failed(1), 1: failed(-9, at=131)}, (0, 1)),  # torch lost its patience with rank 1
        ({0: failed(1), 1: failed(-6), 2: failed(1, at=103, printed=True)}, (2, 1)),  # rank 2 knows why
        ({0: failed(-15), 1: failed(-15, at=99)}, (1, -15)),
    ],
)
def test_the_root_cause(failures, expected):
    assert launcher._root_cause(SimpleNamespace(failures=failures)) == expected


@pytest.mark.parametrize(("first", "printed"), [(failed(1), "why\n"), (failed(1, **{PRINTED: True}), "")])
def test_a_message_that_nobody_printed_is_printed(first, printed, capsys):
    waiting = failed(-15, **{PRINTED: False, "message": {"message": "why"}})
    launcher._print_untold(SimpleNamespace(failures={0: first, 1: waiting}))
    assert capsys.readouterr().err == printed
