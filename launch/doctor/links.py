"""One rank of a probe run of `recipes doctor`: run real collectives and judge speeds.

launch/doctor/probe.py starts this file once for each rank of a training, and reads each rank's
report. A rank that fails, hangs or dies affects nothing outside the probe run. Each
stage is a function that returns a `Check` or None, and raises if the rank cannot continue.
"""

import faulthandler
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launch.doctor.machine import Check, numbers, nvidia_smi
from launch.host import processes
from recipes.planner.speed import link_of
from recipes.run import Json
from recipes.run.hardware import Gpu
from recipes.scaling.causes import bus_bytes

_FAR_BELOW = 0.25  # warn below this share of the link's usual speed
_SLOW = {"nccl": 1.15, "gloo": 2.0}  # warn above this multiple of the median time: gloo's ranks share CPUs
_NEVER = timedelta(days=1)  # probe.py ends a long wait: it sees all ranks of the node
_MIB = 1 << 20


class Rank:
    """This process in the probe run: the request from probe.py, and the state that stages share."""

    store: dist.TCPStore  # set by the stage `rendezvous`

    def __init__(self, asked: Json, folder: str) -> None:
        self.asked, self.folder = asked, folder
        self.rank, self.size = self.asked["rank"], self.asked["size"]
        self.local_rank, self.local_size = self.asked["local_rank"], self.asked["local_size"]
        self.cuda = self.asked["backend"] == "nccl"
        self.device = torch.device("cuda", self.local_rank) if self.cuda else torch.device("cpu")
        self.notes: Json = {"found": {}}

    def note(self, **notes: object) -> None:
        self.notes |= notes
        processes.answer(self.folder, self.notes)

    def wait(self) -> None:
        """Wait until the GPU has finished its work."""
        if self.cuda:
            torch.cuda.synchronize()

    def together(self) -> None:
        """Wait for the other ranks, so that all ranks begin their work at the same time."""
        if self.size > 1:
            dist.barrier()
        self.wait()

    def seconds(self, call: Callable[[], object], rounds: int) -> list[float]:
        """Return how many seconds `call` takes in each round. All ranks begin a round together."""
        taken = []
        for _ in range(rounds):
            self.together()
            began = time.perf_counter()
            call()
            self.wait()
            taken.append(time.perf_counter() - began)
        return taken

    def of_all(self, own: Any) -> list[Any]:
        """Send this rank's value `own` to all ranks. Return the values of all, in rank order."""
        found = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(found, own)
        return found


def main(asked: Json, folder: str) -> None:
    """Run the requested stages, up to the first stage that fails, and end this process."""
    faulthandler.enable()  # a crash in native code writes its Python traceback to the log
    rank = Rank(asked, folder)
    for name in asked["stages"]:
        rank.note(stage=name)
        try:
            check = globals()[name](rank)
        except Exception as error:
            rank.note(error=_in_a_line(error), failed_at=time.time())
            os._exit(1)
        rank.notes["found"][name] = asdict(check) if check else None
    rank.note()
    os._exit(0)  # in a normal exit gloo and NCCL wait for ranks that may be gone


def _in_a_line(error: Exception) -> str:
    """Return an error's type, first line and last line, without torch's C++ stack trace. The last
    line holds NCCL's own message.
    """
    text = re.sub(r"\[[^\]]*/[^\]]*\] ", "", str(error).partition("Exception raised from")[0])
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' '.join(dict.fromkeys((lines[0], lines[-1])))}"


# --- This rank ------------------------------------------------------------------------------------


def start(rank: Rank) -> Check:
    """Set the number of CPU threads and, with CUDA, run a small operation on this rank's GPU."""
    torch.set_num_threads(rank.asked["threads"])
    if not rank.cuda:
        return Check("ok", "gloo", f"from torch {torch.__version__}")
    torch.cuda.init()  # fails with the reason if this torch and the driver do not match
    torch.cuda.set_device(rank.device)
    torch.ones(1, device=rank.device).item()
    return Check("ok", "NCCL", f"{'.'.join(map(str, torch.cuda.nccl.version()))}, from torch {torch.__version__}")


# --- Between ranks --------------------------------------------------------------------------------


def rendezvous(rank: Rank) -> Check:
    """Connect this rank to the store of rank 0, and wait for all other ranks."""
    address, port = rank.asked["address"], rank.asked["port"]
    rank.store = dist.TCPStore(address, port, is_master=rank.rank == 0, wait_for_workers=False, timeout=_NEVER)
    rank.store.add("came", 1)
    while rank.store.add("came", 0) < rank.size:
        time.sleep(0.02)
    return Check("ok", "rendezvous", f"{rank.size} ranks")


def connection(rank: Rank) -> Check:
    """Form the process group, and compare a sum over all ranks with its known value.

    gloo connects every pair of ranks. NCCL connects the pairs that it uses, before or during the
    sum. The values are small whole numbers: float32 sums of up to 700 ranks are exact.
    """
    world = {"store": rank.store, "rank": rank.rank, "world_size": rank.size, "timeout": _NEVER}
    dist.init_process_group(rank.asked["backend"], device_id=rank.device if rank.cuda else None, **world)
    part = torch.arange(_MIB, device=rank.device, dtype=torch.float32) % 64
    summed = part * (rank.rank + 1)
    dist.all_reduce(summed)
    wrong = int((summed != part * (rank.size * (rank.size + 1) / 2)).sum())
    if wrong:
        raise ArithmeticError(f"{wrong:,} of {len(summed):,} sums are wrong")
    return Check("ok", "connection", f"{rank.size} ranks reach each other, and their sums are right")


