"""The obvious about this node's network, in a second and before any rank: loopback, ports, name.

TCP as gloo and NCCL use it: small packets are not enough, and a connection to one port says nothing
of another.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from launch.doctor.check import Check, Request
from launch.terminal import plural

SECONDS = 1.0  # without an answer, on a link that answers within milliseconds
_NAME_SECONDS = 3.0  # a name server that is there answers sooner, and one that is not takes 5 at least
LARGE = 1 << 18  # bytes: some hundred packets of any size
_SAMPLES = 16  # ports
SIZES = (8900, 4000, 1400, 1200, 1000, 500)  # bytes of data in a packet, to find what passes
HEADERS = 40  # bytes of IPv4 and TCP in front of it
LOOPBACK = "127.0.0.1"


def examine(request: Request) -> Iterator[Check]:
    """The checks of the loopback and of this node's name."""
    yield _loopback()
    name = _host_name()
    if name:
        yield name


def _loopback() -> Check:
    device = next((name for name in psutil.net_if_stats() if name in ("lo", "lo0")), "lo")
    state = psutil.net_if_stats().get(device)
    if state is not None and not state.isup:
        return _broken(f"{device} is down", f"`ip link set {device} up`")
    try:
        listeners = listen_on(LOOPBACK, sample(port_range()))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            return _broken(
                f"{LOOPBACK} cannot be used: {error.strerror}", "a network namespace or sandbox that allows it"
            )
        return _broken(f"{device} has no address {LOOPBACK}", f"`ip addr add {LOOPBACK}/8 dev {device}`")
    with closing(listeners.values()):
        answered = answering(LOOPBACK, list(listeners))
        if not answered:
            what = f"no connection to {LOOPBACK} is answered within {SECONDS:.0f} s, on any port: filtered"
            return _broken(what, f"allow it in the firewall: iptables -I INPUT -i {device} -j ACCEPT")
        if len(answered) < len(listeners):
            return _broken(silent_ports(listeners, answered), _other_ports(sorted(listeners), answered))
        if not carries(listeners[answered[0]], LOOPBACK):
            return _broken(*too_large(device, largest_packet(listeners[answered[0]], LOOPBACK)))
    return Check("ok", "loopback", f"{LOOPBACK} answers on {plural(len(answered), 'port')}, and large packets pass")


def _broken(what: str, fix: str) -> Check:
    return Check("error", "loopback", what, fix, fatal=True)


def too_large(device: str, passes: int | None) -> tuple[str, str]:
    """What to say of a link that loses large packets, and what mends it."""
    if passes is None:
        return f"packets of every size are lost on {device}", "a cable, a driver or a firewall that loses packets"
    what = f"large packets are lost on {device}: those of {passes} bytes pass, of more do not"
    return what, f"`ip link set dev {device} mtu {passes}`, or mend what drops them without a word (a tunnel, a VLAN)"


def silent_ports(listeners: Iterable[int], answered: Sequence[int]) -> str:
    tried = list(listeners)
    silent = sorted(set(tried) - set(answered))
    return (
        f"{len(silent)} of {len(tried)} ports do not answer within {SECONDS:.0f} s, from {silent[0]} to "
        f"{silent[-1]}: a filtered port range"
    )


def _other_ports(tried: Sequence[int], answered: Sequence[int]) -> str:
    """A range without a silent port, the widest of those that were tried."""
    runs: list[list[int]] = [[]]
    for port in tried:
        if port in answered:
            runs[-1].append(port)
        elif runs[-1]:
            runs.append([])
    widest = max(runs, key=lambda run: run[-1] - run[0] if run else -1)
    return (
        "open them in the firewall, or let programs use others: "
        f'`sysctl -w net.ipv4.ip_local_port_range="{widest[0]} {widest[-1]}"`'
    )


def _host_name() -> Check | None:
    """gloo and torchrun ask for this node's own name, and wait as long as the answer takes."""
    name = socket.gethostname()
    if resolved(name).late:
        what = f"{name} is not resolved within {_NAME_SECONDS:.0f} s: gloo and torchrun wait for the answer"
        fix = f"`echo {LOOPBACK} {name} >> /etc/hosts`, or a name server that answers"
        return Check("error", "host name", what, fix, fatal=True)
    return None


