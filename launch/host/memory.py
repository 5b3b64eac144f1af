"""The memory of a process: its limit, its peak, what is free, and whether it ran out."""

from __future__ import annotations

import errno
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
    elif sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        now = psutil.Process().memory_info()
        if now.rss > limit_bytes:
            raise AboveLimit
        soft = now.data + limit_bytes - now.rss
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _is_limited() -> bool:
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def resident() -> int:
    """Bytes of RAM that this process holds now."""
    return psutil.Process().memory_info().rss


def peak(cuda: bool) -> int:
    """The most bytes that this process has held: reserved on its GPU, or else in RAM."""
    if cuda:
        import torch

        return torch.cuda.max_memory_reserved()
    if sys.platform == "linux":
        # psutil does not read the peak, and getrusage includes that of the parent process.
        line = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.M)
        if line:
            return int(line[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_ram() -> int | None:
    """Bytes of RAM that the system has available, or None if unknown. Reads no cgroup limit."""
    try:
        return psutil.virtual_memory().available
    except (OSError, RuntimeError, psutil.Error):
        return None


# --- When it ran out -----------------------------------------------------------------------------


def says_it_ran_out(text: str) -> bool:
    """Whether the log of a process says that memory ran out."""
    return bool(_RAN_OUT.search(text))


def ran_out(error: BaseException | None) -> bool:
    """Whether the cause of an error is that memory ran out, on the GPU or in RAM."""
    if error is None:
        return False
    if isinstance(error, MemoryError) or _of_gpu(error) or _RAN_OUT.search(str(error)):
        return True
    if "can't start new thread" in str(error) and _is_limited():  # no room for its stack
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
    if _of_gpu(error):
        return Shortage(_size(r"Tried to allocate", text, before=False), _free_of_gpu(text))
    match = re.search(r"you tried to allocate (\d+) bytes|(?:malloc|realloc) of size (\d+)", text)
    asked, free = int(match[1] or match[2]) if match else None, _free_in_ram(soft)
    # The failed step has freed its memory since.
    if asked is not None and free is not None and free >= asked:
        free = None
    return Shortage(asked, free)


def _free_of_gpu(text: str) -> int | None:
    """Bytes free on the device, or less if this process has a limit. None if unknown."""
    free, allowed = _size("is free", text), _size("allowed", text)
    taken = [_size("is allocated by PyTorch", text) or 0, _size("is reserved by PyTorch but unallocated", text) or 0]
    if allowed is None:
        return free
    left = max(0, allowed - sum(taken))
    return left if free is None else min(free, left)


def _size(words: str, text: str, before: bool = True) -> int | None:
    size = r"([\d.]+) (bytes|KiB|MiB|GiB)"
    match = re.search(rf"{size} {words}" if before else rf"{words} {size}", text)
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def _free_in_ram(soft: int) -> int | None:
    free = free_ram()
    if soft == resource.RLIM_INFINITY or sys.platform != "linux":
        return free
    left = max(0, soft - psutil.Process().memory_info().data)
    return left if free is None else min(free, left)
