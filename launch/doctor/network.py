"""The checks of the network before any rank starts: the loopback, and links between several nodes.

The checks use TCP as gloo and NCCL do, with large packets and on several ports, because a small
packet on one port proves nothing about large packets and other ports.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from launch.doctor.machine import Check, Request
from launch.host.processes import free_port
from launch.terminal import plural
from recipes.run import Json

_SECONDS = 1.0  # to wait for an answer that normally takes milliseconds
_LARGE = 1 << 18  # bytes: more than a hundred packets of 1500 bytes
_SAMPLES = 16  # ports that are tried
_LOOPBACK = "127.0.0.1"
_JOINING = 0.5  # share of --timeout in which to wait for late nodes
_ANSWER_SECONDS = 10  # to wait for the answer of a node that has joined


def examine(meeting: Meeting, earlier: list[Check]) -> Iterator[Check]:
    """Check loopback, unless an earlier check was fatal. With several nodes, check their links."""
    if not any(check.fatal for check in earlier):
        yield loopback()
    if meeting.request.nodes > 1:
        yield gathered(meeting, any(check.fatal for check in earlier))


def loopback() -> Check:
    device = next((name for name in psutil.net_if_stats() if name in ("lo", "lo0")), "lo")
    fix = f"`ip link set {device} up; ip addr replace {_LOOPBACK}/8 dev {device}`; in a sandbox, allow loopback"
    state = psutil.net_if_stats().get(device)
    if state is not None and not state.isup:
        return Check("error", "loopback", f"{device} is down", fix, fatal=True)
    try:
        with _listening(_LOOPBACK) as ports:
            if lost := _lost(_LOOPBACK, ports, device):
                return Check("error", "loopback", *lost, fatal=True)
    except OSError as error:
        return Check("error", "loopback", f"{_LOOPBACK} cannot be used: {error.strerror}", fix, fatal=True)
    return Check("ok", "loopback", f"{_LOOPBACK} answers on {plural(len(ports), 'port')}, and large packets pass")


def interfaces() -> dict[str, str]:
    """Map the name of each active network interface to its first IPv4 address."""
    found = [(name, one) for name, addresses in psutil.net_if_addrs().items() for one in reversed(addresses)]
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {name: one.address for name, one in found if name in up and one.family == socket.AF_INET}


def own_interface(request: Request) -> tuple[str, str]:
    """Return the address and the interface by which this node reaches node 0, each empty if
    unknown. Node 0 may reach itself by loopback: then return its first other interface, if any.
    To ask the system, connect a UDP socket, which sends no packet.
    """
    known = {address: name for name, address in interfaces().items()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        asking.connect((request.address, request.port))
        own = asking.getsockname()[0]
        if own.startswith("127.") and not request.address.startswith("127."):
            own = next((address for address in known if not address.startswith("127.")), own)
        return own, known.get(own, "")
    return "", ""


# --- Ports and packets ----------------------------------------------------------------------------


class _Server(socketserver.ThreadingTCPServer):
    """A server that listens as soon as it is created, and answers each connection in a thread."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024  # all nodes may connect at once

    def __enter__(self) -> _Server:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class _Receive(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client has given up
            if len(self.rfile.read(_LARGE)) == _LARGE:
                self.wfile.write(b"+")


@contextlib.contextmanager
def _listening(address: str) -> Iterator[list[int]]:
    """Listen on several ports, chosen by the system as for gloo and NCCL. Yield the ports.

    Each port answers a client that has sent _LARGE bytes. Raises OSError for an unusable address.
    """
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_Server((address, 0), _Receive)) for _ in range(_SAMPLES)]
        yield sorted(server.server_address[1] for server in servers)


