"""A cache that cannot be written is told with the variable that moves it; a compilation can be
stopped, and the lock of one that was killed is not waited for.
"""

import errno
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from launch.host.caches import cache_problem, compile_safely
from launch.host.signals import EXIT_CODE
from tests.support.running import train_here
from tests.support.stopping import Run
from tests.support.waiting import PATIENCE, wait_for


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder in which nothing is set, and below which nothing can be made."""
    for variable in ("HF_HOME", "HF_DATASETS_CACHE", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache").write_text("a file where the folder would be")
    return tmp_path


def error_in(folder):
    """What making this folder raises, wrapped as libraries do."""
    try:
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise RuntimeError("the operator failed to build") from error
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("folder", "variable"),
    [
        (".cache/huggingface/datasets", "HF_HOME"),
        (".cache/huggingface/hub/models--gpt2", "HF_HOME"),
        (".cache/torch_extensions/py311", "TORCH_EXTENSIONS_DIR"),
    ],
)
def test_the_variable_that_moves_the_folder_is_named(folder, variable, home):
    problem = cache_problem(error_in(home / folder))
    assert (problem.subject, "cannot be written" in problem.what) == (variable, True)


def test_what_a_person_has_set_is_named(home, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(home / ".cache" / "mine"))
    assert cache_problem(error_in(home / ".cache" / "mine" / "json")).subject == "HF_DATASETS_CACHE"


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_folder_in_which_nothing_can_be_made_is_named(monkeypatch):
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", "/proc/x")
    problem = cache_problem(error_in(Path("/proc/x/datasets")))
    assert str(problem).startswith("HF_HOME: /proc/x/datasets cannot be written: No such file or directory.")


def test_a_file_that_a_cache_lacks_is_not_the_caches_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    missing = tmp_path / "cache" / "hub" / "model.safetensors"
    assert cache_problem(FileNotFoundError(errno.ENOENT, "No such file or directory", str(missing))) is None


def test_another_folder_is_no_cache(home):
    assert cache_problem(error_in(home / ".cache" / "elsewhere")) is None
    assert cache_problem(ValueError("anything")) is None


def test_a_full_disk_elsewhere_is_no_full_cache(home):
    assert cache_problem(OSError(errno.ENOSPC, "No space left on device")) is None


def test_a_file_is_not_blamed_for_the_cache_of_its_reader(tiny_model, texts, tmp_path, monkeypatch):
    import datasets

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file" / "datasets"))
    outcome = train_here(tiny_model, texts, tmp_path / "out", "--max_steps", "1")
    assert outcome.code == 2 and "cannot be read as json" not in outcome.output
    assert f"HF_DATASETS_CACHE: {tmp_path}/file/datasets cannot be written: Not a directory." in outcome.output


def test_the_default_folder_is_the_machines_fault(home, monkeypatch, tiny_model, texts, tmp_path):
    """Nobody has chosen it: the exit code is a failed run's, not that of a mistake."""
    import datasets

    default = home / ".cache" / "huggingface" / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", default)
    outcome = train_here(tiny_model, texts, tmp_path / "out", "--max_steps", "1")
    assert outcome.code == 1
    assert f"HF_HOME: {default} cannot be written: Not a directory. Fix: HF_HOME=FOLDER" in outcome.output


@pytest.fixture
def nobody(tmp_path, monkeypatch):
    """A user without a home folder, as in a container that runs as any number."""

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for variable in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "HF_DATASETS_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.chdir(tmp_path)


def test_without_a_home_a_run_is_checked_and_trained(nobody, tiny_model, texts, tmp_path):
    assert train_here(tiny_model, texts, tmp_path / "out", "--max_steps", "1").code == 0


def test_without_a_home_the_folder_is_named_where_libraries_make_it(nobody, tmp_path):
    (tmp_path / "~").write_text("a file where the folder would be")
    problem = cache_problem(error_in(tmp_path / "~" / ".cache" / "huggingface" / "datasets"))
    assert str(problem).startswith(f"HF_HOME: {tmp_path}/~/.cache/huggingface/datasets cannot be written")


def test_compiled_kernels_of_an_unknown_user_are_named_too(nobody, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kernels = tmp_path / f"torchinductor_uid_{os.getuid()}"
    kernels.write_text("a file where the folder would be")
    assert cache_problem(error_in(kernels / "fx")).subject == "TORCHINDUCTOR_CACHE_DIR"


# --- torch's compiler of C++ ----------------------------------------------------------------------


@pytest.fixture
def baton(tmp_path, monkeypatch):
    """torch's lock of a folder, once `compile_safely` has run."""
    from torch.utils import cpp_extension

    for name in ("FileBaton", "load"):
        monkeypatch.setattr(cpp_extension, name, getattr(cpp_extension, name))
    compile_safely()
    return cpp_extension.FileBaton(str(tmp_path / "lock"))


def holder(baton):
    """A process that has the lock, as one that compiles."""

    def hold(taken):
        baton.try_acquire()
        taken.set()
        time.sleep(10 * PATIENCE)

    fork = multiprocessing.get_context("fork")
    taken = fork.Event()
    process = fork.Process(target=hold, args=(taken,), daemon=True)
    process.start()
    assert taken.wait(PATIENCE)
    return process


def acquiring(baton):
    thread = threading.Thread(target=baton.try_acquire, daemon=True)
    thread.start()
    return thread


def test_a_compilation_waits_for_another_ones_lock_until_that_is_killed(baton, capfd):
    process = holder(baton)
    waiting = acquiring(baton)
    waiting.join(1)
    assert waiting.is_alive()
    process.kill()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    baton.release()
    assert not Path(baton.lock_file_path).exists()


def test_a_lock_of_plain_torch_without_a_maker_is_named_with_its_remedy(baton, tmp_path, capfd):
    (tmp_path / "lock").touch()
    waiting = acquiring(baton)
    said = []
    wait_for("a line", lambda: said.append(capfd.readouterr().err) or "waiting" in "".join(said))
    assert f"rm {tmp_path}/lock" in "".join(said)
    (tmp_path / "lock").unlink()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()


def test_a_lock_of_plain_torch_that_is_older_than_any_compilation_is_taken(baton, tmp_path):
    (tmp_path / "lock").touch()
    os.utime(tmp_path / "lock", (1, 1))
    assert baton.try_acquire()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_compilation_and_what_it_started(number, tmp_path, monkeypatch):
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text(f"#!/bin/sh\n[ $1 = --version ] && exec echo 1.11\nsleep 5000 &\necho $! > {tmp_path}/pid\nwait")
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", str(ninja.parent), prepend=os.pathsep)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    with Run(["--recipe", "memory", "--use_cpu", "true", "--max_steps", "1"], tmp_path / "out") as run:
        wait_for("the compiler", (tmp_path / "pid").exists)
        run.process.send_signal(number)
        output = run.end()
    assert run.process.returncode == (130 if number == signal.SIGINT else EXIT_CODE), output
    assert not list(tmp_path.glob("extensions/*/lock"))
    compiler = int((tmp_path / "pid").read_text())
    status = Path(f"/proc/{compiler}/status")
    wait_for("the compiler's end", lambda: not status.exists() or "zombie" in status.read_text())
