"""The cores of a process: its affinity, or its container's share of time if that is less."""

import pytest

from recipes.run import hardware


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("6400000 100000", 8)],
)
def test_a_cpu_limit_of_the_container_lowers_usable_cores(limit, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert hardware.usable_cores(tmp_path / "cpu.max") == 8
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert hardware.usable_cores(tmp_path / "cpu.max") == cores
