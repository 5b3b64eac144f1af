"""The `Request` of `recipes doctor`, and checks of this machine: software, GPUs, memory, disks.

No check here imports torch.
"""

import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from launch.host import processes
from launch.host.files import require_writable
from launch.terminal import memory_size, plural
from recipes.errors import one_line
from recipes.legal.schema import version
from recipes.run.files import hf_home
from recipes.run.hardware import Hardware

_MIB, _GIB = 1 << 20, 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 16 * _MIB  # a DataLoader worker and two ranks of NCCL take some MiB each

Numbers = dict[str, dict[str, float | str]]  # by name: a value and its unit


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report.

    `status` is ok, warning or error, `found` the finding, `fix` the action to take, `numbers` the
    measurements. After a `fatal` error no rank is started, because it would fail too.
    """

    status: str
    title: str
    found: str
    fix: str = ""
    numbers: Numbers = field(default_factory=dict)
    fatal: bool = False


def numbers(**values: tuple[float, str]) -> Numbers:
    """Return values with their units as a `Check` holds them: `numbers(free=(8e9, "bytes"))`."""
    return {name: {"value": value, "unit": unit} for name, (value, unit) in values.items()}


@dataclass(frozen=True)
class Request:
    """This machine, and the nodes and processes with which it should train.

    With several nodes, node 0 listens at `address` and `port`. All checks together may take
    `timeout` seconds from `began`, a value of time.monotonic().
    """

    hardware: Hardware
    nodes: int
    machine_rank: int
    processes_per_node: int
    address: str
    port: int
    timeout: int
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return self.began + self.timeout - time.monotonic()

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def backend(self) -> str:
        return "nccl" if self.hardware.cuda else "gloo"


def examine(request: Request) -> Iterator[Check]:
    """Yield the checks of this machine in the order in which they are printed."""
    of_gpus = (visible_gpus, driver_of_gpus, gpu_memory)
    own = (limits, host_memory, disk, shared_memory, cores, compiler)
    yield from filter(None, (check(request) for check in (versions, *of_gpus, *own)))


def versions(request: Request) -> Check:
    """Compare the versions of the libraries with the versions that this package supports."""
    try:
        declared = metadata.metadata("accelerate-recipes")
    except metadata.PackageNotFoundError:  # a clone that is not installed
        fix = "pip install -e . in the clone of accelerate-recipes"
        return Check("warning", "versions", "unknown, because this clone is not installed", fix)
    named = map(Requirement, declared.get_all("Requires-Dist") or [])
    wanted = {one.name: one for one in named if not one.marker or one.marker.evaluate({"extra": ""})}
    installed = {name: version(name) for name in wanted}
    wrong = [one for name, one in wanted.items() if not supported(installed[name], one.specifier)]
    if wrong:
        what = ", ".join(f"{one.name} {installed[one.name] or 'missing'} (supported: {one.specifier})" for one in wrong)
        status = "warning" if all(installed[one.name] for one in wrong) else "error"
        return Check(status, "versions", what, " ".join(["pip install", *(f"'{one}'" for one in wrong)]))
    shown = (f"{name} {installed[name]}" for name in ("torch", "transformers", "accelerate"))
    return Check("ok", "versions", ", ".join([f"Python {platform.python_version()}", *shown]))


def supported(installed: str | None, wanted: SpecifierSet) -> bool:
    """True if the version is supported. A vendor's 2.12.0a0+x is treated as 2.12."""
    return installed is not None and wanted.contains(Version(installed).base_version, prereleases=True)


# --- nvidia-smi -----------------------------------------------------------------------------------

_SECONDS = 8  # nvidia-smi never returns if the driver hangs; the first call may take some seconds
_CSV = "--format=csv,noheader,nounits"


@cache
def driver() -> tuple[str, str]:
    """Return the driver's version and the error of nvidia-smi, both empty without nvidia-smi.

    All other queries call this function first, so that a hanging nvidia-smi is called only once.
    """
    text, problem = _ask("--query-gpu=driver_version", _CSV)
    found = [line.strip() for line in text.splitlines() if re.fullmatch(r"\d+(\.\d+)+", line.strip())]
    if not problem and text.strip() and not found:
        problem = f"nvidia-smi printed no version: {one_line(text)}"
    return found[0] if found else "", problem


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; empty if nvidia-smi is missing or fails."""
    return "" if driver()[1] else _ask(*arguments)[0]


@cache
def smi_rows(query: str) -> list[list[str]]:
    """Return nvidia-smi's rows for a query, even for GPUs that CUDA_VISIBLE_DEVICES hides."""
    lines = [line for line in nvidia_smi(query, _CSV).splitlines() if not line.startswith("WARNING")]
    return [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]


def _ask(*arguments: str) -> tuple[str, str]:
    if shutil.which("nvidia-smi") is None:
        return "", ""
    with processes.group() as started:  # in a hanging driver nvidia-smi may survive even SIGKILL
        pipe = subprocess.PIPE
        process = subprocess.Popen(["nvidia-smi", *arguments], stdout=pipe, stderr=pipe, start_new_session=True)
        started.append(process)
        try:
            output, errors = (stream.decode(errors="replace") for stream in process.communicate(timeout=_SECONDS))
        except subprocess.TimeoutExpired:
            return "", f"nvidia-smi did not return within {_SECONDS} s: the driver or a GPU hangs"
    if process.returncode:
        return "", f"nvidia-smi failed: {one_line(output + errors)}"
    return output, ""


