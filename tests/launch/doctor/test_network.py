"""The meeting of several nodes, in threads; real faults are in test_faults.py."""

import re
import socket
import threading

import pytest

from launch.doctor import network
from launch.host.processes import free_port
from tests.support.doctor import requested


def met(nodes: int, *present: int, port: int | None = None, fatal: int | None = None) -> dict:
    """What these of the nodes say when they meet on this machine."""
    port, found = port or free_port(), {}

    def one(rank: int) -> None:
        words = f"--nodes {nodes} --machine_rank {rank} --main_process_ip 127.0.0.1 --main_process_port {port}"
        own = network.Meeting(requested(*words.split(), "--timeout", "6"))
        check = network.gathered(own, fatal == rank)
        found[rank] = check, [] if check.fatal or fatal is not None else own.exchange(0, number=rank)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_the_doctors_network_check_gives_every_node_the_messages_of_all_nodes():
    for check, said in met(3, 0, 1, 2).values():
        assert check.status == "ok" and [one["number"] for one in said] == [0, 1, 2]


@pytest.mark.parametrize(
    ("nodes", "present", "fatal", "words"),
    [
        (2, (1,), None, "did not answer within 3 s"),
        (2, (0, 1), 1, "node 1 failed a check"),
    ],
)
def test_the_other_nodes_report_a_node_that_is_absent_or_failed_a_check(nodes, present, fatal, words):
    found = met(nodes, *present, fatal=fatal)
    assert all(words in check.found for rank, (check, _) in found.items() if rank != fatal)


def test_the_error_about_a_port_in_use_names_the_port_and_suggests_another():
    with socket.create_server(("", free_port())) as listener:
        port = listener.getsockname()[1]
        check = met(2, 0, port=port)[0][0]
    assert f"cannot listen on port {port}" in check.found
    assert re.fullmatch(r"use --main_process_port \d+ on every node, or end the program that uses the port", check.fix)


def test_the_doctors_network_check_gives_none_as_the_message_of_a_node_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(network, "_ANSWER_SECONDS", 0.5)
    words = f"--nodes 2 --main_process_ip 127.0.0.1 --main_process_port {free_port()}"
    said = network.Meeting(requested(*words.split())).exchange(0, number=7)
    assert [one and one["number"] for one in said] == [7, None]


def test_a_main_process_ip_that_does_not_resolve_is_named_in_the_error():
    words = "--nodes 2 --machine_rank 0 --main_process_ip no-such-node.invalid --main_process_port 4000"
    check = network.gathered(network.Meeting(requested(*words.split())), fatal=False)
    assert "no-such-node.invalid is not resolved" in check.found and "--main_process_ip" in check.fix
