"""Reads this machine's hardware without importing torch.

The CUDA driver itself lists the GPUs (libcuda through ctypes). The driver honours
CUDA_VISIBLE_DEVICES exactly as torch does, creates no context, and answers in milliseconds. A
machine without libcuda trains on its CPU.
"""

import contextlib
import ctypes
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from recipes.run.known_gpus import Gpu, known

_MAJOR, _MINOR = 75, 76  # attributes COMPUTE_CAPABILITY_MAJOR and _MINOR in cuda.h


@dataclass(frozen=True)
class Hardware:
    """This process's visible GPUs and usable CPU cores. `liger`: True if Liger is installed."""

    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    liger: bool = False

    @property
    def cuda(self) -> bool:
        return bool(self.gpus)

    @property
    def can_shard(self) -> bool:
        """True if FSDP shards here. On a CPU, accelerate ignores FSDP and trains plain DDP."""
        return self.cuda

    @property
    def capability(self) -> tuple[int, int]:
        """The lowest compute capability among the GPUs; (0, 0) without a GPU."""
        return min((gpu.capability for gpu in self.gpus), default=(0, 0))

    @property
    def peak_flops(self) -> float | None:
        """Peak dense bf16 FLOP/s of the first GPU; None without a known GPU, or without bf16."""
        card = known(self.gpus[0].name) if self.gpus else None
        return card.peak_flops if card else None

    def __str__(self) -> str:
        if not self.gpus:
            return f"CPU, {self.cores} core{'s' * (self.cores > 1)}"
        return f"{len(self.gpus)} x {self.gpus[0].name}"


def read() -> Hardware:
    """Read this machine's hardware. Never raises: a fact that cannot be read is left out."""
    liger = importlib.util.find_spec("liger_kernel") is not None
    return Hardware(_cuda_gpus(), usable_cores(), liger)


def usable_cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The number of CPU cores that this process may use, at least 1.

    The number is the process's CPU affinity or its container's limit, whichever is lower.
    `docker --cpus` and Kubernetes' `limits` restrict CPU time, which the affinity does not show. A
    limit of 1.5 cores counts as 1. joblib.cpu_count reads both, but is slow to import.
    """
    affine = hasattr(os, "sched_getaffinity")  # the cores of a Slurm job or container, not of the machine
    cores = len(os.sched_getaffinity(0)) if affine else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        quota, period = map(int, limit.read_text().split())
        cores = min(cores, quota // period)
    return max(1, cores)


def _cuda_gpus() -> tuple[Gpu, ...]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_describe(cuda, index) for index in range(count.value))


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return Gpu(name.value.decode(), (major.value, minor.value), memory.value)
