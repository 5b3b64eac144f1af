"""The lock of a compilation that was killed is not waited for."""

import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor

from filelock import FileLock
from torch.utils import cpp_extension

from launch.host.world import compile_safely
from tests.support.waiting import PATIENCE


def test_a_cpp_extension_build_waits_for_another_and_continues_once_the_other_is_killed(tmp_path, monkeypatch):
    def load(name, build_directory):
        baton = cpp_extension.FileBaton(f"{build_directory}/lock")
        assert baton.try_acquire()
        baton.release()
        return name

    monkeypatch.setattr(cpp_extension, "load", load)
    compile_safely.__wrapped__()
    torchs = tmp_path / "lock"
    torchs.touch()  # of a program that was killed, for which torch would wait, or of one that compiles

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
        assert waits and compiled.result(PATIENCE) == "adam" and torchs.exists()
