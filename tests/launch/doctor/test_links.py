"""The doctor's checks of links that are not here, and the switches that it tries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.doctor import links
from launch.doctor.failures import failure_in
from launch.doctor.network import (
    Switch,
    bus_bandwidth,
    interface_speed,
    interfaces,
    nccl_version,
    slowest_link,
    smallest_set,
    switches,
    topology,
)
from launch.doctor.ranks import Report
from tests.support.doctor import requested

# --- Links that are not here ----------------------------------------------------------------------


@pytest.mark.parametrize(("version", "text"), [((2, 18, 5), "2.18.5"), (21805, "2.18.5"), (2708, "2.7.8")])
def test_every_form_of_nccls_version_is_understood(version, text):
    assert nccl_version(version) == text


TOPOLOGY = """\
        GPU0    GPU1    GPU2    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV4     SYS     PIX     0-23            0               N/A
GPU1    NV4      X      PHB     SYS     0-23            0               N/A
GPU2    SYS     PHB      X      SYS     24-47           1               N/A
NIC0    PIX     SYS     SYS      X

Legend:
  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


@pytest.mark.parametrize("text", [TOPOLOGY, TOPOLOGY.replace("        GPU0", "\t\x1b[4mGPU0", 1)], ids=["plain", "tty"])
def test_the_topology_is_read_from_the_matrix(text):
    assert topology(text) == {(0, 1): "NV4", (0, 2): "SYS", (1, 2): "PHB"}


def test_without_a_matrix_there_are_no_pairs():
    assert topology("") == topology("No devices were found") == {}


@pytest.mark.parametrize(
    ("pairs", "capability", "pcie", "words"),
    [
        (["NV12"], (8, 0), (4, 16), "NVLink, 12 links (300.0 GB/s)"),
        (["NV18", "NV18"], (10, 0), (5, 16), "NVLink, 18 links (900.0 GB/s)"),
        (["NV4", "SYS"], (7, 0), (3, 16), "PCIe 3.0 x16 (15.8 GB/s)"),
        (["PHB"], (8, 9), (4, 8), "PCIe 4.0 x8 (15.8 GB/s)"),
        ([], (8, 0), None, "PCIe"),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(pairs, capability, pcie, words):
    assert str(slowest_link(pairs, capability, pcie)) == words


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_bandwidth(8_000_000, 0.5, 4) == 24_000_000


def reports(stage: str, result: object) -> list[Report]:
    return [Report(rank, results={stage: result}, code=0) for rank in range(2)]


def test_a_bandwidth_far_below_the_link_is_a_warning(nvidia_smi):
    nvidia_smi()
    slow, fast = ({"bytes": 1 << 28, "seconds": seconds} for seconds in (0.1, 0.001))
    assert links.bandwidth(requested(gpus=2), reports("bandwidth", slow)).status == "warning"
    assert links.bandwidth(requested(gpus=2), reports("bandwidth", fast)).status == "ok"


def test_gpus_that_cannot_reach_each_other_over_their_nvlink_are_a_warning(nvidia_smi):
    nvidia_smi()
    found = [links.device(requested(gpus=2), reports("device", {"no_peers": peers})) for peers in ([1], [])]
    assert [check.status for check in found] == ["warning", "ok"]


def test_a_slow_gpu_is_named():
    found = {"flops": 1e12, "seconds": [1.0, 1.0, 1.3, 1.0], "dtype": "bfloat16"}
    check = links.matmul(requested("--num_processes", "4", gpus=4), reports("matmul", found))
    assert check.status == "warning" and check.found.startswith("rank 2, GPU 2 of node 0")


def test_the_node_that_did_not_join_is_named():
    world = requested(*"--nodes 3 --main_process_ip n0 --main_process_port 4000".split(), gpus=2)
    waiting = [Report(rank, "rendezvous", missing=[4, 5]) for rank in (0, 1)]
    assert failure_in(world, waiting).what == "ranks 4, 5 on node 2 did not join within 240 s"


def test_a_network_without_a_known_speed_has_none():
    loopback = next(name for name, address in interfaces().items() if address == "127.0.0.1")
    assert interface_speed(loopback) is interface_speed("nosuch0") is None


# --- Switches -------------------------------------------------------------------------------------

NAMES = [Switch(name, value, "") for name, value in (("A", "1"), ("B", "1"), ("C", "1"), ("D", "x"), ("D", "y"))]


@given(st.sets(st.frozensets(st.sampled_from(NAMES)), max_size=8))
def test_the_smallest_set_that_works_is_found(working):
    found = smallest_set(NAMES, lambda chosen: frozenset(chosen) in working, tries=100)
    possible = [one for one in working if one and len({switch.name for switch in one}) == len(one)]
    assert (found is None) == (not possible)
    assert found is None or (frozenset(found) in working and len(found) == min(map(len, possible)))


@given(st.integers(1, 20))
def test_the_number_of_tries_is_limited(tries):
    tried = []
    assert smallest_set(NAMES, tried.append, tries) is None
    assert len(tried) == len(set(tried)) == min(tries, 23)


def test_one_switch_is_tried_before_two():
    tried = []
    smallest_set(switches("nccl", ["eth0"]), tried.append, 10)
    assert [len(chosen) for chosen in tried] == [1] * 7 + [2] * 3
