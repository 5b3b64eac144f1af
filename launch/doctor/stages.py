"""One rank of the probe run of `recipes doctor`: real collectives, in stages, noted one by one.

`launch/doctor/ranks.py` starts one such process for each process that would train, and reads its
notes. A rank that fails, hangs or dies affects nothing outside the probe run.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

    from recipes.run import Json

REQUEST, NOTES = "request.json", "notes.jsonl"
_NEVER = timedelta(days=1)  # ranks.py decides when a wait is too long, because it sees all ranks of the node
_MIB = 1 << 20

STAGES: dict[str, Callable[[Rank], Json | None]] = {}


class Rank:
    """This process in the probe run: the `request` of ranks.py, and what its stages built."""

    store: TCPStore  # from the stage `rendezvous` on

    def __init__(self, folder: Path) -> None:
        self.request = json.loads((folder / REQUEST).read_text())
        self.rank, self.size = self.request["rank"], self.request["size"]
        self.local_rank, self.local_size = self.request["local_rank"], self.request["local_size"]
        self.cuda = self.request["backend"] == "nccl"
        self.notes = (folder / NOTES).open("a")
        self.failed_node: int | None = self.request["failed_node"]  # this node, if one of its checks failed
        self.device: torch.device | str = "cpu"

    def note(self, **note: object) -> None:
        print(json.dumps({"time": time.time(), **note}), file=self.notes, flush=True)

    def wait(self) -> None:
        """Wait until the GPU has finished its work."""
        if self.cuda:
            import torch

            torch.cuda.synchronize()


def main(folder: str) -> None:
    """Run the stages that the request in this folder asks for, up to the first that fails."""
    rank = Rank(Path(folder))
    code = 0
    for name in rank.request["stages"]:
        rank.note(begins=name)
        try:
            result = STAGES[name](rank)
        except Exception as error:
            rank.note(failed=name, error=_in_a_line(error))
            code = 1
            break
        rank.note(ends=name, result=result)
    os._exit(code)  # a normal exit lets gloo and NCCL wait for ranks that may be gone


def _in_a_line(error: Exception) -> str:
    """The error in one line, without the traces that torch adds."""
    text = re.sub(r"\[[^\]]*/[^\]]*\] ", "", str(error))  # file and line in torch's own source
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if lines[0].startswith("Caught"):  # in a DataLoader worker, whose message ends its trace
        return lines[-1]
    if "Last error:" in lines[:-1]:  # NCCL's message is on the line after
        return f"{type(error).__name__}: {lines[0]} {lines[lines.index('Last error:') + 1]}"
    return f"{type(error).__name__}: {lines[0]}"


def stage(function: Callable[[Rank], Json | None]) -> Callable[[Rank], Json | None]:
    """Register a stage, to run after those above. What it returns is noted as JSON."""
    STAGES[function.__name__] = function
    return function


@stage
def start(rank: Rank) -> Json:
    """Import torch and note its versions."""
    import torch

    torch.set_num_threads(rank.request["threads"])
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


@stage
def device(rank: Rank) -> Json | None:
    """Use the GPU of this rank, and note which others of the node it cannot write to directly."""
    if not rank.cuda:
        return None
    import torch

    torch.cuda.set_device(rank.local_rank)
    rank.device = torch.device("cuda", rank.local_rank)
    torch.ones(1, device=rank.device).item()
    others = [other for other in range(rank.local_size) if other != rank.local_rank]
    return {"no_peers": [other for other in others if not torch.cuda.can_device_access_peer(rank.local_rank, other)]}


class _Samples:
    """A data set of two tensors, each made in the worker that loads it."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        import torch

        # Without share_memory_ a full /dev/shm shows only as a hang.
        return torch.full((8 * _MIB // 4,), float(index)).share_memory_()


@stage
def workers(rank: Rank) -> Json | None:
    """One DataLoader worker passes tensors through /dev/shm.

    The probe run goes on if that fails: links may work.
    """
    if rank.local_rank:
        return None
    from torch.utils.data import DataLoader

    try:
        loader = DataLoader(_Samples(), batch_size=None, num_workers=1)  # type: ignore[arg-type]
        sums = [batch.double().mean().item() for batch in loader]
        wrong = "" if sums == [0, 1] else f"tensors arrived with wrong contents: means {sums}"
    except (RuntimeError, OSError) as error:
        wrong = _in_a_line(error)
    if wrong:
        rank.failed_node = rank.request["node"]
    return {"wrong": wrong}


@stage
def rendezvous(rank: Rank) -> Json:
    """Every rank connects to the store of rank 0 and learns which nodes have a failed check."""
    from torch.distributed import TCPStore

    address, port = rank.request["address"], rank.request["port"]
    rank.store = TCPStore(address, port, is_master=rank.rank == 0, wait_for_workers=False, timeout=_NEVER)
    rank.store.set(f"came/{rank.rank}", json.dumps(rank.failed_node))
    missing = list(range(rank.size))
    while missing:
        still = [other for other in missing if not rank.store.check([f"came/{other}"])]
        if still and still != missing:
            rank.note(missing=still)
        missing = still
        time.sleep(0.02)
    nodes = [json.loads(rank.store.get(f"came/{other}")) for other in range(rank.size)]
    return {"failed_nodes": sorted({node for node in nodes if node is not None})}


@stage
def connection(rank: Rank) -> None:
    """Connect every rank to every other: gloo does so at once, NCCL with the first collective."""
    import torch
    import torch.distributed as dist

    device = {"device_id": rank.device} if rank.cuda else {}
    dist.init_process_group(
        rank.request["backend"], store=rank.store, rank=rank.rank, world_size=rank.size, timeout=_NEVER, **device
    )
    dist.all_reduce(torch.ones(1, device=rank.device))
    rank.wait()


@stage
def all_reduce(rank: Rank) -> None:
    """Compare a sum with its known value.

    Small whole numbers: float32 adds them exactly for up to 700 ranks.
    """
    import torch
    import torch.distributed as dist

    numbers = torch.arange(_MIB, device=rank.device, dtype=torch.float32) % 64
    summed = numbers * (rank.rank + 1)
    dist.all_reduce(summed)
    wrong = int((summed != numbers * (rank.size * (rank.size + 1) / 2)).sum())
    if wrong:
        raise ArithmeticError(f"{wrong:,} of {_MIB:,} sums are wrong")


@stage
def bandwidth(rank: Rank) -> Json:
    """The fastest of a few large all-reduces, each timed on its slowest rank."""
    import torch
    import torch.distributed as dist

    size = (256 if rank.cuda else 8) * _MIB
    numbers = torch.ones(size // 4, device=rank.device)
    seconds = torch.empty(6, dtype=torch.float64)
    for at in range(len(seconds)):
        dist.barrier()
        rank.wait()
        began = time.perf_counter()
        dist.all_reduce(numbers)
        rank.wait()
        seconds[at] = time.perf_counter() - began
    seconds = seconds.to(rank.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return {"bytes": size, "seconds": seconds.min().item()}


@stage
def latency(rank: Rank) -> Json:
    """Seconds of the smallest all-reduce, the mean of many in a row."""
    import torch
    import torch.distributed as dist

    number, rounds = torch.ones(1, device=rank.device), 50
    dist.barrier()
    rank.wait()
    began = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(number)
        rank.wait()
    return {"seconds": (time.perf_counter() - began) / rounds}


@stage
def ddp_step(rank: Rank) -> None:
    """One step of a tiny model, on different data for each rank.

    Its weights must be equal everywhere afterwards.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(rank.rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(rank.device)
    parallel = DistributedDataParallel(model, device_ids=[rank.local_rank] if rank.cuda else None)
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    parallel(torch.randn(16, 64, device=rank.device)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    if torch.equal(weights, before) or not weights.isfinite().all():
        raise ArithmeticError("the step changed no weight, or made one NaN or infinite")
    lowest, highest = weights.clone(), weights.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        raise ArithmeticError("the ranks hold different weights after one step")


@stage
def matmul(rank: Rank) -> Json:
    """Seconds of a product of large matrices on each rank, all running at the same time."""
    import torch
    import torch.distributed as dist

    size, rounds, kind = (8192, 10, torch.float16) if rank.cuda else (512, 3, torch.float32)
    if rank.cuda and torch.cuda.get_device_capability(rank.device) >= (8, 0):
        kind = torch.bfloat16
    left, right = (torch.randn(size, size, device=rank.device).to(kind) for _ in range(2))
    if rank.size > 1:
        dist.barrier()
    best = float("inf")
    for _ in range(5):
        rank.wait()
        began = time.perf_counter()
        for _ in range(rounds):
            left @ right
        rank.wait()
        best = min(best, (time.perf_counter() - began) / rounds)
    own = torch.tensor([best], dtype=torch.float64, device=rank.device)
    of_all = [own] if rank.size == 1 else [torch.zeros_like(own) for _ in range(rank.size)]
    if rank.size > 1:
        dist.all_gather(of_all, own)
    return {"flops": 2 * size**3, "seconds": [one.item() for one in of_all], "dtype": str(kind).removeprefix("torch.")}


@stage
def end(rank: Rank) -> None:
    """Wait for all ranks. Rank 0 leaves last, because it runs the store of the others."""
    import torch.distributed as dist

    dist.barrier()
    rank.wait()
    rank.store.set(f"gone/{rank.rank}", "")
    while rank.rank == 0 and not rank.store.check([f"gone/{other}" for other in range(rank.size)]):
        time.sleep(0.02)
