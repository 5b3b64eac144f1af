"""Our launcher: exit codes and signals arrive, and it prints hardly anything itself."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from launch.host import launcher
from launch.host.launcher import LAUNCHER
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


@pytest.mark.slow
@WORLDS
def test_a_rank_that_was_told_to_stop_before_it_listened_ends_as_if_it_had(world, script):
    code, output = launched(*world, script("os.kill(os.getpid(), signal.SIGTERM)"))
    assert (code, output) == (75, "told to stop before the training began: run the same command again\n")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["nowhere.yaml", "mine.yaml"])
def test_a_mistake_in_accelerates_yaml_is_one_line(file, script, tmp_path):
    (tmp_path / "mine.yaml").write_text((CONFIGS / "standard.yaml").read_text() + "num_proceses: 2\n")
    code, output = launched("--config_file", str(tmp_path / file), script("print('started')"))
    assert (code, output.count("\n")) == (2, 1), output
    assert output.startswith("accelerate launch: ") and ("nowhere" in output or "num_proceses" in output)


# --- What torch elastic reports -------------------------------------------------------------------


def failed(exitcode: int, at: int = 100, message: object = "<NONE>") -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode, timestamp=at, error_file_data={"message": message})


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: failed(2), 1: failed(-15, at=99)}, (0, 2)),  # torch ended rank 1
        ({0: failed(1), 1: failed(-9, at=101)}, (1, -9)),  # rank 0 lost its connection
        ({0: failed(1), 1: failed(-9, at=131)}, (0, 1)),  # torch lost its patience with rank 1
        ({0: failed(1), 1: failed(-6), 2: failed(1, at=103, message={})}, (2, 1)),  # rank 2 knows why
        ({0: failed(-15), 1: failed(-15, at=99)}, (1, -15)),
    ],
)
def test_the_root_cause(failures, expected):
    assert launcher._root_cause(SimpleNamespace(failures=failures)) == expected


# --- What a rank knows of its launcher ------------------------------------------------------------

SHOW = "import os; from launch.host.launcher import own_threads; os.write(1, f'own {own_threads()}\\n'.encode())"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def told(*argv, script, **environment):
    """The number of threads that each process of a launcher takes for a person's own."""
    surrounding = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment = {**surrounding, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([*argv, script(SHOW)], capture_output=True, text=True, env=environment)
    return sorted(line for line in done.stdout.splitlines() if line.startswith("own"))


@pytest.mark.parametrize("launcher", [[*ACCELERATE, *TWO], TORCHRUN], ids=["accelerate", "torchrun"])
def test_a_launchers_number_of_threads_is_not_a_persons(launcher, script):
    assert told(*launcher, script=script) == ["own None"] * 2
    assert told(*launcher, script=script, OMP_NUM_THREADS="1") == ["own 1"] * 2


@pytest.mark.slow
def test_the_flag_of_accelerate_launch_is_a_persons_choice(script):
    assert told(*ACCELERATE, *TWO, "--num-cpu-threads-per-process=2", script=script) == ["own 2"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("yaml", [[], ONE], ids=["plain", "single.yaml"])
def test_the_advice_for_one_process_in_place_of_two_starts_two(yaml, script):
    ask = "from launch.host.world import World, require_launcher; print(*require_launcher(World()), sep='')"
    words = [*ACCELERATE, *yaml, "--num_processes", "2"]
    alone = subprocess.run(
        [*words, script(ask)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert "Fix: accelerate launch --multi_gpu --num_processes 2" in alone.stdout, alone.stderr
    assert len(told(*words, "--multi_gpu", "--main_process_port", "0", script=script)) == 2


@pytest.mark.parametrize(("text", "threads"), [("4,2", 4), ("0", None), ("all", None), ("-1", None), ("", None)])
def test_values_that_openmp_takes_and_does_not_take(text, threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert launcher.own_threads() == threads


def test_torchs_box_ends_with_our_lines_and_the_rank_that_wrote_them(tmp_path, monkeypatch):
    """Though another has failed in the same second, or while this one explained its failure."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    lines = ["error  one: is wrong. Fix: this.", "error  two: is wrong, too. Fix: that."]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for since in (None, time.time() - 30):
        launcher.write_error_file("\n".join(lines), since)
        ranks = {rank: ProcessFailure(rank, 1, 2, file) for rank, file in enumerate(["", str(tmp_path / "error.json")])}
        failed = ChildFailedError("train.py", ranks)
        assert failed.get_first_failure()[0] == 1
        assert [line.strip() for line in str(failed).splitlines()[-3:-1]] == lines


def test_who_speaks_for_a_rank(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert launcher.is_spoken_for(met_by_all=True) and not launcher.is_spoken_for(), "nobody ends this rank"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/nowhere")
    monkeypatch.setattr(launcher, "_PATIENCE_SECONDS", 0)
    assert not launcher.is_spoken_for(met_by_all=True), "the first rank has not met the error"
