"""A compilation can be stopped, and the lock of one that was killed is not waited for."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock
from torch.utils import cpp_extension

from launch.host.world import compile_safely
from tests.support.stopping import Run
from tests.support.waiting import PATIENCE, wait_for


def test_a_compilation_waits_for_another_until_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(cpp_extension, "load", lambda name, build_directory: name)
    compile_safely.__wrapped__()
    torchs = tmp_path / "lock"
    torchs.touch()  # left by a program that was killed: torch would wait for its removal

    def hold(taken):
        with FileLock(tmp_path / "flock"):
            taken.set()
            time.sleep(10 * PATIENCE)

    fork = multiprocessing.get_context("fork")
    taken = fork.Event()
    process = fork.Process(target=hold, args=(taken,), daemon=True)
    process.start()
    with ThreadPoolExecutor() as pool:
        assert taken.wait(PATIENCE)
        compiled = pool.submit(cpp_extension.load, "adam", build_directory=str(tmp_path))
        time.sleep(1)
        waits = not compiled.done()
        process.kill()
        assert waits and compiled.result(PATIENCE) == "adam" and not torchs.exists()


@pytest.mark.slow
def test_ctrl_c_ends_a_compilation_and_what_it_started(tmp_path, monkeypatch):
    ninja = tmp_path / "bin" / "ninja"
    ninja.parent.mkdir()
    ninja.write_text(f"#!/bin/sh\n[ $1 = --version ] && exec echo 1.11\nsleep 5000 &\necho $! > {tmp_path}/pid\nwait")
    ninja.chmod(0o755)
    monkeypatch.setenv("PATH", str(ninja.parent), prepend=os.pathsep)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    with Run(["--recipe", "memory", "--use_cpu", "true", "--max_steps", "1"], tmp_path / "out") as run:
        wait_for("the compiler", (tmp_path / "pid").exists)
        run.process.send_signal(signal.SIGINT)
        output = run.end()
    assert run.process.returncode == 130, output
    status = Path(f"/proc/{int((tmp_path / 'pid').read_text())}/status")
    wait_for("the compiler's end", lambda: not status.exists() or "zombie" in status.read_text())
