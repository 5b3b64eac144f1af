"""The obvious before ranks start: the loopback, in namespaces, and other nodes, in threads."""

import json
import subprocess
import sys
import threading

import pytest

from launch.doctor import meeting, reach
from launch.host.processes import free_port
from tests.support.doctor import requested
from tests.support.running import ROOT

EXAMINE = "import json; from launch.doctor import reach; print(json.dumps([vars(c) for c in reach.examine(None)]))"
NAMESPACE = ["unshare", "--map-root-user", "--net", "bash", "-c"]


def can_separate() -> bool:
    up = [*NAMESPACE, "ip link set lo up"]
    return sys.platform == "linux" and subprocess.run(up, capture_output=True, check=False).returncode == 0


needs_network = pytest.mark.skipif(not can_separate(), reason="a network of its own needs a network namespace")


def loopback_after(line: str) -> dict:
    """The check of the loopback in a network namespace, in which this was done before."""
    script = f"{line}\n{sys.executable} -c {EXAMINE!r}"
    done = subprocess.run([*NAMESPACE, script], capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(done.stdout)[0]


@needs_network
@pytest.mark.parametrize(
    ("made", "words", "fix"),
    [
        ("true", "lo is down", "ip link set lo up"),
        ("ip link set lo up; ip addr flush dev lo", "has no address 127.0.0.1", "ip addr add 127.0.0.1/8 dev lo"),
    ],
)
def test_a_loopback_that_cannot_work_is_named_and_its_fix_mends_it(made, words, fix):
    check = loopback_after(made)
    assert check["fatal"] and words in check["found"] and f"`{fix}`" in check["fix"]
    assert loopback_after(f"{made}; {fix}")["status"] == "ok"


def test_a_loopback_that_works_is_healthy():
    assert [check.status for check in reach.examine(requested())] == ["ok"]


def test_other_ports_are_the_widest_range_that_answers():
    fix = reach._other_ports([10, 20, 30, 40, 50, 60], [10, 20, 40, 50, 60])
    assert 'ip_local_port_range="40 60"' in fix


def test_the_largest_packet_is_named():
    assert "mtu 1440`" in reach.too_large("eth0", 1440)[1]
    assert "every size" in reach.too_large("eth0", None)[0]


# --- Nodes ----------------------------------------------------------------------------------------


def met(nodes: int, *present: int, port: int | None = None, fatal: int | None = None) -> dict:
    """What these of the nodes say when they meet on this machine."""
    port, found = port or free_ports(), {}

    def one(rank: int) -> None:
        words = f"--nodes {nodes} --machine_rank {rank} --main_process_ip 127.0.0.1 --main_process_port {port}"
        own = meeting.Meeting(requested(*words.split(), "--timeout", "4"))
        found[rank] = meeting.gathered(own, fatal == rank)
        own.close()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def free_ports() -> int:
    return meeting._free_ports(20000)


def test_nodes_that_reach_each_other_meet():
    assert {check.status for check in met(3, 0, 1, 2).values()} == {"ok"}


def test_an_absent_node_is_named_on_every_other():
    found = met(3, 0, 2)
    assert all(check.found == "node 1 did not come within 2 s" and check.fatal for check in found.values())


def test_without_node_0_its_address_is_named():
    check = met(2, 1)[1]
    assert "did not answer within 2 s: refused" in check.found and "run the doctor on node 0" in check.fix


def test_a_node_that_cannot_start_ranks_stops_the_others():
    found = met(2, 0, 1, fatal=1)
    assert (found[0].found, found[0].fix) == ("node 1 failed a check", "run `recipes doctor` on node 1")


def test_a_port_in_use_is_named_with_ports_that_are_free():
    port = free_ports()
    listeners = reach.listen_on("", [port])
    with reach.closing(listeners.values()):
        check = met(2, 0, port=port)[0]
    assert f"port {port} is in use" in check.found
    free = int(check.fix.split()[1])
    assert all(meeting._is_free(free + at) for at in range(meeting.PORTS))


def test_a_name_that_is_not_resolved_is_named():
    words = "--nodes 2 --machine_rank 0 --main_process_ip no-such-node.invalid --main_process_port 4000"
    check = meeting.gathered(meeting.Meeting(requested(*words.split())), fatal=False)
    assert "no-such-node.invalid is not resolved" in check.found and check.fix.startswith("--main_process_ip")


def test_a_free_port_is_not_in_use():
    assert meeting._is_free(free_port())
