"""The network before any rank: the loopback, and the meeting of several nodes.

TCP as gloo and NCCL use it: small packets are not enough, and a connection to one port says nothing
of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from launch.doctor.machine import Check, Request
from launch.host.processes import free_port
from launch.terminal import plural
from recipes.run import Json

_SECONDS = 1.0  # without an answer, on a link that answers within milliseconds
_LARGE = 1 << 18  # bytes: some hundred packets of any size
_SAMPLES = 16  # ports
_LOOPBACK = "127.0.0.1"
_JOINING = 0.5  # of the whole time is left for late nodes
_ANSWER_SECONDS = 10  # for a node that is there
_LONGEST_LINE = 1 << 24  # bytes: a thousand nodes may say something


def examine(meeting: Meeting, earlier: list[Check]) -> Iterator[Check]:
    """The loopback and, of several nodes, whether they reach each other."""
    if not any(check.fatal for check in earlier):
        yield asyncio.run(_loopback())
    if meeting.request.nodes > 1:
        yield gathered(meeting, any(check.fatal for check in earlier))


async def _loopback() -> Check:
    device = next((name for name in psutil.net_if_stats() if name in ("lo", "lo0")), "lo")
    fix = f"`ip link set {device} up; ip addr replace {_LOOPBACK}/8 dev {device}`, or a sandbox that allows it"
    state = psutil.net_if_stats().get(device)
    if state is not None and not state.isup:
        return Check("error", "loopback", f"{device} is down", fix, fatal=True)
    try:
        async with _listening(_LOOPBACK) as ports:
            if lost := await _lost(_LOOPBACK, ports, device):
                return Check("error", "loopback", *lost, fatal=True)
    except OSError as error:
        return Check("error", "loopback", f"{_LOOPBACK} cannot be used: {error.strerror}", fix, fatal=True)
    return Check("ok", "loopback", f"{_LOOPBACK} answers on {plural(len(ports), 'port')}, and large packets pass")


def interfaces() -> dict[str, str]:
    """Names and IPv4 addresses of the network interfaces that are up."""
    found = [(name, one) for name, addresses in psutil.net_if_addrs().items() for one in reversed(addresses)]
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {name: one.address for name, one in found if name in up and one.family == socket.AF_INET}


def own_interface(request: Request) -> tuple[str, str]:
    """The address of this node on its way to node 0, and the interface with it; "" if unknown.

    Connecting a UDP socket sends no packet.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        asking.connect((request.address, request.port))
        own = asking.getsockname()[0]
        return own, next((name for name, address in interfaces().items() if address == own), "")
    return "", ""


# --- What passes ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _listening(address: str) -> AsyncIterator[list[int]]:
    """Listen on ports over the whole range that the system gives to who asks for any, or near them.

    Each answers what has sent _LARGE bytes. Raises OSError about the address.
    """
    servers: dict[int, asyncio.Server] = {}
    first, last = _port_range()
    for port in (first + (last - first) * at // (_SAMPLES - 1) for at in range(_SAMPLES)):
        for near in range(port, min(port + _SAMPLES, 65536)):
            try:
                servers[near] = await asyncio.start_server(_receive, address, near)
                break
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):  # another program has it
                    raise
    yield list(servers)
    for server in servers.values():
        server.close()


def _port_range() -> list[int]:
    file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return [int(port) for port in file.read_text().split()] if file.exists() else [32768, 60999]


async def _receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, EOFError):
        await reader.readexactly(_LARGE)
        writer.write(b"+")
    writer.close()


