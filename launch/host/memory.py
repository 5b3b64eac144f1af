"""The memory of a process: its limit, its peak, what is free, and whether it ran out."""

from __future__ import annotations

import errno
import math
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

# Messages of failed allocations, from libraries that have no exception of their own for it.
_RAN_OUT = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Cuda failure (?:2 )?'out of memory'|std::bad_alloc|Cannot allocate memory|failed to map segment"
    r"|libgomp: Thread creation failed"
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"


@dataclass(frozen=True)
class Shortage:
    """What an allocation asked for, and what was free at that moment. None if unknown."""

    asked_bytes: int | None
    free_bytes: int | None


class AboveLimit(MemoryError):
    """The process holds more memory than its limit before anything is limited."""


# --- Limit, peak, free ---------------------------------------------------------------------------


def limit(limit_bytes: int, cuda: bool) -> None:
    """Let this process take at most `limit_bytes` from now on, including what it holds already.

    Linux limits the RAM that a process reserves, and thread stacks reserve far more than they use.
    So the limit is on what is reserved on top of what is resident now. Raises `AboveLimit` if the
    process holds more already: under such a limit Python could not even report it.
    """
    if cuda:
        import torch

        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
    else:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        now = psutil.Process().memory_info()
        if now.rss > limit_bytes:
            raise AboveLimit
        soft = now.data + limit_bytes - now.rss
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def peak(cuda: bool) -> int:
    """The most bytes that this process has held: reserved on its GPU, or else in RAM."""
    if cuda:
        import torch

        return torch.cuda.max_memory_reserved()
    # psutil does not read the peak, and getrusage includes that of the parent process.
    line = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.M)
    return int(line[1]) * 1024 if line else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- When it ran out -----------------------------------------------------------------------------


def says_it_ran_out(text: str) -> bool:
    """True if the log of a process says that memory ran out."""
    return bool(_RAN_OUT.search(text))


def ran_out(error: BaseException | None) -> bool:
    """True if the cause of an error is that memory ran out, on the GPU or in RAM."""
    if error is None:
        return False
    if isinstance(error, MemoryError) or _of_gpu(error) or says_it_ran_out(str(error)):
        return True
    is_limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    if is_limited and "can't start new thread" in str(error):  # no room for its stack
        return True
    return (isinstance(error, OSError) and error.errno == errno.ENOMEM) or ran_out(error.__cause__)


def _of_gpu(error: BaseException) -> bool:
    # Not imported for this: that takes seconds, and without it the error is not torch's.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def shortage(error: BaseException) -> Shortage:
    """What was asked for and what was free: from the error's message, or measured now for RAM.

    Lifts this process's limit of RAM, because explaining the failure takes some.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    if isinstance(error, AboveLimit):
        return Shortage(None, 0)
    text = f"{error} {error.__cause__ or ''}"
    if _of_gpu(error):  # with a limit of its own, a process has less than what is free on the device
        taken = sum(_size(f"{_SIZE} is {how} by PyTorch", text) or 0 for how in ("allocated", "reserved"))
        left, free = (_size(f"{_SIZE} allowed", text) or math.inf) - taken, _size(f"{_SIZE} is free", text)
        return Shortage(_size(f"Tried to allocate {_SIZE}", text), free and round(max(0, min(free, left))))
    match = re.search(r"you tried to allocate (\d+) bytes|(?:malloc|realloc) of size (\d+)", text)
    asked, free = int(match[1] or match[2]) if match else None, psutil.virtual_memory().available
    if soft != resource.RLIM_INFINITY:
        free = max(0, min(free, soft - psutil.Process().memory_info().data))
    return Shortage(asked, None if asked and free >= asked else free)  # the failed step has freed its memory since


def _size(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return round(float(match[1]) * _UNITS[match[2]]) if match else None