# --- GPUs -----------------------------------------------------------------------------------------


def visible_gpus(request: Request) -> Check:
    seen, needed = request.hardware.gpus, request.processes_per_node
    visible, listed = os.environ.get("CUDA_VISIBLE_DEVICES"), smi_rows("--query-gpu=uuid")
    hidden = visible in ("", "-1")  # the user hides all GPUs on purpose
    if visible and listed and not hidden:
        invalid = invalid_gpu(visible, [row[0] for row in listed])
        if invalid is not None:
            what = f"{invalid!r} in CUDA_VISIBLE_DEVICES={visible} names no GPU or repeats one; GPUs left: {len(seen)}"
            return Check("error", "GPUs", what, f"use each index from 0 to {len(listed) - 1} at most once")
    if not seen and listed and not hidden:
        what = f"nvidia-smi lists {len(listed)}, but CUDA finds none"
        fix = "run docker with --gpus all; else `modprobe nvidia_uvm`, and start nvidia-fabricmanager for NVSwitch"
        return Check("error", "GPUs", what, fix)
    if not seen:
        return Check("ok", "GPUs", "CUDA sees no GPU: training and these checks use the CPU and gloo")
    words = f"{len(seen)} x {' and '.join(sorted({gpu.name for gpu in seen}))} visible, {needed} requested"
    if needed > len(seen):
        return Check("error", "GPUs", words, f"use --num_processes {len(seen) * request.nodes}", fatal=True)
    return Check("ok", "GPUs", words)


def invalid_gpu(visible: str, uuids: Sequence[str]) -> str | None:
    """Return the first invalid or repeated entry of CUDA_VISIBLE_DEVICES, None if there is none.

    CUDA silently ignores an invalid entry and all entries after it. If an entry is repeated, CUDA
    hides all GPUs. Source: the CUDA programming guide, "CUDA environment variables", and
    `_parse_visible_devices` in torch/cuda/__init__.py.
    """
    seen: set[str] = set()
    for entry in (word.strip() for word in visible.split(",")):
        if entry.startswith("MIG-"):  # a part of a GPU: nvidia-smi does not list it with this query
            continue
        named = [uuid for at, uuid in enumerate(uuids) if entry == str(at) or (entry and uuid.startswith(entry))]
        if len(named) != 1 or named[0] in seen:
            return entry
        seen.add(named[0])
    return None


def driver_of_gpus(request: Request) -> Check | None:
    version, problem = driver()
    if problem:
        fix = "see `dmesg | grep -i nvrm`; reboot if the driver was updated; check by `command -v nvidia-smi` that no "
        return Check("error", "driver", problem, f"{fix}other program is called nvidia-smi")
    if not version and request.hardware.cuda:
        return Check("warning", "driver", "unknown, because nvidia-smi is missing", "install nvidia-smi")
    return Check("ok", "driver", version) if version else None


def gpu_memory(request: Request) -> Check | None:
    """Check the free memory of all GPUs, and list the programs that use a GPU."""
    cells = smi_rows("--query-gpu=index,memory.free,memory.total")
    rows = [list(map(int, row)) for row in cells if all(cell.isdecimal() for cell in row)]  # in MIG mode: [N/A]
    others = ", ".join(f"{row[-1]} (pid {row[0]})" for row in smi_rows("--query-compute-apps=pid,process_name"))
    if not rows:
        return None
    least = min(free for _, free, _ in rows)
    known = numbers(least_free=(least * _MIB, "bytes"))
    taken = [f"{total - free:,} of {total:,} MiB of GPU {at}" for at, free, total in rows if free < 0.9 * total]
    if taken or others:
        words = f"taken: {', '.join(taken) or 'little'}{others and f', by {others}'}"
        return Check("warning", "GPU memory", words, "end the programs that hold this memory, or use other GPUs", known)
    return Check("ok", "GPU memory", f"at least {least:,} MiB free on each", numbers=known)


# --- Limits and memory ----------------------------------------------------------------------------

# Each limit with: ulimit's flag, the value below which a rank cannot start, the value below which
# the doctor warns, the bytes in ulimit's unit, and what is limited.
_LIMITS = (
    (resource.RLIMIT_NOFILE, "n", 64, 1024, 1, "open files: DataLoader workers open one per tensor"),
    (resource.RLIMIT_AS, "v", 8 * _GIB, 64 * _GIB, 1024, "of address space: torch reserves far more than it uses"),
)


