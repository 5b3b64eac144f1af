"""Processes that a command starts: what they find and leave, and that none outlives the command."""

import os
import subprocess
import sys

import psutil
import pytest

from launch.host import processes
from tests.support.running import ROOT, python
from tests.support.waiting import wait_for


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that is found through the user's own PYTHONPATH, and returns its name."""

    def write(source: str) -> str:
        (tmp_path / "some_module.py").write_text(source)
        return "some_module"

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return write


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ASKED = """
import launch, os, sys, yaml
from launch.host import processes
def main(asked, folder):
    if not asked:
        sys.exit("no answer")
    processes.answer(folder, [asked, launch.__file__, os.environ["PYTHONPATH"], yaml.YAMLError.__name__])
"""


def test_a_child_process_imports_our_package_and_answers_or_ends_with_its_exit_code(module, tmp_path, monkeypatch):
    """PYTHONPATH stays the user's, and no file where the command was typed hides a library."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "yaml.py").write_text("raise SystemExit('the wrong yaml')")
    monkeypatch.chdir(tmp_path / "here")
    with processes.ask(module(ASKED), [1, 0]) as children:
        for _ in processes.watch(children):
            pass
        assert [(child.answer, child.end()) for child in children] == [
            ([1, str(ROOT / "launch" / "__init__.py"), str(tmp_path), "YAMLError"], "exit code 0"),
            (None, "no answer\nexit code 1"),
        ]
    assert not any(child.folder.exists() for child in children)


FAMILY = """
import os, subprocess, sys, time
def main(asked, folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)
"""


def test_an_interrupt_while_child_processes_work_ends_them_and_their_children(module):
    with pytest.raises(KeyboardInterrupt), processes.ask(module(FAMILY), [None]) as (child,):
        wait_for("the process to start a child", child.end)
        pids = [int(word) for word in child.end().split()]
        raise KeyboardInterrupt
    wait_for("the end of both", lambda: not any(map(alive, pids)))


def test_a_child_process_dies_with_its_parent(module):
    script = "import sys, time; from launch.host import processes\n"
    script += "with processes.ask(sys.argv[1], [None]) as (child,):\n"
    script += "    while not (line := child.end()): time.sleep(0.1)\n"
    script += "    print(line, flush=True)\n    time.sleep(600)"
    search = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])
    words = [sys.executable, "-c", script, module(FAMILY)]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": search}, stdout=subprocess.PIPE) as parent:
        pid, child = (int(word) for word in parent.stdout.readline().split())
        parent.kill()
    wait_for("the end of the process", lambda: not alive(pid))
    psutil.Process(child).kill()


def test_the_function_exit_with_calls_atexit_functions_and_exits_with_the_code_that_main_returns():
    own = "atexit.register(print, 'a tracker has uploaded the run', flush=True); return 75"
    script = f"import atexit\nfrom launch.host.files import exit_with\ndef main():\n    {own}\nexit_with(main)"
    done = python("-c", script)
    assert (done.returncode, done.stdout) == (75, "a tracker has uploaded the run\n"), done.stderr
