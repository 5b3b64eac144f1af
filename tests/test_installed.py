"""The installed package in an empty folder: alone, and beside others that have such packages."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_package import installed, wheel  # noqa: F401

RECIPES = "import sys; from accelerate_recipes import main; sys.exit(main())"
TORCHTUNE = 'raise ModuleNotFoundError("The recipes directory is not a package")\n'


@pytest.fixture
def site(installed, tmp_path):  # noqa: F811
    """A folder of installed packages that a test may change."""
    return Path(shutil.copytree(installed, tmp_path / "site"))


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def python(*argv, cwd, path):
    """Run Python in `cwd`, where `path` are the folders of packages, the first one first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "HOME": str(cwd)}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, cwd=cwd, env=environment)


def recipes(*argv, cwd, path):
    """The installed command `recipes`, whose path does not begin with the current folder."""
    return python("-P", "-c", RECIPES, *argv, cwd=cwd, path=path)


def install_beside(site, name, text):
    """Install another distribution `foreign` that has a package of this name."""
    (site / name).mkdir(parents=True, exist_ok=True)
    (site / name / "__init__.py").write_text(text)
    (site / "foreign-1.0.dist-info").mkdir(exist_ok=True)
    (site / "foreign-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (site / "foreign-1.0.dist-info" / "top_level.txt").write_text(f"{name}\n")
    (site / "foreign-1.0.dist-info" / "RECORD").write_text(f"{name}/__init__.py,,\n")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("list", "sharded"),
        ("show memory", "DeepSpeed ZeRO-2, optimizer offload"),
        ("check --recipe fast --num_processes 2", "legal: fast on DDP, 2 processes"),
        ("submit local --recipe fast --processes_per_node 2 --dry_run -- --max_steps 1", "/launch/train.py"),
        (
            "submit slurm --recipe memory --nodes 2 --gpus_per_node 4 --dry_run",
            "recipes/accelerate_configs/memory.yaml",
        ),
    ],
)
def test_a_command_works_from_an_empty_folder(words, answer, site, empty):
    done = recipes(*words.split(), cwd=empty, path=[site])
    assert (done.returncode, answer in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize("start", [["-P", "-c", RECIPES, "list"], ["{site}/launch/train.py", "--max_steps", "1"]])
@pytest.mark.parametrize("name", ["recipes", "launch"])
def test_a_package_that_has_overwritten_ours_is_named_with_the_fix(name, start, site, empty):
    install_beside(site, name, TORCHTUNE if name == "recipes" else '"""Another launch."""\n')
    done = python(*(word.format(site=site) for word in start), cwd=empty, path=[site])
    assert done.returncode == 2
    what = f"{site}/{name}/__init__.py was overwritten or removed with the package of this name of foreign"
    assert done.stderr.startswith(f"error  {name}: {what}")
    assert "Fix: pip install --force-reinstall --no-deps accelerate-recipes" in done.stderr
    assert done.stderr.count("\n") == 1


def test_one_that_was_removed_again_has_taken_our_file_along(site, empty):
    (site / "recipes" / "__init__.py").unlink()
    done = recipes("list", cwd=empty, path=[site])
    assert (done.returncode, "overwritten or removed" in done.stderr) == (2, True), done.stderr


def test_one_that_was_there_before_does_no_harm(installed, tmp_path, empty):  # noqa: F811
    site = tmp_path / "site"
    install_beside(site, "recipes", TORCHTUNE)
    (site / "recipes" / "full_finetune.py").write_text("")
    shutil.copytree(installed, site, dirs_exist_ok=True)
    assert recipes("list", cwd=empty, path=[site]).returncode == 0
    assert python("-c", "from recipes import fast", cwd=empty, path=[site]).returncode == 0
    doctor = "from launch.doctor.machine import versions; print(versions(None))"
    assert "foreign has a package recipes too" in python("-c", doctor, cwd=empty, path=[site]).stdout


@pytest.mark.parametrize("start", [["-P", "-c", RECIPES, "check"], ["{site}/launch/train.py", "--learning_rate", "x"]])
@pytest.mark.parametrize("name", ["recipes", "launch"])
def test_one_that_is_earlier_on_the_path_does_not_hide_ours(name, start, site, tmp_path, empty):
    """ROS 2's `launch`, or a project of the user's with such a folder."""
    install_beside(tmp_path / "own", name, 'raise RuntimeError("imported")\n')
    loader = "import sys; sys.path.append(sys.argv.pop(1)); "  # site-packages come after PYTHONPATH
    argv = [word.format(site=site) for word in start]
    if "-c" in argv:
        argv[2] = loader + argv[2]
        argv.insert(3, str(site))
    done = python(*argv, cwd=empty, path=[tmp_path / "own"])
    assert "imported" not in done.stderr
    assert "legal: standard" in done.stdout or "learning_rate: takes a number" in done.stderr


@pytest.mark.parametrize("name", ["recipes", "launch"])
def test_a_folder_in_the_current_folder_does_not_hide_ours(name, site, empty):
    (empty / name).mkdir()
    (empty / name / "__init__.py").write_text('raise RuntimeError("imported")\n')
    assert recipes("check", cwd=empty, path=[site]).returncode == 0
    done = python(f"{site}/launch/train.py", "--learning_rate", "x", cwd=empty, path=[site])
    assert "learning_rate: takes a number" in done.stderr
