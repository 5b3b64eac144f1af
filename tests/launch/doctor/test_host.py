"""The doctor's checks of limits, disks and /dev/shm that are not this machine's."""

import resource

import pytest

from launch.doctor import host
from tests.support.doctor import requested


def test_a_cache_that_is_a_file_is_named_with_its_variable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    check = host.caches(requested())
    assert check.status == "error" and "(HF_HOME) cannot be written" in check.found and "export HF_HOME=" in check.fix


def test_a_cache_that_would_be_made_is_judged_by_the_folder_around_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "not" / "yet"))
    assert host.caches(requested()).status != "error"
    assert not (tmp_path / "not").exists()


def test_a_cache_that_is_read_offline_need_not_be_writable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert host.caches(requested()).status == "warning"


@pytest.mark.parametrize(("free", "status"), [(1 << 29, "error"), (5 << 30, "warning"), (1 << 40, "ok")])
def test_free_space_is_a_number_of_bytes(free, status, monkeypatch):
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    check = host.caches(requested())
    assert check.status == status
    assert list(check.numbers.values()) == [{"value": free, "unit": "bytes"}]


def test_a_missing_shared_memory_is_an_error_with_its_own_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_SHARED_MEMORY", tmp_path / "shm")
    check = host.shared_memory(requested())
    assert (check.status, "mount -t tmpfs" in check.fix) == ("error", True)


@pytest.mark.parametrize(
    ("which", "soft", "hard", "status", "fix"),
    [
        (resource.RLIMIT_NOFILE, 256, 20000, "warning", "`ulimit -S -n 20000`"),
        (resource.RLIMIT_NOFILE, 24, resource.RLIM_INFINITY, "error", "`ulimit -S -n 65536`"),
        (resource.RLIMIT_NOFILE, 256, 256, "warning", "a higher hard limit than 256"),
        (resource.RLIMIT_AS, 1 << 30, resource.RLIM_INFINITY, "error", "`ulimit -S -v unlimited`"),
        (resource.RLIMIT_FSIZE, 0, 1 << 40, "error", f"`ulimit -S -f {1 << 30}`"),
        (resource.RLIMIT_CPU, 3600, resource.RLIM_INFINITY, "warning", "`ulimit -S -t unlimited`"),
    ],
)
def test_a_low_limit_is_raised_as_far_as_one_may(which, soft, hard, status, fix, monkeypatch):
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (soft, hard) if asked == which else none)
    check = host.limits(requested())
    assert check.status == status and fix in check.fix


def test_a_missing_compiler_is_a_warning(monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(host.shutil, "which", lambda *_, **__: None)
    check = host.compiler(requested())
    assert check.status == "warning" and "g++" in check.found and "ninja" in check.found
