"""Links between GPUs and nodes: their speed, what tools say of them, switches for broken ones."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import psutil  # type: ignore[import-untyped]

# --- Bandwidth ------------------------------------------------------------------------------------

# Bytes per second in one direction. NVLink: 25 GB/s per link from V100 to H200, 50 from Blackwell
# on. NVIDIA's architecture whitepapers count both directions: V100 6 links, 300 GB/s; A100 12, 600;
# H100 18, 900; B200 18, 1,800.
_NVLINK, _NVLINK_BLACKWELL = 25e9, 50e9
# PCI Express Base Specification: GT/s per lane, times the share that its encoding leaves (8b/10b,
# then 128b/130b).
_PCIE_LANE = {1: 2.5e9 * 0.8 / 8, 2: 5e9 * 0.8 / 8} | {
    generation: giga * 1e9 * 128 / 130 / 8 for generation, giga in ((3, 8), (4, 16), (5, 32), (6, 64))
}
FAR_BELOW = 0.25  # of the link's speed; a working ring reaches more than half of it


@dataclass(frozen=True)
class Link:
    """What ranks communicate over. `bytes_per_second` is in one direction, None if unknown."""

    name: str
    bytes_per_second: float | None = None

    def is_far_above(self, measured: float) -> bool:
        return self.bytes_per_second is not None and measured < FAR_BELOW * self.bytes_per_second

    def __str__(self) -> str:
        return self.name + (f" ({self.bytes_per_second / 1e9:,.1f} GB/s)" if self.bytes_per_second else "")


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second of an all-reduce of `size` bytes, comparable to a link's speed.

    size / seconds * 2 * (ranks - 1) / ranks. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def slowest_link(pairs: Iterable[str], capability: tuple[int, int], pcie: tuple[int, int] | None) -> Link:
    """The slowest link between the GPUs of one node, which sets the speed of a ring.

    `pairs` are the values of `topology()`, `pcie` generation and lanes of a GPU's slot. The slowest
    link is the pair with the fewest NVLinks, or PCIe if a pair has none.
    """
    words = list(pairs)
    if words and all(word.startswith("NV") for word in words):
        links = min(int(word[2:]) for word in words)
        return Link(f"NVLink, {links} links", links * (_NVLINK_BLACKWELL if capability >= (10, 0) else _NVLINK))
    if pcie is None or pcie[0] not in _PCIE_LANE:
        return Link("PCIe")
    generation, lanes = pcie
    return Link(f"PCIe {generation}.0 x{lanes}", _PCIE_LANE[generation] * lanes)


# --- What tools print -----------------------------------------------------------------------------


def nccl_version(version: tuple[int, ...] | list[int] | int) -> str:
    """2.18.5 of (2, 18, 5), 21805 or, before 2.9, 2708. Source: NCCL_VERSION in nccl.h."""
    if not isinstance(version, int):
        return ".".join(map(str, version))
    major = 10000 if version >= 10000 else 1000
    return f"{version // major}.{version % major // 100}.{version % 100}"


def topology(text: str) -> dict[tuple[int, int], str]:
    """How each pair of GPUs is connected (NV4, PIX, SYS, ...), from `nvidia-smi topo -m`."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in text.splitlines()]
    heading = next((words for words in lines if words[:1] == ["GPU0"] and "X" not in words), [])
    gpus = [int(word[3:]) for word in heading if re.fullmatch(r"GPU\d+", word)]
    rows = {int(words[0][3:]): words[1:] for words in lines if "X" in words and re.fullmatch(r"GPU\d+", words[0])}
    return {
        (one, other): rows[one][column]
        for one in gpus
        for column, other in enumerate(gpus)
        if one < other and one in rows
    }


def invalid_gpu(visible: str, uuids: Sequence[str]) -> str | None:
    """The first invalid or repeated entry of CUDA_VISIBLE_DEVICES, None if there is none.

    CUDA silently hides that entry and all after it; after a repeated entry it hides all. Source:
    the CUDA programming guide, "CUDA environment variables", and `_parse_visible_devices` in
    torch/cuda/__init__.py.
    """
    seen: set[str] = set()
    for entry in (word.strip() for word in visible.split(",")):
        if entry.startswith("MIG-"):  # a part of a GPU: nvidia-smi does not list it with this query
            continue
        named = [uuid for at, uuid in enumerate(uuids) if entry == str(at) or (entry and uuid.startswith(entry))]
        if len(named) != 1 or named[0] in seen:
            return entry
        seen.add(named[0])
    return None


