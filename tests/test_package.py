"""The wheel: complete outside the checkout."""

import email
import os
import subprocess
import sys
import zipfile

import pytest
import yaml

from recipes.run.files import shipped
from tests.support.running import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    words = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    built = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if built.returncode and not os.environ.get("CI"):
        pytest.skip("the build backend cannot be installed here")
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def test_it_brings_two_packages_and_no_azureml(installed):
    assert sorted(path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")) == [
        "accelerate_recipes.py",
        "launch",
        "recipes",
    ]


def test_its_metadata_are_whole(installed):
    text = next(installed.glob("*.dist-info/METADATA")).read_text()
    head, _, description = text.partition("\n\n")
    fields = email.message_from_string(head)
    assert {"Author", "Summary", "Keywords", "License-Expression", "License-File", "Requires-Python"} <= set(fields)
    assert "Typing :: Typed" in fields.get_all("Classifier") and (installed / "recipes" / "py.typed").exists()
    assert fields["Description-Content-Type"] == "text/markdown" and description.startswith("# accelerate-recipes")


def test_every_accelerate_yaml_travels_with_it(installed):
    names = {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    assert {path.name for path in (installed / "recipes" / "accelerate_configs").glob("*.yaml")} == names


def test_the_template_of_the_scaling_report_travels_with_it(installed):
    assert (installed / "launch" / "scaling" / "page.html").read_text() == (
        ROOT / "launch" / "scaling" / "page.html"
    ).read_text()


def test_a_memory_recipe_finds_its_engine_outside_the_checkout(installed, tmp_path):
    words = [sys.executable, "-m", "launch", "show", "memory"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert "DeepSpeed ZeRO-2, optimizer offload" in done.stdout, done.stderr


def test_a_job_for_azure_uploads_what_a_clone_uploads(installed, tmp_path):
    words = "submit azureml --compute c --data azureml:rows:1 --dry_run --output job.yaml -- --max_steps 4".split()
    content = {}
    for name, packages in (("wheel", installed), ("clone", ROOT)):
        folder = tmp_path / name
        folder.mkdir()
        command = [sys.executable, "-m", "launch", *words]
        environment = {**os.environ, "PYTHONPATH": str(packages)}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        assert done.returncode == 0, done.stderr
        content[name] = {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert content["wheel"] == content["clone"] and len(content["clone"]) > 100


@pytest.mark.parametrize("name", ["single", "standard", "fast", "memory", "memory_zero3", "sharded"])
def test_every_yaml_is_read_by_accelerate_itself(name):
    from accelerate.commands.config.config_args import load_config_from_file

    file = shipped(f"{name}.yaml")
    assert load_config_from_file(str(file)).num_processes == yaml.safe_load(file.read_text())["num_processes"]
