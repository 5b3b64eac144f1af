"""The wheel, installed: whole, in an empty folder, and beside others that have such packages."""

import email
import os
import shutil
import zipfile

import pytest

from tests.support.running import ROOT, python

RECIPES = "import sys; from accelerate_recipes import main; sys.exit(main())"
TORCHTUNE = 'raise ModuleNotFoundError("The recipes directory is not a package")\n'
RAISES = 'raise RuntimeError("imported")\n'


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder of installed packages that no test changes: the libraries are asked once for it."""
    folder, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    words = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    built = python("-m", "pip", *words)
    if built.returncode and not os.environ.get("CI"):
        pytest.skip("the build backend cannot be installed here")
    assert built.returncode == 0, built.stderr
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(site)
    return site


@pytest.fixture
def empty(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def recipes(*argv, cwd, path):
    """The installed command `recipes`, whose path does not begin with the current folder."""
    return python("-P", "-c", RECIPES, *argv, cwd=cwd, PYTHONPATH=path)


def install_beside(site, name, text):
    """Install another distribution `foreign` that has a package of this name."""
    (site / name).mkdir(parents=True, exist_ok=True)
    (site / name / "__init__.py").write_text(text)
    (site / "foreign-1.0.dist-info").mkdir(exist_ok=True)
    (site / "foreign-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (site / "foreign-1.0.dist-info" / "top_level.txt").write_text(f"{name}\n")
    (site / "foreign-1.0.dist-info" / "RECORD").write_text(f"{name}/__init__.py,,\n")


# --- The wheel ------------------------------------------------------------------------------------


def test_the_wheel_holds_its_packages_yaml_files_and_metadata(installed):
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"accelerate_recipes.py", "launch", "recipes"}, "a package azureml would hide Azure's own"
    for folder in ("accelerate_configs", "azureml"):
        shipped = {path.name for path in (ROOT / folder).glob("*.yaml")}
        assert {path.name for path in (installed / "recipes" / folder).glob("*.yaml")} == shipped
    assert (installed / "launch" / "scaling" / "page.html").exists() and (installed / "recipes" / "py.typed").exists()
    head, _, description = next(installed.glob("*.dist-info/METADATA")).read_text().partition("\n\n")
    fields = {"Author", "Summary", "Keywords", "License-Expression", "License-File", "Requires-Python"}
    assert fields <= set(email.message_from_string(head)) and description.startswith("# accelerate-recipes")


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
def test_commands_of_the_installed_wheel_run_from_an_empty_folder(words, answer, installed, empty):
    done = recipes(*words.split(), cwd=empty, path=installed)
    assert (done.returncode, answer in done.stdout) == (0, True), done.stdout + done.stderr


def test_an_azure_ml_job_uploads_the_same_files_from_the_wheel_as_from_a_git_clone(installed, tmp_path):
    words = "submit azureml --compute c --data azureml:rows:1 --dry_run --output job.yaml -- --max_steps 4"
    words = [*words.split(), "--model_name_or_path", "somebody/model"]
    content = []
    for packages in (installed, ROOT):
        folder = tmp_path / packages.name
        folder.mkdir()
        done = python("-m", "launch", *words, cwd=folder, PYTHONPATH=packages)
        assert done.returncode == 0, done.stderr
        content.append({file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()})
    assert content[0] == content[1] and len(content[0]) > 100


# --- Beside others --------------------------------------------------------------------------------


def test_the_wheel_works_where_another_distribution_installed_a_recipes_package(installed, tmp_path, empty):
    site = tmp_path / "site"
    install_beside(site, "recipes", TORCHTUNE)
    (site / "recipes" / "full_finetune.py").write_text("")
    shutil.copytree(installed, site, dirs_exist_ok=True)
    assert recipes("list", cwd=empty, path=site).returncode == 0
    assert python("-c", "from recipes import fast", cwd=empty, PYTHONPATH=site).returncode == 0


@pytest.mark.parametrize("name", ["recipes", "launch"])
def test_the_wheel_works_despite_a_recipes_or_launch_package_earlier_on_sys_path(name, installed, tmp_path, empty):
    """ROS 2's `launch`, or such a folder of the user's own: on PYTHONPATH, or the current one."""
    install_beside(tmp_path / "own", name, RAISES)
    install_beside(empty, name, RAISES)
    late = f"import sys; sys.path.append({str(installed)!r}); "  # site-packages come after PYTHONPATH
    path = tmp_path / "own"
    command = python("-P", "-c", late + RECIPES, "check", cwd=empty, PYTHONPATH=path)
    assert "legal: standard" in command.stdout, command.stderr
    script = python(installed / "launch" / "train.py", "--learning_rate", "x", cwd=empty, PYTHONPATH=path)
    assert "learning_rate: needs a number" in script.stderr
