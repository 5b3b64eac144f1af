"""Processes that a command starts: what they find and leave, and that none outlives the command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.host import processes
from tests.support.running import ROOT
from tests.support.waiting import wait_for


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that is found through the user's own PYTHONPATH, and returns its name."""

    def write(source: str) -> str:
        (tmp_path / "some_module.py").write_text(source)
        return "some_module"

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return write


def output_of(name: str) -> tuple[int | None, list[str]]:
    """The exit code of a module that is asked nothing, and the last lines of its log."""
    with processes.ask(name, [None]) as (child,):
        return child.process.wait(300), child.last_lines(3)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_child_finds_its_request_and_leaves_an_answer_or_its_last_words(module):
    asked = "    asked = processes.request(folder)\n    if not asked:\n        sys.exit('no answer')\n"
    source = f"import sys\nfrom launch.host import processes\ndef main(folder):\n{asked}"
    with processes.ask(module(f"{source}    processes.answer(folder, [asked])\n"), [1, 0]) as children:
        for _ in processes.watch(children):
            pass
        assert [(child.answer, child.end()) for child in children] == [
            ([1], "exit code 0"),
            (None, "no answer\nexit code 1"),
        ]
    assert not any(child.folder.exists() for child in children)


def test_our_packages_are_found_and_pythonpath_stays_the_users(module, tmp_path):
    show = "print(launch.__file__, os.environ['PYTHONPATH'], sep='\\n')"
    source = f"import launch, os\ndef main(_):\n    {show}\n    return 3\n"
    assert output_of(module(source)) == (3, [str(ROOT / "launch" / "__init__.py"), str(tmp_path)])


def test_a_file_of_the_user_that_is_named_like_a_library_is_not_taken_for_it(module, tmp_path, monkeypatch):
    name = module("import yaml\ndef main(_):\n    print(yaml.YAMLError.__name__)\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "yaml.py").write_text("raise SystemExit('the wrong yaml')")
    monkeypatch.chdir(tmp_path / "here")
    assert output_of(name) == (0, ["YAMLError"])


FAMILY = """
import subprocess, sys, time
def main(folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_the_end_of_the_block_ends_what_its_processes_started(module):
    with pytest.raises(KeyboardInterrupt), processes.ask(module(FAMILY), [None]) as (child,):
        wait_for("the process to start a child", lambda: child.last_lines(1))
        started = int(child.last_lines(1)[0])
        raise KeyboardInterrupt
    assert not alive(child.process.pid)
    wait_for("the end of the child", lambda: not alive(started))


def test_a_process_dies_with_the_one_that_started_it(module, tmp_path):
    name = module("import os, sys, time\ndef main(_):\n    print(os.getpid(), flush=True)\n    time.sleep(600)\n")
    script = "import sys, time; from launch.host import processes\n"
    script += "with processes.ask(sys.argv[1], [None]) as (child,):\n"
    script += "    while not (lines := child.last_lines(1)): time.sleep(0.1)\n"
    script += "    print(*lines, flush=True)\n    time.sleep(600)"
    search = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])
    words = [sys.executable, "-c", script, name]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": search}, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_for("the end of the process", lambda: not alive(pid))
