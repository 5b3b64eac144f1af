"""The checks of `recipes doctor` on the GPUs of this machine: driver, torch's build, health."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.check import Check, Request, numbers
from launch.doctor.network import invalid_gpu
from launch.doctor.smi import driver, smi_rows

_MIB = 1 << 20


def visible_gpus(request: Request) -> Check:
    seen, needed = request.hardware.gpus, request.processes_per_node
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = smi_rows("--query-gpu=uuid")
    hidden = visible in ("", "-1")  # on purpose
    if visible and listed.rows and not hidden:
        invalid = invalid_gpu(visible, [row[0] for row in listed.rows])
        if invalid is not None:
            what = f"CUDA sees {len(seen)}: {invalid!r} in CUDA_VISIBLE_DEVICES={visible} is not a GPU, or there twice"
            return Check("error", "GPUs", what, f"use ordinals from 0 to {len(listed.rows) - 1}, each once")
    if not seen and listed.rows and not hidden:
        what = f"nvidia-smi lists {len(listed.rows)}, CUDA finds none"
        fix = "in a container: --gpus all; else `modprobe nvidia_uvm`, and on NVSwitch machines nvidia-fabricmanager"
        return Check("error", "GPUs", what, fix)
    if not seen:
        why = " (CUDA_VISIBLE_DEVICES hides all)" if listed.rows else ""
        if visible and not listed.rows and not hidden:
            what = f"CUDA_VISIBLE_DEVICES={visible}, but there is no NVIDIA driver: this would train on the CPU"
            return Check("warning", "GPUs", what, "install the driver, or unset the variable")
        return Check("ok", "GPUs", f"none{why}: training and these checks use the CPU and gloo")
    names = " and ".join(sorted({gpu.name for gpu in seen}))
    words = f"{len(seen)} x {names} visible, {needed} requested"
    if needed > len(seen):
        return Check("error", "GPUs", words, f"--num_processes {len(seen) * request.nodes}, or more GPUs")
    if len({gpu.name for gpu in seen}) > 1:
        return Check("warning", "GPUs", words, "use GPUs of one kind: a step takes as long as on the slowest")
    return Check("ok", "GPUs", words)


def driver_of_gpus(request: Request) -> Check | None:
    output = driver()
    if output.problem:
        fix = "see `dmesg | grep -i nvrm`; reboot if the driver was updated; or another program bears its name "
        fix += "(`command -v nvidia-smi`)"
        return Check("error", "driver", output.problem, fix)
    if output.rows:
        return Check("ok", "driver", output.rows[0][0])
    if request.hardware.cuda:
        return Check("warning", "driver", "unknown, because nvidia-smi is missing", "install nvidia-smi")
    return None


def gpu_memory(request: Request) -> Check | None:
    rows = smi_rows("--query-gpu=index,memory.free,memory.total").numbers()
    if not rows:
        return None
    taken = [(index, total - free, total) for index, free, total in rows if free < 0.9 * total]
    least = min(free for _, free, _ in rows)
    known = numbers(least_free=(least * _MIB, "bytes"))
    if taken:
        words = ", ".join(f"{used:,.0f} of {total:,.0f} MiB of GPU {index:.0f}" for index, used, total in taken)
        return Check("warning", "GPU memory", f"taken: {words}", "end what holds it, or use other GPUs", known)
    return Check("ok", "GPU memory", f"{least:,.0f} MiB free on each", numbers=known)


def gpu_processes(request: Request) -> Check | None:
    if not smi_rows("--query-gpu=uuid").rows:
        return None
    rows = smi_rows("--query-compute-apps=pid,process_name").rows
    if not rows:
        return Check("ok", "GPU processes", "no others")
    others = ", ".join(f"{row[-1]} (pid {row[0]})" for row in rows)
    return Check("warning", "GPU processes", others, "end them if they are yours: they take memory and time on the GPU")


def precision(request: Request) -> Check | None:
    if not request.hardware.cuda:
        return None
    major, minor = request.hardware.capability
    words = f"compute capability {major}.{minor}"
    if (major, minor) < (8, 0):  # CUDA programming guide: bf16 on tensor cores from 8.0 on
        return Check("warning", "bf16", f"{words} has no bf16", "nothing to do: the recipes choose fp16 here")
    return Check("ok", "bf16", f"{words} has bf16")


def pcie() -> tuple[int, int] | None:
    """Generation and lanes of the slowest GPU's slot under load; None if unknown."""
    rows = smi_rows("--query-gpu=pcie.link.gen.max,pcie.link.width.max").numbers()
    return min(((int(row[0]), int(row[1])) for row in rows), default=None)