def bandwidth(rank: Rank) -> Check:
    """Compare the speed of a large all-reduce on the slowest rank with the speed of the link."""
    data = torch.ones((256 if rank.cuda else 8) * _MIB // 4, device=rank.device)

    def seconds(part: torch.Tensor) -> float:
        return min(map(max, zip(*rank.of_all(rank.seconds(partial(dist.all_reduce, part), 6)), strict=True)))

    return compared(seconds(data), seconds(data[:1]), data.nbytes, rank.size, *_link(rank))


def compared(seconds: float, latency: float, size: int, ranks: int, link: str, speed: float | None) -> Check:
    """Compare the bus bandwidth of an all-reduce of `size` bytes with the `speed` of the link.

    `latency`: seconds to all-reduce one number. `speed`: bytes/s, if known.
    """
    reached = bus_bytes(size, ranks) / seconds
    known = numbers(**{"all-reduce": (reached, "bytes/s"), "latency": (latency, "s")})
    text = f"all-reduce {reached / 1e9:,.2f} GB/s over {link}{f' ({speed / 1e9:,.1f} GB/s)' if speed else ''}"
    if speed and reached < _FAR_BELOW * speed:
        fix = "set NCCL_DEBUG=INFO to see which links NCCL uses; run `nvidia-smi nvlink -s` to see whether NVLink is on"
        return Check("warning", "bandwidth", f"{text}: far below the link's speed", fix, known)
    return Check("ok", "bandwidth", f"{text}, {latency * 1e6:,.0f} us for a single number", numbers=known)


def _link(rank: Rank) -> tuple[str, float | None]:
    """Return a link's name and usual speed in bytes/s: nominal for InfiniBand, None if unknown."""
    if rank.size > rank.local_size:
        rates = [file.read_text().split()[0] for file in Path("/sys/class/infiniband").glob("*/ports/*/rate")]
        if rank.cuda and rates:  # "200 Gb/sec (4X HDR)"
            return "InfiniBand or RoCE", sum(map(float, rates)) * 1e9 / 8
        return "the network between the nodes", None
    if not rank.cuda:
        return "loopback", None
    gpu = Gpu(rank.asked["card"], torch.cuda.get_device_capability(rank.device), 0)
    speed, name = link_of(gpu, rank.size, 1)
    if name == "NVLink" and not re.search(r"\bNV\d", nvidia_smi("topo", "-m")):  # nvidia-smi shows no NVLink
        return "PCIe", None
    return name or "an unknown link", speed


def end(rank: Rank) -> None:
    """Wait for all ranks. Rank 0 leaves last, because it runs the store of all ranks."""
    rank.together()
    rank.store.add("gone", 1)
    while rank.rank == 0 and rank.store.add("gone", 0) < rank.size:
        time.sleep(0.02)


# --- Speeds ---------------------------------------------------------------------------------------


def matmul(rank: Rank) -> Check:
    """Multiply large matrices on all ranks at the same time, and compare the ranks' speeds."""
    size, rounds, kind = (8192, 10, torch.float16) if rank.cuda else (512, 3, torch.float32)
    if rank.cuda and torch.cuda.get_device_capability(rank.device) >= (8, 0):
        kind = torch.bfloat16
    left, right = (torch.randn(size, size, device=rank.device).to(kind) for _ in range(2))
    best = min(rank.seconds(lambda: [left @ right for _ in range(rounds)], 5)) / rounds
    dtype = str(kind).removeprefix("torch.")
    return slowest_rank(rank.of_all(best), 2 * size**3, dtype, rank.asked["backend"], rank.local_size)


def slowest_rank(seconds: list[float], flops: float, dtype: str, backend: str, local_size: int) -> Check:
    """Report the speed of the slowest rank, and name the rank if it is far behind the others."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    times = seconds[slowest] / sorted(seconds)[(len(seconds) - 1) // 2]
    reached = flops / seconds[slowest]
    known = numbers(slowest=(reached, "FLOP/s"), of_median=(times, "times"))
    text = f"{reached / 1e12:,.0f} TFLOP/s" if reached > 1e13 else f"{reached / 1e9:,.0f} GFLOP/s"
    text += f" in {dtype}"
    if len(seconds) > 1:
        text += f" on the slowest of {len(seconds)} ranks, which takes {times:.2f} times the median time"
    if times > _SLOW[backend]:
        node, local_rank = divmod(slowest, local_size)
        look = {"nccl": "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE`", "gloo": "`top`"}[backend]
        what = f"rank {slowest}, {'GPU' if backend == 'nccl' else 'process'} {local_rank} of node {node}: {text}"
        fix = f"check {look} and other programs on that node, because every step waits for the slowest rank"
        return Check("warning", "matrices", what, fix, known)
    return Check("ok", "matrices", text, numbers=known)