def _lost(address: str, ports: Sequence[int], device: str) -> tuple[str, str] | None:
    """Return finding and fix if ports do not answer or large packets get lost, else None."""
    with ThreadPoolExecutor(len(ports)) as pool:
        silent = list(filter(None, pool.map(lambda port: not _answers(address, port) and port, ports)))
    if silent:
        file = Path("/proc/sys/net/ipv4/ip_local_port_range")
        first, last = file.read_text().split() if file.exists() else (32768, 60999)
        what = f"{len(silent)} of {len(ports)} ports of {address}, from {silent[0]} to {silent[-1]}, do not answer "
        what += f"within {_SECONDS:.0f} s: they are filtered"
        rule = f"iptables -I INPUT -p tcp --dport {first}:{last} -j ACCEPT"
        return what, f"open TCP ports {first} to {last} in the firewall of {address} ({rule})"
    if _answers(address, ports[0], bytes(_LARGE)) or _answers(address, ports[0], bytes(_LARGE)):  # retry if busy
        return None
    fix = f"`ip link set dev {device} mtu 1400`, or repair the tunnel or VLAN that drops large packets"
    return f"large packets are lost on {device}", fix


def _answers(address: str, port: int, content: bytes = b"") -> bool:
    """True if the port accepts a connection and, if `content` is given, confirms its arrival."""
    try:
        with socket.create_connection((address, port), _SECONDS) as sender:
            sender.sendall(content)
            return not content or sender.recv(1) == b"+"
    except OSError:
        return False


# --- Several nodes --------------------------------------------------------------------------------


class Meeting:
    """Exchanges messages between the doctors of all nodes, before and after a probe run.

    Node 0 receives a message from each node, and answers with the messages of all nodes. `port` is
    a free port of node 0, for the next probe run.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.port, self.round = request, free_port(), 0
        self.changed = threading.Condition()  # guards `heard` and `closed`, which only node 0 uses
        self.heard: dict[int, list[Json | None]] = {}  # by round, then by node
        self.closed = 0  # the last round that is over

    def exchange(self, seconds: float, **own: object) -> list[Json | None]:
        """Send the message `own`, and return the messages of all nodes in order: None for a node
        that is over `seconds` + _ANSWER_SECONDS late, or for all other nodes if node 0 is gone.
        """
        try:
            return self.say(seconds + _ANSWER_SECONDS, own)
        except OSError:  # node 0 has gone
            return [own if node == self.request.machine_rank else None for node in range(self.request.nodes)]

    def say(self, seconds: float, own: Json) -> list[Json | None]:
        """Exchange messages as `exchange` does, but raise OSError if node 0 cannot be reached."""
        self.round += 1
        node, own = self.request.machine_rank, {"port": free_port(), **own}
        said = self._ask(own, seconds) if node else self.hear(node, self.round, own, seconds)
        self.port = (said[0] or own)["port"]
        return said

    def listen(self) -> None:
        """Start to listen, on node 0. Raises OSError if the port or the address cannot be used."""
        meeting = self

        class Hear(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # a message from another program
                    said = meeting.hear(**json.loads(self.rfile.readline()))
                    self.wfile.write(json.dumps(said).encode() + b"\n")

        _Server(("0.0.0.0", self.request.port), Hear).__enter__()
        if not _answers(self.request.address, self.request.port):
            raise OSError(errno.EADDRNOTAVAIL, "an address of another machine")

    def hear(self, node: int, turn: int, own: Json, seconds: float | None = None) -> list[Json | None]:
        """On node 0, store a node's message `own`. Return all messages when exchange `turn` ends.

        Only node 0 itself passes `seconds`, after which the exchange ends without late messages.
        """
        with self.changed:
            said = self.heard.setdefault(turn, [None] * self.request.nodes)
            if turn > self.closed:
                said[node] = own
            self.changed.notify_all()
            self.changed.wait_for(lambda: all(said) or turn <= self.closed, seconds)
            self.closed = max(self.closed, turn)
            self.changed.notify_all()
            return said

    def _ask(self, own: Json, seconds: float) -> list[Json | None]:
        """Send `own` to node 0 and return all nodes' messages; `TimeoutError` after `seconds`."""
        request, until = self.request, time.monotonic() + seconds
        line = json.dumps({"node": request.machine_rank, "turn": self.round, "own": own}).encode()
        while True:
            try:
                left = max(0.1, until - time.monotonic())
                with socket.create_connection((request.address, request.port), left) as sender:
                    sender.settimeout(seconds + _ANSWER_SECONDS)
                    sender.sendall(line + b"\n")
                    return json.loads(sender.makefile().readline())
            except (OSError, ValueError):
                if time.monotonic() + 0.2 > until:
                    raise TimeoutError from None
                time.sleep(0.2)