def health(request: Request) -> Check | None:
    """Memory errors, clocks that are held down, and slots that are narrower than the GPU's.

    Each is asked for alone: an older nvidia-smi refuses a question with a name that it lacks.
    """
    wrong = [*_memory_errors(), *_held_down(), *_narrow_slots()]
    if wrong:
        return Check("warning", "GPU health", "; ".join(what for what, _ in wrong), "; ".join(fix for _, fix in wrong))
    return Check("ok", "GPU health", "no memory errors, full clocks and slots") if driver().rows else None


def _memory_errors() -> Iterator[tuple[str, str]]:
    for query, what in _MEMORY_ERRORS.items():
        for index, row in enumerate(smi_rows(f"--query-gpu={query}").rows):
            if row[0] not in _NO_ERROR:
                yield f"GPU {index}: {what}: {row[0]}", f"`nvidia-smi --gpu-reset -i {index}`, or exchange the GPU"


# Of `nvidia-smi --help-query-gpu`; [N/A] on a GPU without ECC.
_MEMORY_ERRORS = {
    "ecc.errors.uncorrected.volatile.total": "uncorrected memory errors since the driver was loaded",
    "remapped_rows.failure": "failed remapping of memory rows",
    "remapped_rows.pending": "memory rows to remap at the next reset",
}
_NO_ERROR = ("0", "No", "[N/A]", "N/A", "[Not Supported]")
# nvml.h, nvmlClocksEventReason*: those that mean heat or power, not idleness or a setting.
_REASONS = {
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


def _held_down() -> Iterator[tuple[str, str]]:
    for index, row in enumerate(smi_rows("--query-gpu=clocks_throttle_reasons.active").rows):
        if re.fullmatch(r"0x[0-9a-fA-F]+", row[0]):
            reasons = [name for bit, name in _REASONS.items() if int(row[0], 16) & bit]
            if reasons:
                look = "see its cooling and power: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`"
                yield f"GPU {index} is slowed down by {' and '.join(reasons)}", look


def _narrow_slots() -> Iterator[tuple[str, str]]:
    """Lanes only: an idle GPU lowers the generation, and raises it again under load."""
    rows = smi_rows("--query-gpu=pcie.link.width.current,pcie.link.width.max").numbers()
    for index, (now, most) in enumerate(rows):
        if now < most:
            yield f"GPU {index} has {now:.0f} of {most:.0f} PCIe lanes", "another slot or riser, or seat the card again"


# --- torch's build --------------------------------------------------------------------------------


def torch_build(request: Request) -> Check | None:
    """Whether the installed torch can use these GPUs, from its version.py: nothing is imported."""
    build = _build()
    if not request.hardware.cuda or build is None:
        return None
    installed, built = build
    base = installed.partition("+")[0]
    if built is None:
        what = f"{installed} is built for the CPU only, and this machine has {request.hardware}"
        fix = f"`pip install --force-reinstall torch=={base}`, or as https://pytorch.org/get-started/locally says"
        return Check("error", "torch", what, f"{fix}{_for_driver()}", fatal=True)
    newest = driver_cuda()
    # Within a major version of CUDA an older driver runs newer programs ("minor version
    # compatibility" in NVIDIA's CUDA Compatibility guide).
    if newest and int(built.split(".")[0]) > newest[0]:
        what = f"{installed} is built for CUDA {built}, and the driver runs up to {newest[0]}.{newest[1]}"
        fix = f"a newer driver, or a torch {base} built for CUDA {newest[0]}: https://pytorch.org/get-started/locally"
        return Check("error", "torch", what, fix, fatal=True)
    return None


def _build() -> tuple[str, str | None] | None:
    """torch's version, and the CUDA that it is built for; None if unknown, or built for others."""
    spec = importlib.util.find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if file is None or not file.is_file():
        return None
    values = dict(re.findall(r"^(\w+)[^=\n]*= *'([^']*)'", file.read_text(), re.M))
    if "__version__" not in values or "hip" in values or "xpu" in values:
        return None
    return values["__version__"], values.get("cuda")


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs, as (12, 8); None if unknown (cuda.h)."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)):
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def _for_driver() -> str:
    newest = driver_cuda()
    return f", built for CUDA {newest[0]}, as this driver runs up to {newest[0]}.{newest[1]}" if newest else ""


CHECKS = (visible_gpus, driver_of_gpus, torch_build, gpu_memory, gpu_processes, health, precision)
