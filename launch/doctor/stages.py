"""One rank of the probe run of `recipes doctor`: real collectives, in stages, noted one by one.

`launch/doctor/ranks.py` starts one such process for each process that would train, and reads its
notes. A rank that fails, hangs or dies affects nothing outside the probe run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from launch.doctor import collectives
from launch.doctor.collectives import Rank, together

if TYPE_CHECKING:
    import torch

    from recipes.run import Json

_NEVER = timedelta(days=1)  # ranks.py decides when a wait is too long, because it sees all ranks of the node
_MIB = 1 << 20


def main(folder: str) -> None:
    """Run the stages that the request in this folder asks for, up to the first that fails."""
    faulthandler.enable()  # a crash in native code leaves its Python lines in the log
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


def start(rank: Rank) -> Json:
    """Import torch and note its versions."""
    import torch

    torch.set_num_threads(rank.request["threads"])
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": nccl}


def device(rank: Rank) -> Json | None:
    """Use the GPU of this rank, and note which others of the node it cannot write to directly."""
    if not rank.cuda:
        return None
    import torch

    compiled, has = torch.cuda.get_arch_list(), torch.cuda.get_device_capability(rank.local_rank)
    if torch.version.cuda and compiled and not runs_on(has, compiled):
        card = f"{torch.cuda.get_device_name(rank.local_rank)} (sm_{has[0]}{has[1]})"
        raise RuntimeError(f"torch {torch.__version__} is not built for {card}, only for {', '.join(compiled)}")
    torch.cuda.set_device(rank.local_rank)
    rank.device = torch.device("cuda", rank.local_rank)
    torch.ones(1, device=rank.device).item()
    others = [other for other in range(rank.local_size) if other != rank.local_rank]
    return {"no_peers": [other for other in others if not torch.cuda.can_device_access_peer(rank.local_rank, other)]}


def runs_on(capability: tuple[int, int], compiled: list[str]) -> bool:
    """Whether a GPU runs code that was compiled for these (as torch.cuda.get_arch_list).

    sm_80 is machine code, for its major version from that minor one on; compute_80 is compiled on
    the spot for any later one; a letter behind binds it to exactly that one (CUDA programming
    guide, "Compute Capability Compatibility").
    """
    for name in compiled:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name)
        if not found:
            return True  # a name of a later torch
        kind, own = found[1], (int(found[2]), int(found[3]))
        family = found[4] == "" and own <= capability and (kind == "compute" or own[0] == capability[0])
        if own == capability or family:
            return True
    return False


class _Samples:
    """A data set of two tensors, each made in the worker that loads it."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        import torch

        # Without share_memory_ a full /dev/shm shows only as a hang.
        return torch.full((8 * _MIB // 4,), float(index)).share_memory_()


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


def matmul(rank: Rank) -> Json:
    """Seconds of a product of large matrices on each rank, all running at the same time."""
    import torch
    import torch.distributed as dist

    size, rounds, kind = (8192, 10, torch.float16) if rank.cuda else (512, 3, torch.float32)
    if rank.cuda and torch.cuda.get_device_capability(rank.device) >= (8, 0):
        kind = torch.bfloat16
    left, right = (torch.randn(size, size, device=rank.device).to(kind) for _ in range(2))
    together(rank)
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


def adam(rank: Rank) -> Json:
    """Seconds of an update on the CPU, on all ranks at the same time as with offload.

    All that DeepSpeed does there (`step` of stage_1_and_2.py): clip the gradients, Adam, and cast
    the weights to 16 bits. torch's fused Adam needs no compiler: DeepSpeed's took 4 % longer on one
    core. All ranks together have 1 GiB or more, which no cache holds, and they wait for each other
    before each round: a rank that is ahead would have the memory's bandwidth for itself.
    """
    import torch

    count = max(16, 64 // rank.local_size) * _MIB
    weights = torch.nn.Parameter(torch.zeros(count))
    weights.grad = torch.ones(count)
    in_16_bits = torch.empty(count, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW([weights], fused=True)
    seconds = []
    for _ in range(4):
        together(rank)
        began = time.perf_counter()
        weights.grad.mul_(1.0)
        optimizer.step()
        in_16_bits.copy_(weights.detach())
        seconds.append(time.perf_counter() - began)
    return {"parameters": count, "seconds": sorted(seconds[1:])[1]}  # the first makes Adam's state


def pcie(rank: Rank) -> Json | None:
    """Bytes per second to the GPU and from it, through pinned memory, on all ranks at once."""
    if not rank.cuda:
        return None
    import torch

    here = torch.empty(256 * _MIB, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=rank.device)
    speeds = {}
    for name, target, source in (("to", there, here), ("from", here, there)):
        best = float("inf")
        together(rank)
        for _ in range(5):
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            rank.wait()
            best = min(best, time.perf_counter() - began)
        speeds[name] = here.numel() / best
    return speeds


def context(rank: Rank) -> Json | None:
    """What CUDA has taken of the GPU, now that kernels are loaded."""
    if not rank.cuda or not rank.request["smi"]:
        return None if not rank.cuda else {"bytes": None}
    import torch

    from launch.doctor.measured import outside_torch

    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(rank.device).uuid}"
        return {"bytes": outside_torch(rank.request["used_bytes"].get(uuid))}
    except Exception:  # a machine on which this cannot be read may well train
        return {"bytes": None}


def end(rank: Rank) -> None:
    """Wait for all ranks. Rank 0 leaves last, because it runs the store of the others."""
    import torch.distributed as dist

    dist.barrier()
    rank.wait()
    rank.store.set(f"gone/{rank.rank}", "")
    while rank.rank == 0 and not rank.store.check([f"gone/{other}" for other in range(rank.size)]):
        time.sleep(0.02)


# In the order in which they run.
STAGES: dict[str, Callable[[Rank], Json | None]] = {
    one.__name__: one
    for one in (
        start,
        device,
        workers,
        rendezvous,
        connection,
        collectives.all_reduce,
        collectives.reduce_scatter,
        collectives.all_gather,
        collectives.bandwidth,
        collectives.sweep,
        collectives.latency,
        collectives.ddp_step,
        matmul,
        adam,
        pcie,
        context,
        end,
    )
}