async def _lost(address: str, ports: Sequence[int], device: str) -> tuple[str, str] | None:
    """What does not arrive at another address, and what mends it; None if everything does."""
    answered = await _answering(address, ports)
    if silent := [port for port in ports if port not in answered]:
        first, last = _port_range()
        what = f"{len(silent)} of {len(ports)} ports of {address} do not answer within {_SECONDS:.0f} s, from "
        what += f"{silent[0]} to {silent[-1]}: filtered"
        return what, f"open TCP ports {first} to {last} in the firewall (iptables -I INPUT -i {device} -j ACCEPT)"
    if await _carries(address, answered[0]) or await _carries(address, answered[0]):  # a busy machine is late once
        return None
    fix = f"`ip link set dev {device} mtu 1400`, or mend what drops them (a tunnel, a VLAN)"
    return f"large packets are lost on {device}", fix


async def _answering(address: str, ports: Sequence[int]) -> list[int]:
    """Those of the ports that take a connection, all asked at the same time."""

    async def answers(port: int) -> bool:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), _SECONDS)
        except OSError:
            return False
        writer.close()
        return True

    return [port for port, yes in zip(ports, await asyncio.gather(*map(answers, ports)), strict=True) if yes]


async def _carries(address: str, port: int) -> bool:
    """True if _LARGE bytes arrive over a new connection."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sender:
        sender.setblocking(False)
        try:
            async with asyncio.timeout(_SECONDS):
                await loop.sock_connect(sender, (address, port))
                await loop.sock_sendall(sender, bytes(_LARGE))
                return await loop.sock_recv(sender, 1) == b"+"
        except OSError:
            return False


# --- Several nodes --------------------------------------------------------------------------------


class Meeting:
    """The doctors of all nodes, which say something to each other before and after a probe run.

    `port`: of node 0, for the next probe run.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.port, self.round = request, free_port(), 0

    def exchange(self, seconds: float, **own: object) -> list[Json | None]:
        """What every node says, by its number; None of one that does not say it in time.

        `seconds`: how much longer than this one another node may take.
        """
        try:
            return asyncio.run(self.say(seconds + _ANSWER_SECONDS, own))
        except OSError:  # node 0 has gone
            return [own if node == self.request.machine_rank else None for node in range(self.request.nodes)]

    async def say(self, seconds: float, own: Json) -> list[Json | None]:
        """As `exchange`. Raises OSError if node 0 cannot listen, or cannot be reached."""
        self.round += 1
        request, own = self.request, {"round": self.round, "port": free_port(), **own}
        tell = self._ask if request.machine_rank else self._collect
        said: list[Json | None] = await tell(own, seconds) if request.nodes > 1 else [own]
        self.port = (said[0] or own)["port"]
        return said

    async def _collect(self, own: Json, seconds: float) -> list[Json | None]:
        """On node 0: what the nodes say that come within some seconds, for all of them."""
        request, over = self.request, asyncio.Event()
        said: list[Json | None] = [own] + [None] * (request.nodes - 1)
        answers: list[asyncio.Task[None] | None] = []

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # another program
                other = json.loads(await reader.readline())
                if other["says"]["round"] != own["round"]:
                    raise ValueError  # a node that is ahead, and asks again
                said[other["node"]] = other["says"]
                answers.append(asyncio.current_task())
                if all(said):
                    over.set()
                await over.wait()
                writer.write(json.dumps(said).encode() + b"\n")
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        server = await asyncio.start_server(hear, "0.0.0.0", request.port, limit=_LONGEST_LINE)
        try:
            if not await _answering(request.address, [request.port]):
                raise OSError(errno.EADDRNOTAVAIL, "it is an address of another machine")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), seconds)
            over.set()
            await asyncio.wait([*filter(None, answers), asyncio.create_task(asyncio.sleep(0))], timeout=_ANSWER_SECONDS)
        finally:
            server.close()
        return said

    async def _ask(self, own: Json, seconds: float) -> list[Json | None]:
        """On another node: say it to node 0 as soon as that listens, and wait for what all say."""
        loop, request = asyncio.get_running_loop(), self.request
        until, line = loop.time() + seconds, json.dumps({"node": request.machine_rank, "says": own}).encode()
        while True:
            try:
                async with asyncio.timeout_at(until):
                    reader, writer = await asyncio.open_connection(request.address, request.port, limit=_LONGEST_LINE)
                writer.write(line + b"\n")
                answer = await asyncio.wait_for(reader.readline(), seconds + _ANSWER_SECONDS)
                writer.close()
                return json.loads(answer)
            except (OSError, ValueError):
                if loop.time() + 0.2 > until:
                    raise TimeoutError from None
                await asyncio.sleep(0.2)


