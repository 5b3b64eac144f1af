"""One rank of a probe run, and its stages that communicate: each collective's result, its speed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launch.host.processes import request

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

    from recipes.run import Json

NOTES = "notes.jsonl"
_KIB, _MIB = 1 << 10, 1 << 20


class Rank:
    """This process in the probe run: the `request` of ranks.py, and what its stages built."""

    store: TCPStore  # from the stage `rendezvous` on

    def __init__(self, folder: Path) -> None:
        self.request = request(str(folder))
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


def reduce_scatter(rank: Rank) -> None:
    """As ZeRO and FSDP sum gradients: each rank gets its part of the sums."""
    import torch
    import torch.distributed as dist

    numbers = torch.arange(rank.size * 1024, device=rank.device, dtype=torch.float32) % 64
    part = torch.empty(1024, device=rank.device)
    dist.reduce_scatter_tensor(part, numbers * (rank.rank + 1))
    own = numbers[rank.rank * 1024 : (rank.rank + 1) * 1024]
    wrong = int((part != own * (rank.size * (rank.size + 1) / 2)).sum())
    if wrong:
        raise ArithmeticError(f"{wrong:,} of 1,024 sums are wrong")


def all_gather(rank: Rank) -> None:
    """As ZeRO and FSDP collect weights: each rank gets the parts of all."""
    import torch
    import torch.distributed as dist

    whole = torch.empty(rank.size * 1024, device=rank.device)
    dist.all_gather_into_tensor(whole, torch.full((1024,), float(rank.rank), device=rank.device))
    expected = torch.arange(rank.size, device=rank.device).repeat_interleave(1024)
    wrong = int((whole != expected).sum())
    if wrong:
        raise ArithmeticError(f"{wrong:,} of {len(whole):,} numbers are wrong")


def sweep(rank: Rank) -> Json:
    """Seconds of each collective at a few sizes, the fastest of a few, on the slowest rank.

    A size is that of the whole tensor, as in nccl-tests.
    """
    import torch
    import torch.distributed as dist

    found = []
    for size in (_KIB << 2, _KIB << 6, _MIB, (64 if rank.cuda else 4) * _MIB):
        part = torch.ones(size // 4 // rank.size, device=rank.device)
        whole = torch.ones(len(part) * rank.size, device=rank.device)
        calls = {
            "all-reduce": partial(dist.all_reduce, whole),
            "reduce-scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "all-gather": partial(dist.all_gather_into_tensor, whole, part),
        }
        for name, call in calls.items():
            found.append({"collective": name, "bytes": size, "seconds": _fastest(rank, call, 4)})
    return {"sizes": found}


def bandwidth(rank: Rank) -> Json:
    """The fastest of a few large all-reduces, each timed on its slowest rank."""
    import torch
    import torch.distributed as dist

    size = (256 if rank.cuda else 8) * _MIB
    numbers = torch.ones(size // 4, device=rank.device)
    return {"bytes": size, "seconds": _fastest(rank, partial(dist.all_reduce, numbers), 6)}


def _fastest(rank: Rank, call: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest round, each as long as its slowest rank takes."""
    import torch
    import torch.distributed as dist

    seconds = torch.empty(rounds, dtype=torch.float64)
    for at in range(rounds):
        together(rank)
        began = time.perf_counter()
        call()
        rank.wait()
        seconds[at] = time.perf_counter() - began
    seconds = seconds.to(rank.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.min().item()


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


def ddp_step(rank: Rank) -> Json:
    """One step of a tiny model, on different data for each rank, in float32 and in bfloat16.

    Its weights must be equal everywhere afterwards, bit for bit.
    """
    import torch

    kinds = [torch.float32]
    if not rank.cuda or torch.cuda.is_bf16_supported(including_emulation=False):
        kinds.append(torch.bfloat16)
    for kind in kinds:
        _step(rank, kind)
    return {"dtypes": [str(kind).removeprefix("torch.") for kind in kinds]}


def _step(rank: Rank, kind: torch.dtype) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(rank.rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    model = model.to(rank.device, kind)
    parallel = DistributedDataParallel(model, device_ids=[rank.local_rank] if rank.cuda else None)
    before = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    parallel(torch.randn(16, 64, device=rank.device, dtype=kind)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    if torch.equal(weights, before) or not weights.isfinite().all():
        raise ArithmeticError(f"the step in {kind} changed no weight, or made one NaN or infinite")
    lowest, highest = weights.float(), weights.float()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if not torch.equal(lowest, highest):
        raise ArithmeticError(f"the ranks hold different weights after one step in {kind}")


def together(rank: Rank) -> None:
    """Wait for the other ranks, so that all use the host at the same time."""
    if rank.size > 1:
        import torch.distributed as dist

        dist.barrier()
    rank.wait()