def limits(request: Request) -> Check:
    """Check the limits of this process (ulimit), and report the first that is too low."""
    for which, flag, too_few, few, unit, what in _LIMITS:
        has, most = resource.getrlimit(which)
        if has != resource.RLIM_INFINITY and has < few:
            status = "error" if has < too_few else "warning"
            shown = f"{memory_size(has) if unit > 1 else has} {what}"
            fix = f"`ulimit -S -{flag} {'unlimited' if most == resource.RLIM_INFINITY else most // unit}`"
            if most != resource.RLIM_INFINITY and most < few:
                fix = f"raise the hard limit to {few // unit} or more: limits.conf, or docker --ulimit"
            return Check(status, "limits", shown, fix, fatal=status == "error")
    locked, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        what = f"only {memory_size(locked)} of locked memory, and InfiniBand needs more"
        return Check("warning", "limits", what, "`ulimit -l unlimited`, or docker --ulimit memlock=-1")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Check("ok", "limits", f"{'any number of' if files == resource.RLIM_INFINITY else files} open files")


def host_memory(request: Request) -> Check:
    free, count = psutil.virtual_memory().available, request.processes_per_node
    words, size = f"{memory_size(free)} free for {plural(count, 'process')}", numbers(free=(free, "bytes"))
    if free < count * _GIB:  # a GiB per process: the imports alone take half of it
        return Check("error", "RAM", words, f"use fewer processes, or request at least {count} GiB of memory", size)
    if free < 4 * count * _GIB:
        return Check("warning", "RAM", words, "request more memory, except for small models", size)
    return Check("ok", "RAM", words, numbers=size)


# --- Disks and shared memory ----------------------------------------------------------------------


def disk(request: Request) -> Check:
    """Check that the current folder, the folder for temporary files and Hugging Face's caches are
    writable and have space. For a missing folder, its nearest existing parent is checked.
    """
    try:
        places = [Path.cwd(), Path(tempfile.gettempdir()), hf_home().absolute()]
    except FileNotFoundError:
        return Check("error", "disk", "the current folder is gone, or TMPDIR unwritable", "cd elsewhere, or set TMPDIR")
    places += [Path(os.environ[name]) for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE") if os.environ.get(name)]
    fix = "make room, or name a writable folder: --output_dir, export TMPDIR=FOLDER, export HF_HOME=FOLDER (also "
    fix += "HF_HUB_CACHE and HF_DATASETS_CACHE, if they are set)"
    free = {}
    for place in dict.fromkeys(places):
        try:
            require_writable(place)
            there = next(one for one in (place, *place.parents) if one.exists())
            free[str(place)] = shutil.disk_usage(there).free
        except OSError as error:
            return Check("error", "disk", f"{place} cannot be written: {error.strerror}", fix)
    words = ", ".join(f"{memory_size(size)} free in {name}" for name, size in free.items())
    known = numbers(**{name: (size, "bytes") for name, size in free.items()})
    if min(free.values()) < _GIB:
        return Check("error", "disk", words, fix, known)
    if min(free.values()) < 10 * _GIB:
        advice = "make room, or lower --save_total_limit: a 7B model takes 15 GB, a checkpoint 12 bytes per parameter"
        return Check("warning", "disk", words, advice, known)
    return Check("ok", "disk", words, numbers=known)


ENLARGE = (
    "docker --shm-size=16g; Azure ML shm_size: 16g; else `mount -o remount,size=16g /dev/shm`, or delete files there"
)


def shared_memory(request: Request) -> Check | None:
    """Check the free space of /dev/shm. The defaults are enough for small batches only: 64 MiB in
    Docker containers, 2 GiB in Azure ML jobs.
    """
    if sys.platform != "linux":
        return None
    needed = "DataLoader workers and NCCL pass data through it"
    try:
        size, _, free = shutil.disk_usage(_SHARED_MEMORY)
        if free >= _LEAST_SHARED:
            require_writable(_SHARED_MEMORY)
    except OSError as error:
        fix = "`mount -o remount,rw,mode=1777 /dev/shm`, or docker --tmpfs /dev/shm"
        if not _SHARED_MEMORY.is_dir():
            fix = "`mkdir -p /dev/shm && mount -t tmpfs -o size=16g tmpfs /dev/shm`, or another container runtime"
        return Check("error", "/dev/shm", f"cannot be written: {error.strerror}; {needed}", fix)
    known = numbers(free=(free, "bytes"), size=(size, "bytes"))
    words = f"{memory_size(free)} of {memory_size(size)} free"
    if free < _GIB:
        status = "error" if free < _LEAST_SHARED else "warning"
        return Check(status, "/dev/shm", f"{words}: {needed}", ENLARGE, known)
    return Check("ok", "/dev/shm", words, numbers=known)


def cores(request: Request) -> Check:
    count, has = request.processes_per_node, request.hardware.cores
    status, fix = ("warning", "use --cpus-per-task, docker --cpus, or fewer ranks") if has < count else ("ok", "")
    return Check(status, "CPU cores", f"{has} for {plural(count, 'process')}", fix)


def compiler(request: Request) -> Check | None:
    """Look for a C++ compiler, with which DeepSpeed builds its CPU Adam for offload."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    if found := shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++"):
        return Check("ok", "compiler", found)
    what = "no C++ compiler is found, so DeepSpeed cannot build its Adam for offload (recipes memory and memory_zero3)"
    return Check("warning", "compiler", what, "apt install g++ python3-dev, or another compiler; then see `ds_report`")