def gathered(meeting: Meeting, fatal: bool) -> Check:
    """Wait for all nodes, and try their links. `fatal`: this one cannot start ranks."""
    request = meeting.request
    try:
        wrong = asyncio.run(_met(meeting, fatal))
    except socket.gaierror:
        fix = "--main_process_ip with a name that every node resolves, or node 0's address in numbers"
        wrong = f"{request.address} is not resolved here", fix
    except OSError as error:
        wrong = _not_met(request, error)
    if wrong:
        return Check("error", "nodes", *wrong, fatal=True)
    what = f"{request.nodes} nodes meet at {request.address}:{request.port}, ports answer and large packets pass"
    return Check("ok", "nodes", what)


async def _met(meeting: Meeting, fatal: bool) -> tuple[str, str] | None:
    """What keeps the nodes from training together, and its fix. Each tries its link to the next."""
    request, seconds = meeting.request, meeting.request.timeout * _JOINING
    await asyncio.get_running_loop().getaddrinfo(request.address, None, family=socket.AF_INET)
    own, device = own_interface(request)
    async with _listening("0.0.0.0") as ports:
        said = await meeting.say(seconds, {"address": own, "ports": ports, "fatal": fatal})
        absent, nodes = [node for node, one in enumerate(said) if not one], [one for one in said if one]
        if absent:
            fix = f"run the doctor on {_named(absent)} at the same time, with its --machine_rank"
            fix += f", and see whether it reaches {request.address}:{request.port} (a firewall?)"
            return f"{_named(absent)} did not come within {seconds:.0f} s", fix
        failed = [node for node, one in enumerate(nodes) if one["fatal"] and node != request.machine_rank]
        if failed or fatal:
            return failed_elsewhere(failed) if failed else None
        after = nodes[(request.machine_rank + 1) % request.nodes]
        found = await meeting.say(_ANSWER_SECONDS, {"lost": await _lost(after["address"], after["ports"], device)})
    for node, one in enumerate(found):
        if one is None:
            return f"node {node} went away while its link was tried", "run `recipes doctor` on every node again"
        if one["lost"]:
            what, fix = one["lost"]
            return f"from node {node} to node {(node + 1) % request.nodes}: {what}", fix
    return None


def failed_elsewhere(nodes: list[int]) -> tuple[str, str]:
    """What to say where other nodes have failed a check, and the fix."""
    return f"{_named(nodes)} failed a check", f"run `recipes doctor` on {_named(nodes)}"


def _named(nodes: list[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"


def _not_met(request: Request, error: OSError) -> tuple[str, str]:
    where = f"{request.address}:{request.port}"
    if request.machine_rank:
        what = f"node 0 at {where} did not answer within {request.timeout * _JOINING:.0f} s"
        fix = "run the doctor on node 0 at the same time, with its address as --main_process_ip, and see what it says"
        return what, f"{fix} there; its firewall must let {where} through"
    if error.errno == errno.EADDRNOTAVAIL:
        own = ", ".join(f"{one} ({name})" for name, one in interfaces().items() if name != "lo")
        what = f"{request.address} does not lead to this node, node 0, whose addresses are {own or 'unknown'}"
        return what, "--main_process_ip with an address of node 0, on every node; or another --machine_rank here"
    what = f"node 0 cannot listen on port {request.port}: {error.strerror}"
    return what, f"--main_process_port {free_port()} on every node, or end what uses it"