@dataclass
class Resolved:
    """A name's IPv4 address, None if there is none, and whether the answer takes too long."""

    address: str | None = None
    late: bool = False


def resolved(name: str) -> Resolved:
    """The address of a name, asked in a thread because the system's call has no time limit."""
    answer = Resolved()

    def ask() -> None:
        with contextlib.suppress(OSError):
            answer.address = str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_NAME_SECONDS)
    answer.late = asking.is_alive()
    return answer


# --- Ports ----------------------------------------------------------------------------------------


def port_range() -> tuple[int, int]:
    """The ports that the system gives to who asks for any."""
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return 32768, 60999
    return int(first), int(last)


def sample(ports: tuple[int, int], count: int = _SAMPLES) -> list[int]:
    """Ports over the whole range, its ends among them."""
    first, last = ports
    return [first + (last - first) * at // (count - 1) for at in range(count)]


def listen_on(address: str, wanted: Sequence[int]) -> dict[int, socket.socket]:
    """Listeners on these ports, or the next that are free. Raises OSError about the address."""
    listeners: dict[int, socket.socket] = {}
    for port in wanted:
        for near in range(port, min(port + 20, 65536)):
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, near))
                listener.listen(64)
            except OSError as error:
                listener.close()
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise
                continue
            listeners[near] = listener
            break
    return listeners


@contextlib.contextmanager
def closing(sockets: Iterable[socket.socket]) -> Iterator[None]:
    """Close them all when the block ends."""
    with contextlib.ExitStack() as stack:
        for one in sockets:
            stack.enter_context(one)
        yield


def answering(address: str, ports: Sequence[int]) -> list[int]:
    """Those of the ports that take a connection within SECONDS, all asked at the same time."""
    answered, waiting = [], selectors.DefaultSelector()
    for port in ports:
        asking = socket.socket()
        asking.setblocking(False)
        if asking.connect_ex((address, port)) in (0, errno.EINPROGRESS):
            waiting.register(asking, selectors.EVENT_WRITE, port)
        else:
            asking.close()
    until = time.monotonic() + SECONDS
    while waiting.get_map() and time.monotonic() < until:
        for key, _ in waiting.select(until - time.monotonic()):
            if not key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # type: ignore[union-attr]
                answered.append(key.data)
            _drop(waiting, key)
    for key in list(waiting.get_map().values()):
        _drop(waiting, key)
    waiting.close()
    return sorted(answered)


def _drop(waiting: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    waiting.unregister(key.fileobj)
    key.fileobj.close()  # type: ignore[union-attr]


# --- Packets --------------------------------------------------------------------------------------


def carries(listener: socket.socket, address: str, size: int | None = None) -> bool:
    """Whether LARGE bytes arrive over a new connection, in packets of at most `size` bytes."""
    with socket.socket() as sender:
        if size:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, size)
        sender.settimeout(SECONDS)
        try:
            sender.connect((address, listener.getsockname()[1]))
            receiver = _accepted(listener, sender.getsockname())
        except OSError:
            return False
        with receiver:
            return _passes(sender, receiver)


def _accepted(listener: socket.socket, peer: object) -> socket.socket:
    """The other end of a connection: older ones wait in the queue, closed by who asked."""
    listener.settimeout(SECONDS)
    while True:
        receiver, address = listener.accept()
        if address == peer:
            return receiver
        receiver.close()


def _passes(sender: socket.socket, receiver: socket.socket) -> bool:
    """In one thread: what is stuck for SECONDS is lost, however busy the machine is."""
    data, sent, received = bytes(LARGE), 0, 0
    sender.setblocking(False)
    receiver.settimeout(SECONDS)
    while received < LARGE:
        with contextlib.suppress(BlockingIOError):
            sent += sender.send(data[sent:]) if sent < LARGE else 0
        try:
            received += len(receiver.recv(LARGE))
        except OSError:
            return False
    return True


def largest_packet(listener: socket.socket, address: str) -> int | None:
    """The largest packet in bytes that passes, of a few sizes; None if none does."""
    return next((size + HEADERS for size in SIZES if carries(listener, address, size)), None)
