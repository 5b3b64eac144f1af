"""What a probe run shows of GPUs and links that are not here, and why one failed."""

import signal

import pytest

from launch.doctor.links import compared, slowest_rank
from launch.doctor.probe import Report, failure_in
from tests.support.doctor import requested


@pytest.mark.parametrize(("speed", "status"), [(370e9, "warning"), (20e6, "ok"), (None, "ok")])
def test_bus_bandwidth_follows_the_nccl_tests_formula_and_warns_if_far_below_the_link_speed(speed, status):
    found = compared(0.5, 1e-5, 8_000_000, 4, "NVLink", speed)
    assert (found.status, found.numbers["all-reduce"]["value"]) == (status, 24_000_000)


def test_the_warning_about_a_slow_gpu_names_its_rank_and_node():
    check = slowest_rank([1.0, 1.0, 1.3, 1.0], 1e12, "bfloat16", "nccl", 4)
    assert check.status == "warning" and check.found.startswith("rank 2, GPU 2 of node 0")


# --- What became of the ranks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "words", "advice"),
    [
        ({"code": -signal.SIGKILL}, "killed by SIGKILL", "the kernel when memory runs out (see `dmesg`)"),
        ({"code": -signal.SIGSEGV}, "killed by SIGSEGV", "reinstall torch"),
        ({"code": 1, "error": "OSError: no"}, "rank 1: OSError: no", "NCCL_DEBUG=INFO"),
        ({"stage": "start"}, "rank 1 did not finish within 240 s; rank 0 waited", "NCCL_DEBUG=INFO"),
        ({}, "every rank of this node hangs", "NCCL_DEBUG=INFO"),
    ],
)
def test_killed_failed_and_hanging_ranks_are_each_reported_differently(rank, words, advice):
    found = failure_in(requested(), [Report(0, "connection"), Report(1, **{"stage": "connection", **rank})])
    assert words in found.what and advice in found.fix


def test_the_doctor_names_the_rank_that_failed_first():
    ended = [Report(rank, "connection", error=f"error {rank}", failed_at=10 - rank, code=1) for rank in range(3)]
    assert failure_in(requested(), ended).what == "rank 2: error 2"


def test_a_doctor_probe_that_times_out_without_an_error_advises_a_longer_timeout():
    found = failure_in(requested(), [Report(rank) for rank in range(2)], in_time=False)
    assert "nothing has failed" in found.what and "--timeout 960" in found.fix
