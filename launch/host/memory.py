"""Limit the memory of a process, measure its peak, and recognise that memory ran out."""

import re
import resource
from pathlib import Path

import psutil

from recipes.errors import one_line

# Messages of failed allocations.
_RAN_OUT = re.compile(
    r"(?:CUDA|HIP|XPU)(?: error:)? out of memory|Cuda failure (?:2 )?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: can't allocate memory|std::bad_alloc|Cannot allocate memory|failed to map segment"
    r"|would exceed allowed memory"  # the allocator backend:cudaMallocAsync
    r"|libgomp: Thread creation failed|can't start new thread"  # no memory for the thread's stack
)


def limit(limit_bytes: int, cuda: bool) -> None:
    """Limit this process's GPU memory or RAM to `limit_bytes`, including the memory in use now.

    Linux limits the RAM that a process reserves, and thread stacks reserve far more than they use.
    So the limit is set to the RAM reserved now, plus `limit_bytes`, minus the RAM resident now.
    Raises `MemoryError` if more than `limit_bytes` is resident already.
    """
    if cuda:
        import torch

        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        now = psutil.Process().memory_info()
        if now.rss > limit_bytes:
            raise MemoryError(f"the process takes {now.rss / 2**20:,.1f} MiB before it loads the model")
        soft = now.data + limit_bytes - now.rss
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def peak(cuda: bool) -> int:
    """Return this process's peak memory in bytes: reserved on its GPU, or else resident in RAM."""
    if cuda:
        import torch

        return torch.cuda.max_memory_reserved()
    # psutil does not read the peak, and getrusage includes the parent process's peak.
    line = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.M)
    return int(line[1]) * 1024 if line else psutil.Process().memory_info().rss


def says_it_ran_out(text: str) -> bool:
    """True if a log, or the message of an error, reports that memory ran out."""
    return bool(_RAN_OUT.search(text))


def ran_out(error: BaseException | None) -> bool:
    """True if the cause of an error is that memory ran out, on the GPU or in RAM."""
    if error is None:
        return False
    return isinstance(error, MemoryError) or says_it_ran_out(str(error)) or ran_out(error.__cause__)


def shortage(error: BaseException) -> str:
    """Lift this process's RAM limit, because explaining a failure takes RAM. Return the library's
    message about the failed allocation.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    return one_line(error)
