"""Files of a run and of its libraries where a machine offers fewer places than usual."""

import errno

import pytest

from launch.host.files import storage_failure
from tests.support.running import train_here


def test_the_variable_that_moves_a_cache_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "mine"))
    for folder, is_cache in ((".cache/huggingface/hub", True), ("mine/datasets", True), ("elsewhere", False)):
        failed = storage_failure(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / folder)))
        assert bool(failed and failed.remedy.startswith("Set HF_HOME ")) == is_cache


@pytest.mark.slow
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