def gathered(meeting: Meeting, fatal: bool) -> Check:
    """Wait for all nodes, and try their links. `fatal` is True if this node cannot start ranks."""
    request = meeting.request
    try:
        wrong = _met(meeting, fatal)
    except socket.gaierror:
        fix = "use --main_process_ip with a name that every node resolves, or with the IP address of node 0"
        wrong = f"{request.address} is not resolved on this node", fix
    except OSError as error:
        wrong = _not_met(request, error)
    if wrong:
        return Check("error", "nodes", *wrong, fatal=True)
    tried = "" if fatal else ", ports answer and large packets pass"
    return Check("ok", "nodes", f"{request.nodes} nodes meet at {request.address}:{request.port}{tried}")


def _met(meeting: Meeting, fatal: bool) -> tuple[str, str] | None:
    """Return the finding (a node is absent, failed a check, has a bad link) and the fix, or None.
    Raises `OSError` if node 0 is unreachable or cannot listen. Each node tries its link to the next
    node, unless a check was `fatal` on one of the nodes.
    """
    request, seconds = meeting.request, meeting.request.timeout * _JOINING
    socket.getaddrinfo(request.address, None, family=socket.AF_INET)
    if request.machine_rank == 0:
        meeting.listen()
    own, device = own_interface(request)
    with _listening("0.0.0.0") as ports:
        said = meeting.say(seconds, {"address": own, "ports": ports, "fatal": fatal})
        absent, nodes = [node for node, one in enumerate(said) if not one], [one for one in said if one]
        if absent:
            fix = "run the doctor on all nodes at the same time, each with its own --machine_rank; check that "
            fix += f"{_named(absent)} can reach {request.address}:{request.port} (a firewall?)"
            return f"{_named(absent)} did not join within {seconds:.0f} s", fix
        failed = [node for node, one in enumerate(nodes) if one["fatal"] and node != request.machine_rank]
        if failed or fatal:
            return failed_elsewhere(failed) if failed else None
        following = (request.machine_rank + 1) % request.nodes
        # Node 0 may not know how others reach it: Debian resolves a machine's name to 127.0.1.1.
        address = nodes[following]["address"] if following else request.address
        found = meeting.say(_ANSWER_SECONDS, {"lost": _lost(address, nodes[following]["ports"], device)})
    for node, one in enumerate(found):
        if one is None:
            return f"node {node} stopped answering while its link was tried", "run `recipes doctor` on every node again"
        if one["lost"]:
            what, fix = one["lost"]
            return f"from node {node} to node {(node + 1) % request.nodes}: {what}", fix
    return None


def failed_elsewhere(nodes: list[int]) -> tuple[str, str]:
    """Return the finding for other nodes that failed a check, and the fix."""
    return f"{_named(nodes)} failed a check", f"read the checks printed on {_named(nodes)}"


def _named(nodes: list[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"


def _not_met(request: Request, error: OSError) -> tuple[str, str]:
    where = f"{request.address}:{request.port}"
    if request.machine_rank:
        what = f"node 0 at {where} did not answer within {request.timeout * _JOINING:.0f} s"
        fix = "run the doctor on node 0 at the same time, and read the checks printed there; on all nodes give "
        return what, f"{fix}node 0's address as --main_process_ip; node 0's firewall must let {where} through"
    if error.errno == errno.EADDRNOTAVAIL:
        own = ", ".join(f"{one} ({name})" for name, one in interfaces().items() if name != "lo")
        what = f"{request.address} does not lead to this node, which is node 0 and has the addresses {own or 'unknown'}"
        return what, "use --main_process_ip with an address of node 0 on every node, or another --machine_rank here"
    what = f"node 0 cannot listen on port {request.port}: {error.strerror}"
    return what, f"use --main_process_port {free_port()} on every node, or end the program that uses the port"
