"""The memory of a process: how much it may take, what it has taken at most, and whether it was memory that ran out."""

from __future__ import annotations

import errno
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

# What libraries say when an allocation fails, where they have no exception of their own for it.
_RAN_OUT = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|Cuda failure (?:2 )?'out of memory'|std::bad_alloc|Cannot allocate memory|failed to map segment"
    r"|libgomp: Thread creation failed"
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Shortage:
    """What an allocation asked for, and what was free then; None where nobody says."""

    asked_bytes: int | None
    free_bytes: int | None

    def __str__(self) -> str:
        asked = f"asked for {in_words(self.asked_bytes)}" if self.asked_bytes is not None else "asked for more"
        return asked + (f", {in_words(self.free_bytes)} was free" if self.free_bytes is not None else "")


def in_words(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


# --- The limit -------------------------------------------------------------------------------------------------------


def limit(limit_bytes: int, cuda: bool) -> None:
    """From now on this process can take no more than `limit_bytes` in all: what it has already counts.

    In RAM Linux counts what is reserved, most of which the stacks of threads never touch; so the limit is on what is
    added to what is resident now.
    """
    if cuda:
        import torch

        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
    elif sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = max(_status("VmData") + limit_bytes - _status("VmRSS"), 0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _is_limited() -> bool:
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def resident() -> int:
    """Bytes of RAM that this process takes now."""
    return _status("VmRSS") if sys.platform == "linux" else peak(cuda=False)


def peak(cuda: bool) -> int:
    """The most bytes this process has taken: reserved on its GPU, which is what others cannot have, else of RAM."""
    if cuda:
        import torch

        return torch.cuda.max_memory_reserved()
    if sys.platform == "linux":  # getrusage counts what the process that started this one took, too
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def free_ram() -> int:
    """Bytes of RAM that the system could give out now."""
    if sys.platform != "linux":
        return 16 << 30
    return _number("/proc/meminfo", "MemAvailable")


def _status(name: str) -> int:
    return _number("/proc/self/status", name)


def _number(file: str, name: str) -> int:
    """Bytes of a line such as `VmRSS:   1234 kB`."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(file).read_text(), flags=re.M)
    return int(found[1]) * 1024 if found else 0


# --- When it ran out -------------------------------------------------------------------------------------------------


def says_it_ran_out(text: str) -> bool:
    """Whether what a process left in its log is that memory ran out."""
    return bool(_RAN_OUT.search(text))


def ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out, on the GPU or in RAM, and nothing else."""
    if error is None:
        return False
    if isinstance(error, MemoryError) or _of_gpu(error) or _RAN_OUT.search(str(error)):
        return True
    if "can't start new thread" in str(error) and _is_limited():  # for want of a stack
        return True
    return (isinstance(error, OSError) and error.errno == errno.ENOMEM) or ran_out(error.__cause__)


def _of_gpu(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError"  # torch's: by its name, as torch takes seconds to import


def shortage(error: BaseException) -> Shortage:
    """What was asked for and what was free, from the error's words or, in RAM, as it is at this moment.

    Lifts the limit of RAM: to explain what happened takes some.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    text = f"{error} {error.__cause__ or ''}"
    if _of_gpu(error):
        return Shortage(_size(r"Tried to allocate", text, before=False), _free_of_gpu(text))
    found = re.search(r"you tried to allocate (\d+) bytes|(?:malloc|realloc) of size (\d+)", text)
    asked, free = int(found[1] or found[2]) if found else None, _free_in_ram(soft)
    if asked is not None and free is not None and free >= asked:  # what failed has let go of its own since
        free = None
    return Shortage(asked, free)


def _free_of_gpu(text: str) -> int | None:
    """On the device, or less where this process is limited."""
    free, allowed = _size("is free", text), _size("allowed", text)
    taken = [_size("is allocated by PyTorch", text) or 0, _size("is reserved by PyTorch but unallocated", text) or 0]
    if allowed is None:
        return free
    left = max(0, allowed - sum(taken))
    return left if free is None else min(free, left)


def _size(words: str, text: str, before: bool = True) -> int | None:
    size = r"([\d.]+) (bytes|KiB|MiB|GiB)"
    found = re.search(rf"{size} {words}" if before else rf"{words} {size}", text)
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


def _free_in_ram(soft: int) -> int | None:
    if sys.platform != "linux":
        return None
    free = free_ram()
    return free if soft == resource.RLIM_INFINITY else min(free, max(0, soft - _status("VmData")))
