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


def output_of(name: str, *arguments: object, log: Path) -> tuple[int, list[str]]:
    """The exit code of a module that is started, and the last lines of its log."""
    with processes.group() as group:
        group.append(processes.start_module(name, *arguments, log=log))
        code = group[0].wait(300)
    return code, processes.last_lines(log, 3)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_module_gets_its_arguments_as_text_and_its_result_is_the_exit_code(module, tmp_path):
    name = module("def main(first, second):\n    print(first + second)\n    return 3\n")
    assert output_of(name, 1, tmp_path, log=tmp_path / "log") == (3, [f"1{tmp_path}"])


def test_each_child_finds_its_request_and_leaves_an_answer_or_its_last_words(module):
    asked = "    asked = processes.request(folder)\n    if not asked:\n        sys.exit('no answer')\n"
    source = f"import sys\nfrom launch.host import processes\ndef main(folder):\n{asked}"
    with processes.ask(module(f"{source}    processes.answer(folder, [asked])\n"), [1, 0]) as children:
        for _ in processes.watch([child.process for child in children]):
            pass
        assert [(child.answer, child.end()) for child in children] == [
            ([1], "exit code 0"),
            (None, "no answer\nexit code 1"),
        ]
    assert not any(child.folder.exists() for child in children)


def test_our_packages_are_found_and_pythonpath_stays_the_users(module, tmp_path):
    source = "import launch, os\ndef main():\n    print(launch.__file__)\n    print(os.environ['PYTHONPATH'])\n"
    found = output_of(module(source), log=tmp_path / "log")
    assert found == (0, [str(ROOT / "launch" / "__init__.py"), str(tmp_path)])


def test_a_file_of_the_user_that_is_named_like_a_library_is_not_taken_for_it(module, tmp_path, monkeypatch):
    name = module("import yaml\ndef main():\n    print(yaml.YAMLError.__name__)\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "yaml.py").write_text("raise SystemExit('the wrong yaml')")
    monkeypatch.chdir(tmp_path / "here")
    assert output_of(name, log=tmp_path / "log") == (0, ["YAMLError"])


def test_an_error_is_the_last_line_of_the_log(module, tmp_path):
    code, lines = output_of(module("def main():\n    raise OSError('no disk')\n"), log=tmp_path / "log")
    assert (code, lines[-1]) == (1, "OSError: no disk")
    assert processes.how_it_ended(1) == "exit code 1" and processes.how_it_ended(-15) == "killed by SIGTERM"


_FAMILY = """
import subprocess, sys, time
def main():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_the_end_of_a_group_ends_what_its_processes_started(module, tmp_path):
    log = tmp_path / "log"
    with pytest.raises(KeyboardInterrupt), processes.group() as group:
        group.append(processes.start_module(module(_FAMILY), log=log))
        wait_for("the process to start a child", lambda: processes.last_lines(log, 1))
        raise KeyboardInterrupt
    child = int(processes.last_lines(log, 1)[0])
    assert not alive(group[0].pid)
    wait_for("the end of the child", lambda: not alive(child))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_a_process_dies_with_the_one_that_started_it(module, tmp_path):
    log = tmp_path / "log"
    name = module("import os, time\ndef main():\n    print(os.getpid(), flush=True)\n    time.sleep(600)\n")
    script = "import sys, time; from pathlib import Path; from launch.host import processes\n"
    script += "processes.start_module(sys.argv[1], log=Path(sys.argv[2])); time.sleep(600)"
    search = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])
    words = [sys.executable, "-c", script, name, str(log)]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": search}) as parent:
        wait_for("the process to start", lambda: log.exists() and processes.last_lines(log, 1))
        parent.kill()
    pid = int(processes.last_lines(log, 1)[0])
    wait_for("the end of the process", lambda: not alive(pid))
