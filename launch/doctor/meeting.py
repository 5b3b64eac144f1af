"""The nodes of the doctor meet before their ranks do: who is absent, and what passes between them.

Node 0 listens on the last of the PORTS that `--main_process_port` begins. Over that connection the
nodes also agree later, so that all try the same thing at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import time
from typing import Any

from launch.doctor import reach
from launch.doctor.check import Check, Request
from launch.doctor.network import interfaces

PORTS = 15  # of node 0: for the first probe run, its control, 12 sets of switches, and the meeting
_JOINING = 0.5  # of the whole time is left for late nodes
_ANSWER_SECONDS = 10  # for a node that is there
Said = dict[str, Any]


class Absent(Exception):
    """A node does not answer any more."""


class Line:
    """A connection to another node that carries JSON, a line each."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.rest = connection, b""

    def say(self, **words: Any) -> None:
        try:
            self.connection.settimeout(_ANSWER_SECONDS)
            self.connection.sendall(json.dumps(words).encode() + b"\n")
        except OSError:
            raise Absent from None

    def hear(self, seconds: float = _ANSWER_SECONDS) -> Said:
        """What the other node says next. Raises `Absent` if that takes longer, or it has gone."""
        until = time.monotonic() + seconds
        try:
            while b"\n" not in self.rest:
                self.connection.settimeout(max(0.01, until - time.monotonic()))
                received = self.connection.recv(1 << 16)
                if not received:
                    raise Absent
                self.rest += received
        except OSError:
            raise Absent from None
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            said = json.loads(line)
        except ValueError:
            raise Absent from None  # another program
        if not isinstance(said, dict):
            raise Absent
        return said


