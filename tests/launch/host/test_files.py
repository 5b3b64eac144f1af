"""A library's cache that cannot be written is the machine's failure, with the variable to set."""

import errno
import os

import pytest

from launch.host.files import storage_failure
from tests.support.running import train_here


@pytest.mark.parametrize(
    ("folder", "is_cache"),
    [(".cache/huggingface/hub", True), (".triton/cache", True), ("mine/datasets", True), ("elsewhere", False)],
)
def test_the_variable_that_moves_a_cache_is_named(folder, is_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "mine"))
    error = RuntimeError("the operator failed to build")
    error.__cause__ = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / folder))
    failed = storage_failure(error)
    assert bool(failed) == is_cache
    assert not is_cache or (str(tmp_path / folder) in failed.what and failed.remedy.startswith("Set HF_HOME "))


def test_a_file_that_a_cache_lacks_is_not_the_caches_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert storage_failure(FileNotFoundError(errno.ENOENT, "No such file or directory", str(tmp_path / "hub"))) is None


def test_a_file_is_not_blamed_for_the_cache_of_its_reader(tiny_model, texts, tmp_path, monkeypatch):
    import datasets

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "file" / "datasets"))
    outcome = train_here(tiny_model, texts, tmp_path / "out", "--max_steps", "1")
    assert outcome.code == 1 and "cannot be read as json" not in outcome.output
    assert f"{tmp_path}/file/datasets" in outcome.output and "Not a directory. " in outcome.output


def test_without_a_home_folder_a_run_is_trained(tiny_model, texts, tmp_path, monkeypatch):
    """As in a container that runs as any number."""

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    for variable in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "HF_DATASETS_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert train_here(tiny_model, texts, tmp_path / "out", "--max_steps", "1").code == 0
