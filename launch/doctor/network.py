"""Between GPUs and nodes: how fast a link can be, what its tools print, and which switches get a broken one to work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

# --- Bandwidth -------------------------------------------------------------------------------------------------------

# Bytes per second one way. NVLink: 25 GB/s a link from V100 to H200, 50 from Blackwell on; NVIDIA's architecture
# whitepapers count both ways: V100 6 links, 300 GB/s; A100 12, 600; H100 18, 900; B200 18, 1,800.
_NVLINK, _NVLINK_BLACKWELL = 25e9, 50e9
# PCI Express Base Specification: GT/s a lane, and the share that is left by its encoding (8b/10b, then 128b/130b).
_PCIE_LANE = {1: 2.5e9 * 0.8 / 8, 2: 5e9 * 0.8 / 8} | {
    generation: giga * 1e9 * 128 / 130 / 8 for generation, giga in ((3, 8), (4, 16), (5, 32), (6, 64))
}
FAR_BELOW = 0.25  # of the link's speed; a sound ring reaches more than half of it


@dataclass(frozen=True)
class Link:
    """What ranks talk over. `bytes_per_second` is one way; None where nobody states it."""

    name: str
    bytes_per_second: float | None = None

    def is_far_above(self, measured: float) -> bool:
        return self.bytes_per_second is not None and measured < FAR_BELOW * self.bytes_per_second

    def __str__(self) -> str:
        return self.name + (f" ({self.bytes_per_second / 1e9:,.1f} GB/s)" if self.bytes_per_second else "")


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second of an all-reduce of `size` bytes, comparable with a link's speed for any number of ranks.

    size / seconds * 2 (ranks - 1) / ranks. Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def slowest_link(pairs: Iterable[str], capability: tuple[int, int], pcie: tuple[int, int] | None) -> Link:
    """Between the GPUs of one node: its name and speed. `pcie` is generation and lanes of a GPU, `pairs` topology()'s.

    A ring passes every link, so the slowest counts: the fewest NVLinks, or PCIe where a pair has none.
    """
    words = list(pairs)
    if words and all(word.startswith("NV") for word in words):
        links = min(int(word[2:]) for word in words)
        return Link(f"NVLink, {links} links", links * (_NVLINK_BLACKWELL if capability >= (10, 0) else _NVLINK))
    if pcie is None or pcie[0] not in _PCIE_LANE:
        return Link("PCIe")
    generation, lanes = pcie
    return Link(f"PCIe {generation}.0 x{lanes}", _PCIE_LANE[generation] * lanes)


# --- What tools print ------------------------------------------------------------------------------------------------


def nccl_version(version: tuple[int, ...] | list[int] | int) -> str:
    """2.18.5 of (2, 18, 5), 21805 or, before 2.9, 2708. Source: NCCL_VERSION in nccl.h."""
    if not isinstance(version, int):
        return ".".join(map(str, version))
    major = 10000 if version >= 10000 else 1000
    return f"{version // major}.{version % major // 100}.{version % 100}"


def topology(text: str) -> dict[tuple[int, int], str]:
    """How each pair of GPUs is connected, from `nvidia-smi topo -m`: NV4, PIX, PXB, PHB, NODE or SYS."""
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
    """The first entry of CUDA_VISIBLE_DEVICES that names no GPU, or one twice; None where all is well.

    CUDA hides that entry and all after it, without a word; after a repeated one it hides all. Source: the CUDA
    programming guide, "CUDA environment variables", and `_parse_visible_devices` in torch/cuda/__init__.py.
    """
    seen: set[str] = set()
    for entry in (word.strip() for word in visible.split(",")):
        if entry.startswith("MIG-"):  # a part of a GPU, which nvidia-smi lists elsewhere
            continue
        named = [uuid for at, uuid in enumerate(uuids) if entry == str(at) or (entry and uuid.startswith(entry))]
        if len(named) != 1 or named[0] in seen:
            return entry
        seen.add(named[0])
    return None


# --- Switches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Switch:
    """An environment variable that turns off what may be broken, and what that costs."""

    name: str
    value: str
    cost: str


# Names: NVIDIA's NCCL documentation, "Environment Variables"; torch.distributed's, "Choosing the network interface".
_NCCL = (
    Switch("NCCL_SHM_DISABLE", "1", "ranks of a node that cannot reach each other's GPU talk over its network"),
    Switch("NCCL_P2P_DISABLE", "1", "no NVLink and no direct PCIe: every byte between GPUs passes the node's memory"),
    Switch("NCCL_IB_DISABLE", "1", "no InfiniBand or RoCE: nodes talk over TCP, often at a tenth of the speed"),
)


def switches(backend: str, interfaces: Sequence[str]) -> list[Switch]:
    """What to try where ranks cannot talk over `backend`, nccl or gloo."""
    cost = "nothing where it is the fastest network of the node; other networks are not used"
    chosen = [Switch(f"{backend.upper()}_SOCKET_IFNAME", name, cost) for name in interfaces]
    return [*(_NCCL if backend == "nccl" else ()), *chosen]


def smallest_set(
    candidates: Sequence[Switch], works: Callable[[tuple[Switch, ...]], bool], tries: int
) -> tuple[Switch, ...] | None:
    """The first of the smallest sets of switches with which it works; None where none of the first `tries` does."""
    sets = (
        chosen
        for size in range(1, len(candidates) + 1)
        for chosen in combinations(candidates, size)
        if len({switch.name for switch in chosen}) == size  # a variable has one value
    )
    return next((chosen for _, chosen in zip(range(tries), sets, strict=False) if works(chosen)), None)