# --- Networks of this node ------------------------------------------------------------------------


def interfaces() -> dict[str, str]:
    """Names and IPv4 addresses of the network interfaces that are up."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return {
        name: next(one.address for one in addresses if one.family == socket.AF_INET)
        for name, addresses in psutil.net_if_addrs().items()
        if name in up and any(one.family == socket.AF_INET for one in addresses)
    }


def interface_speed(name: str) -> float | None:
    """Bytes per second of a network interface, None if unknown."""
    state = psutil.net_if_stats().get(name)
    return state.speed * 1e6 / 8 if state and state.speed else None  # psutil: in Mbit/s, 0 if unknown


def infiniband_speed() -> float | None:
    """Bytes per second of all InfiniBand and RoCE ports together, None if there are none."""
    gigabits = 0.0
    for file in Path("/sys/class/infiniband").glob("*/ports/*/rate"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            gigabits += float(file.read_text().split()[0])  # "200 Gb/sec (4X HDR)"
    return gigabits * 1e9 / 8 if gigabits else None


def infiniband_devices() -> list[str]:
    """The InfiniBand and RoCE devices of this node."""
    return sorted(device.name for device in Path("/sys/class/infiniband").glob("*"))


# --- Switches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Switch:
    """An environment variable that turns off what may be broken, and what that costs."""

    name: str
    value: str
    cost: str


# Names: NVIDIA's NCCL documentation, "Environment Variables"; torch.distributed's, "Choosing the
# network interface".
_NCCL = (
    Switch("NCCL_SHM_DISABLE", "1", "ranks of a node that cannot reach each other's GPU use the network"),
    Switch("NCCL_P2P_DISABLE", "1", "no NVLink and no direct PCIe: GPUs exchange data through the node's memory"),
    Switch("NCCL_IB_DISABLE", "1", "no InfiniBand or RoCE: nodes use TCP, often at a tenth of the speed"),
    Switch("NCCL_NVLS_ENABLE", "0", "no sums inside NVSwitch: all-reduce on one node of H100s or newer is slower"),
    Switch("NCCL_CUMEM_ENABLE", "0", "little: buffers are allocated the older way, and NVLS is off"),
    Switch(
        "NCCL_NET_PLUGIN",
        "none",
        "a cloud's own network (EFA, GPUDirect-TCPX) is not used: NCCL's own TCP or InfiniBand is",
    ),
)


def switches(backend: str, interfaces: Sequence[str], infiniband: Sequence[str] = ()) -> list[Switch]:
    """The switches to try if ranks cannot communicate over `backend`, "nccl" or "gloo".

    `infiniband`: the devices of this node, of which each alone is tried if there are several.
    """
    cost = "nothing if this is the fastest network of the node; other networks are not used"
    chosen = [Switch(f"{backend.upper()}_SOCKET_IFNAME", name, cost) for name in interfaces]
    if backend == "gloo":
        return chosen
    one = "only one of the node's InfiniBand or RoCE devices is used"
    roce = "nothing: RoCE version 2, instead of the entry of the GID table that NCCL chose"
    devices = [Switch("NCCL_IB_HCA", f"={name}", one) for name in infiniband if len(infiniband) > 1]
    return [*_NCCL, *chosen, *([Switch("NCCL_IB_GID_INDEX", "3", roce)] if infiniband else []), *devices]


def smallest_set(
    candidates: Sequence[Switch], works: Callable[[tuple[Switch, ...]], bool], tries: int
) -> tuple[Switch, ...] | None:
    """The smallest set of switches for which `works` is true.

    None if none of the first `tries` sets is such a set.
    """
    sets = (
        chosen
        for size in range(1, len(candidates) + 1)
        for chosen in combinations(candidates, size)
        if len({switch.name for switch in chosen}) == size  # a variable has one value
    )
    return next((chosen for _, chosen in zip(range(tries), sets, strict=False) if works(chosen)), None)
