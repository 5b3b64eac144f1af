"""The cores of a process: its affinity, or its container's share of time if that is less."""

import pytest

from recipes.run import hardware


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1), ("6400000 100000", 8)],
)
def test_a_limit_of_the_container_counts(limit, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert hardware.usable_cores(tmp_path / "cpu.max") == 8
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert hardware.usable_cores(tmp_path / "cpu.max") == cores


PEAKS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "Tesla V100-SXM2-16GB": None,
    "NVIDIA RTX A1000 Laptop GPU": None,
}


@pytest.mark.parametrize("name", PEAKS)
def test_a_peak_is_claimed_only_for_a_whole_card_with_bf16_that_is_listed(name):
    assert hardware.Hardware((hardware.Gpu(name, (8, 0), 2**30),)).peak_flops == PEAKS[name]
