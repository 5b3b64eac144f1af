"""The libraries are imported once after an install, in a process of its own; its answer is kept."""

import os
import subprocess
import sys

import pytest

from tests.support.running import ROOT
from tests.support.waiting import PATIENCE, wait_for

CODE = "from recipes import legal; import sys; print(len(legal.settings()), 'torch' in sys.modules)"


def start(home, *packages, code=CODE):
    """A process that asks for the legal settings, with `packages` before the installed ones."""
    path = os.pathsep.join(map(str, [ROOT, *packages]))
    environment = {**os.environ, "HF_HOME": str(home), "PYTHONPATH": path}
    printed = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], cwd=home.parent, env=environment, **printed)


def ask(home):
    """Its output, and what it printed to stderr."""
    return start(home).communicate(timeout=PATIENCE)


def kept_in(home):
    (file,) = (home / "accelerate-recipes").glob("legal-*.json")
    return file


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Two processes at once on an empty cache: the cache, and the output and stderr of each."""
    home = tmp_path_factory.mktemp("first") / "hf"
    both = [start(home), start(home)]
    return home, [process.communicate(timeout=PATIENCE) for process in both]


@pytest.fixture
def home(first, tmp_path):
    """A copy of the cache with the answer in it."""
    file = kept_in(first[0])
    copy = tmp_path / "hf" / "accelerate-recipes" / file.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(file.read_bytes())
    return tmp_path / "hf"


def test_after_an_install_only_one_of_two_processes_explains_why_the_first_check_is_slow(first):
    (output, errors), (other, others_errors) = first[1]
    assert output == other != ""
    (line,) = (errors + others_errors).splitlines()
    assert "once after an install" in line


def test_cached_library_settings_are_read_silently_and_without_importing_torch(first, home):
    output, errors = ask(home)
    assert output == first[1][0][0] and output.endswith("False\n") and errors == ""


def test_a_damaged_cache_of_library_settings_is_rebuilt(home):
    file = kept_in(home)
    whole = file.read_bytes()
    file.write_bytes(whole[:5000])
    ask(home)
    assert file.read_bytes() == whole


@pytest.mark.slow
def test_library_settings_are_read_even_if_their_cache_cannot_be_written(first, tmp_path):
    home = tmp_path / "hf"
    home.write_text("a file, so that no folder can be below it")
    assert ask(home)[0] == first[1][0][0]


@pytest.mark.slow
def test_library_settings_are_read_though_an_earlier_process_was_killed_before_it_cached_them(first, tmp_path):
    home = tmp_path / "hf"
    killed = start(home)
    wait_for("a lock", lambda: list(home.glob("accelerate-recipes/*.lock")))
    killed.kill()
    killed.communicate(timeout=PATIENCE)
    assert ask(home)[0] == first[1][0][0]


MISSING = "libcudart.so.13: cannot open shared object file"
FAILURES = [
    (f"raise ImportError({MISSING!r})", f"ImportError: {MISSING}"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
]


@pytest.mark.parametrize(("content", "said"), FAILURES, ids=["an error", "a signal"])
def test_a_torch_that_cannot_be_imported_is_an_error_with_a_fix(content, said, home, tmp_path):
    """Also where an answer of another torch is kept."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(content)
    code = "from launch.cli import main; import sys; sys.exit(main(['check']))"
    process = start(home, tmp_path, code=code)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and said in errors and "Traceback" not in errors
    assert "reinstall the package that fails" in errors