class Meeting:
    """The nodes that have met, none beside this one at first. Node 0 has a line to each other node,
    these have one to node 0.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.lines = request, dict[int, Line]()

    def exchange(self, seconds: float, **own: Any) -> list[Said]:
        """What every node says, by its number, {} of one that is gone.

        `seconds`: how much longer than this one another node may take.
        """
        own_node = self.request.machine_rank
        if not self.lines:
            return [own if node == own_node else {} for node in range(self.request.nodes)]
        if own_node:
            try:
                self.lines[0].say(**own)
                return self.lines[0].hear(2 * seconds + _ANSWER_SECONDS)["all"]
            except (Absent, KeyError):
                return [own if node == own_node else {} for node in range(self.request.nodes)]
        said: list[Said] = [own] + [{}] * (self.request.nodes - 1)
        until = time.monotonic() + seconds + _ANSWER_SECONDS
        for node, line in self.lines.items():
            with contextlib.suppress(Absent):
                said[node] = line.hear(until - time.monotonic())
        for line in self.lines.values():
            with contextlib.suppress(Absent):
                line.say(all=said)
        return said

    def close(self) -> None:
        for line in self.lines.values():
            line.connection.close()


def gathered(meeting: Meeting, fatal: bool) -> Check:
    """What comes of meeting the other nodes. `fatal`: this one cannot start ranks."""
    check = _meet(meeting)
    everyone = meeting.exchange(meeting.request.timeout * _JOINING, fatal=fatal or check.fatal)
    failed = [node for node, said in enumerate(everyone) if said.get("fatal") and node != meeting.request.machine_rank]
    if check.status == "error" or not failed:
        return check
    nodes = ", ".join(map(str, failed))
    which = f"node {nodes}" if len(failed) == 1 else f"each of the nodes {nodes}"
    return _broken(f"{which} failed a check", f"run `recipes doctor` on {which}")


def _meet(meeting: Meeting) -> Check:
    """Wait for all nodes, and try what passes between node 0 and each other one."""
    request = meeting.request
    name = reach.resolved(request.address)
    if name.address is None:
        what = f"{request.address} is not resolved here" + (" within seconds" if name.late else "")
        return _broken(what, "--main_process_ip with a name that every node resolves, or node 0's address in numbers")
    problem = _wait_for_others(meeting, name.address) if request.machine_rank == 0 else _join(meeting, name.address)
    if problem:
        return problem
    try:
        wrong = [found for node, line in meeting.lines.items() for found in _try_link(request, node, line)]
    except Absent:
        return _broken("a node went away while its link was tried", "run `recipes doctor` on every node again")
    if wrong:
        what, fix = wrong[0]
        return _broken(what, fix)
    where = f"{request.address}:{request.port}"
    return Check("ok", "nodes", f"{request.nodes} nodes meet at {where}, ports answer and large packets pass")


def _broken(what: str, fix: str) -> Check:
    return Check("error", "nodes", what, fix, fatal=True)


# --- Node 0 ---------------------------------------------------------------------------------------


def _wait_for_others(meeting: Meeting, address: str) -> Check | None:
    request = meeting.request
    # The ports between are for what is tried after a failure.
    taken = [port for port in (request.port, request.port + PORTS - 1) if not _is_free(port)]
    if taken:
        what = f"port {taken[0]} is in use on this node, node 0 needs {request.port} to {request.port + PORTS - 1}"
        free = _free_ports(request.port + PORTS)
        return _broken(what, f"--main_process_port {free} on every node, or end what uses it")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", request.port + PORTS - 1))
            listener.listen(request.nodes + 8)
        except OSError as error:
            what = f"node 0 cannot listen on port {request.port + PORTS - 1}: {error.strerror}"
            return _broken(what, "--main_process_port with another port on every node, from 1024 to 65520")
        if not reach.answering(address, [request.port + PORTS - 1]):
            own = ", ".join(f"{one} ({name})" for name, one in interfaces().items() if name != "lo")
            what = f"{request.address} does not lead to this node, node 0, whose addresses are {own or 'unknown'}"
            fix = "--main_process_ip with an address of node 0, on every node; or another --machine_rank here"
            return _broken(what, fix)
        until = time.monotonic() + request.timeout * _JOINING
        while len(meeting.lines) < request.nodes - 1 and time.monotonic() < until:
            listener.settimeout(max(0.01, until - time.monotonic()))
            with contextlib.suppress(OSError, Absent):
                line = Line(listener.accept()[0])
                meeting.lines[int(line.hear(reach.SECONDS).get("node", 0))] = line
        meeting.lines.pop(0, None)
    absent = sorted(set(range(1, request.nodes)) - set(meeting.lines))
    for line in meeting.lines.values():
        with contextlib.suppress(Absent):
            line.say(absent=absent)
    return _absent(request, absent) if absent else None


def _absent(request: Request, absent: list[int]) -> Check:
    nodes, several = ", ".join(map(str, absent)), "s" * (len(absent) > 1)
    what = f"node{several} {nodes} did not come within {request.timeout * _JOINING:.0f} s"
    where = f"{request.address}:{request.port + PORTS - 1}"
    fix = f"run the doctor on node{several} {nodes} at the same time, with its --machine_rank"
    return _broken(what, f"{fix}, and see whether it reaches {where} (a firewall?)")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
            one.listen(1)
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def _free_ports(first: int) -> int:
    """The first port from which on PORTS are free, below those that the system gives away."""
    candidates = range(first if first < 30000 else 20000, 65000 - PORTS, PORTS)
    return next((port for port in candidates if all(_is_free(port + at) for at in range(PORTS))), 0)


# --- The other nodes ------------------------------------------------------------------------------


def _join(meeting: Meeting, address: str) -> Check | None:
    request = meeting.request
    began, port, why = time.monotonic(), request.port + PORTS - 1, ""
    while time.monotonic() - began < request.timeout * _JOINING:
        try:
            line = Line(socket.create_connection((address, port), timeout=reach.SECONDS))
            line.say(node=request.machine_rank)
            absent = line.hear(request.timeout * _JOINING + _ANSWER_SECONDS).get("absent")
        except (OSError, Absent) as error:
            why = "refused" if isinstance(error, ConnectionRefusedError) else "no answer"
            time.sleep(0.2)
            continue
        if not isinstance(absent, list):
            why = "answered by another program"
            time.sleep(0.2)
            continue
        meeting.lines[0] = line
        return _absent(request, absent) if absent else None
    where = f"node 0 at {request.address}:{port} (and its other ports from {request.port} on)"
    what = f"{where} did not answer within {request.timeout * _JOINING:.0f} s: {why}"
    if why == "refused":  # so the address is right
        return _broken(what, "run the doctor on node 0 at the same time; if it runs, see what it says there")
    return _broken(what, "--main_process_ip with node 0's address, and its firewall: those ports must be open")


# --- What passes between two nodes ----------------------------------------------------------------


def _try_link(request: Request, node: int, line: Line) -> list[tuple[str, str]]:
    """What is wrong between node 0 and another: each listens once, node 0 first."""
    wrong = []
    for listens in (0, node or request.machine_rank):
        found = _listen(line) if listens == request.machine_rank else _ask(line)
        if found is not None:
            wrong.append(_named(found, listens, line))
    return wrong


def _listen(line: Line) -> Said | None:
    """Open ports, and say what arrived. Returns what is wrong as the other node has found it."""
    listeners = reach.listen_on("", reach.sample(reach.port_range()))
    with reach.closing(listeners.values()):
        line.say(ports=list(listeners))
        while "port" in (asked := line.hear()):
            line.say(arrived=_arrives(listeners[asked["port"]]))
    return asked.get("wrong")


def _arrives(listener: socket.socket) -> bool:
    """Whether LARGE bytes come over a connection that is not closed at once."""
    listener.settimeout(reach.SECONDS)
    received = 0
    try:
        while received == 0:
            with listener.accept()[0] as connection:
                connection.settimeout(reach.SECONDS)
                while received < reach.LARGE and (part := connection.recv(1 << 16)):
                    received += len(part)
    except OSError:
        return False
    return received >= reach.LARGE


def _ask(line: Line) -> Said | None:
    """Try the ports that the other node has opened, then large packets."""
    address = line.connection.getpeername()[0]
    ports = line.hear()["ports"]
    answered = reach.answering(address, ports)
    wrong: Said | None = None
    if len(answered) < len(ports):
        wrong = {"ports": ports, "answered": answered}
    elif not (_sent(line, address, answered[0]) or _sent(line, address, answered[0])):  # a busy node is late once
        passes = (size + reach.HEADERS for size in reach.SIZES if _sent(line, address, answered[0], size))
        wrong = {"passes": next(passes, None)}
    line.say(wrong=wrong)
    return wrong


def _sent(line: Line, address: str, port: int, size: int | None = None) -> bool:
    line.say(port=port)
    with socket.socket() as sender:
        if size:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, size)
        sender.settimeout(reach.SECONDS)
        with contextlib.suppress(OSError):
            sender.connect((address, port))
            sender.sendall(bytes(reach.LARGE))
        return line.hear()["arrived"]


def _named(found: Said, listens: int, line: Line) -> tuple[str, str]:
    own = line.connection.getsockname()[0]
    device = next((name for name, address in interfaces().items() if address == own), own)
    if "ports" in found:
        first, last = reach.port_range()
        what = f"on node {listens}, {reach.silent_ports(found['ports'], found['answered'])}"
        return what, f"open TCP ports {first} to {last} between the nodes: gloo and NCCL connect to any of them"
    what, fix = reach.too_large(device, found["passes"])
    return f"to node {listens}, {what}", fix
