"""Our launcher: exit codes and signals arrive, and it prints hardly anything itself."""

import contextlib
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from launch.host import signals
from launch.host.launcher import LAUNCHER, _first_to_fail
from launch.host.processes import free_port
from tests.support.running import ROOT, python
from tests.support.waiting import PATIENCE, wait_for

CONFIGS = ROOT / "accelerate_configs"
ONE = ["--config_file", str(CONFIGS / "single.yaml")]
TWO = ["--config_file", str(CONFIGS / "standard.yaml"), "--num_processes", "2", "--main_process_port", "0"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
STOPPED = "told to stop: run the same command again to resume\n"


@pytest.fixture
def script(tmp_path):
    """Writes a training script, which needs no library of ours, and returns its path."""

    def written(code: str) -> str:
        (tmp_path / "script.py").write_text(f"import os, signal, sys, time\n{code}\n")
        return str(tmp_path / "script.py")

    return written


KILLED = "if os.environ.get('RANK') == '0': sys.exit(1)\nos.kill(os.getpid(), signal.SIGSEGV)"
TOLD = "os.kill(os.getpid(), signal.SIGTERM)"
SAVES = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))"
FAILED = f"{SAVES}\nif os.environ['RANK'] == '0': time.sleep(60)\ntime.sleep(1), print('why'), sys.exit(1)"
SPOKEN = "if os.environ.get('RANK', '0') == '0': print('why'), sys.exit(75)"


@pytest.mark.parametrize(
    ("zero", "one", "first"), [((75, 1), (1, 2), 75), ((75, 2), (1, 2), 1), ((1, 1), (-11, 2), -11)]
)
def test_the_launcher_reports_the_first_failed_rank_and_not_one_that_failed_because_of_it(zero, one, first):
    # Exit codes of two ranks, each with the second in which torch saw it.
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=at) for rank, (code, at) in enumerate((zero, one))}
    assert _first_to_fail(SimpleNamespace(failures=failures))[1] == first


@pytest.mark.parametrize(
    ("world", "code", "exit_code", "printed"),
    [
        pytest.param(ONE, SPOKEN, 75, "why\n", marks=pytest.mark.slow),
        pytest.param(TWO, SPOKEN, 75, "why\n", marks=pytest.mark.slow),
        pytest.param(ONE, KILLED, 128 + signal.SIGSEGV, "rank 0 was killed by SIGSEGV\n", marks=pytest.mark.slow),
        (TWO, KILLED, 128 + signal.SIGSEGV, "rank 1 was killed by SIGSEGV\n"),  # rank 0 ends before it
        pytest.param(TWO, FAILED, 1, "why\n", marks=pytest.mark.slow),
        pytest.param(ONE, TOLD, 75, STOPPED, marks=pytest.mark.slow),  # before it listened
        pytest.param(TWO, TOLD, 75, STOPPED, marks=pytest.mark.slow),
    ],
)
def test_the_launcher_ends_with_the_failed_ranks_message_and_exit_code(world, code, exit_code, printed, script):
    done = python(LAUNCHER, *world, script(code), PYTHONPATH=ROOT)
    output = done.stdout + done.stderr
    assert done.returncode == exit_code
    assert output.startswith(printed) and output.count("\n") == 1, output


@pytest.mark.parametrize(
    ("world", "number", "code"),
    [
        (TWO, signal.SIGTERM, 75),
        *(
            pytest.param(world, *signals, marks=pytest.mark.slow)
            for world in (ONE, TWO)
            for signals in ((signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130))
        ),
    ],
)
def test_signals_reach_the_ranks_and_a_second_ctrl_c_kills_them(world, number, code, script, tmp_path):
    """A terminal interrupts the launcher's whole process group."""
    ended = (
        "def end(number, frame):\n    open(f'{sys.argv[1]}/{os.getpid()}-{number}', 'w')\n"
        "    if number != signal.SIGINT: sys.exit(75)\n"
        "for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT): signal.signal(number, end)\n"
        "open(f'{sys.argv[1]}/{os.getpid()}-ready', 'w')\nwhile True: time.sleep(600)"
    )
    words, ranks = [sys.executable, str(LAUNCHER), *world, script(ended), str(tmp_path)], 2 if world is TWO else 1
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    tell = os.killpg if number == signal.SIGINT else os.kill
    with subprocess.Popen(words, start_new_session=True, **quiet) as process:
        wait_for("all ranks", lambda: len(list(tmp_path.glob("*-ready"))) == ranks)
        tell(process.pid, number)
        wait_for("the signal in all", lambda: len(list(tmp_path.glob(f"*-{int(number)}"))) == ranks)
        while number == signal.SIGINT and process.poll() is None:
            tell(process.pid, number)  # once more if the launcher slept: the kernel merges equal pending signals
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        assert process.wait(PATIENCE) == code


@pytest.mark.parametrize(
    ("number", "code", "line"), [(signal.SIGTERM, 75, STOPPED), (signal.SIGINT, 130, "interrupted\n")]
)
def test_a_signal_before_the_ranks_start_ends_the_launcher_at_once(number, code, line):
    """`recipes train` blocks signals until the launcher listens."""
    words = "import os, signal, time; from launch.host.launcher import listen; "
    words += f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}]); os.kill(os.getpid(), {int(number)}); "
    done = python("-c", f"{words} listen(); time.sleep(600)")
    assert (done.returncode, done.stdout + done.stderr) == (code, line)


@pytest.mark.slow
def test_a_signal_ends_a_launcher_that_waits_for_an_absent_node(script):
    """torch waits in C++, where no handler of Python's runs."""
    port = free_port()
    words = [*TWO[:2], "--num_machines", "2", "--machine_rank", "0", "--num_processes", "2"]
    words += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port), script("")]
    process = subprocess.Popen([sys.executable, str(LAUNCHER), *words])
    try:
        wait_for("the rendezvous", lambda: any(one.laddr.port == port for one in psutil.net_connections()))
        process.terminate()
        assert process.wait(PATIENCE) == 75
    finally:
        process.kill()


def test_a_failed_rank_keeps_silent_only_if_another_rank_reports_the_error(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert signals.is_spoken_for(met_by_all=True) and not signals.is_spoken_for(), "nobody ends this rank"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/nowhere")
    monkeypatch.setattr(signals, "_PATIENCE_SECONDS", 0)
    assert not signals.is_spoken_for(met_by_all=True), "the first rank has not met the error"


# --- What a rank knows of its launcher ------------------------------------------------------------

SHOW = "from launch.host.launcher import own_threads; os.write(1, f'own {own_threads()}\\n'.encode())"


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "own"), [({}, "None"), ({"OMP_NUM_THREADS": "4"}, "4")])
@pytest.mark.parametrize("words", [[*ACCELERATE, *TWO], TORCHRUN], ids=["accelerate", "torchrun"])
def test_omp_num_threads_set_by_a_launcher_is_not_taken_for_the_users_value(words, asked, own, script, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    printed = python(*words[1:], script(SHOW), PYTHONPATH=ROOT, **asked).stdout.splitlines()
    assert [line for line in printed if line.startswith("own")] == [f"own {own}"] * 2
