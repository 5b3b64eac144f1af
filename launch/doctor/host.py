"""The checks of `recipes doctor` on the rest of this machine: memory, disks, limits, compiler."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.check import Check, Request, numbers
from launch.host import memory
from launch.host.files import require_writable
from launch.terminal import memory_size, plural
from recipes.run import here, resolve
from recipes.run.files import hf_home

_GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")


def limits(request: Request) -> Check:
    """What `ulimit -a` shows, the worst first: with the first two no rank can even start."""
    for which, flag, too_few, few, unit, what in _LIMITS:
        has, most = resource.getrlimit(which)
        if has != resource.RLIM_INFINITY and has < few:
            status = "error" if has < too_few else "warning"
            shown = f"{memory_size(has) if unit > 1 else has} {what}"
            return Check(status, "limits", shown, _raise(flag, most, few, unit), fatal=status == "error")
    locked, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        what = f"{memory_size(locked)} of locked memory, which InfiniBand needs"
        return Check("warning", "limits", what, "`ulimit -l unlimited`, or docker --ulimit memlock=-1")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Check("ok", "limits", f"{'any number of' if files == resource.RLIM_INFINITY else files} open files")


# Each with ulimit's flag, what is an error below, what is a warning, ulimit's unit in bytes.
_LIMITS = (
    (resource.RLIMIT_NOFILE, "n", 64, 1024, 1, "open files: DataLoader workers open one per tensor"),
    (
        resource.RLIMIT_AS,
        "v",
        8 * _GIB,
        64 * _GIB,
        1024,
        "of address space (ulimit -v), of which torch and CUDA reserve far more than they use",
    ),
    (resource.RLIMIT_FSIZE, "f", 1 << 20, 10 * _GIB, 1024, "for a file: a checkpoint is larger"),
    (resource.RLIMIT_CPU, "t", 600, 86400, 1, "s of CPU time, after which a process is killed"),
)


def _raise(flag: str, most: int, few: int, unit: int) -> str:
    """How to raise a soft limit, as far as the hard one allows."""
    if most == resource.RLIM_INFINITY:
        return f"`ulimit -S -{flag} {65536 if flag == 'n' else 'unlimited'}`"
    if most >= few:
        return f"`ulimit -S -{flag} {most // unit}`"
    return f"a higher hard limit than {most // unit} (ulimit -H -{flag}): /etc/security/limits.conf, docker --ulimit"


def host_memory(request: Request) -> Check:
    free, count = min([memory.free_ram(), *_left_in_cgroups()]), request.processes_per_node
    words = f"{memory_size(free)} free for {plural(count, 'process')}"
    size = numbers(free=(free, "bytes"))
    if free < count * _GIB:  # the imports alone take half of it
        return Check("error", "RAM", words, f"{count} GiB at least: use fewer processes, or request more memory", size)
    if free < 4 * count * _GIB:
        return Check("warning", "RAM", words, "enough for small models only: request more memory for others", size)
    return Check("ok", "RAM", words, numbers=size)


def _left_in_cgroups() -> Iterator[int]:
    """Bytes that cgroup v2 still allows this process, in its own group and in each above it."""
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    except OSError:
        return
    root = Path("/sys/fs/cgroup")
    for group in (root / own, *(root / own).parents):
        try:
            most = (group / "memory.max").read_text().strip()
            if most != "max":
                yield int(most) - int((group / "memory.current").read_text())
        except OSError:  # the root group has no limit
            continue


def disk(request: Request) -> Check:
    """Free space where a run writes by default, and where libraries put temporary files."""
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:
        return Check("error", "disk", "no folder for temporary files can be written", "TMPDIR with a writable folder")
    places = {str(Path.cwd()): Path.cwd(), temporary: Path(temporary)}
    closed = [name for name, place in places.items() if why_closed(place)]
    if closed:
        return Check("error", "disk", f"{closed[0]} cannot be written", "choose a writable --output_dir or TMPDIR")
    least = "a checkpoint takes 12 bytes per parameter: --save_total_limit"
    return _room("disk", places, "make room, or choose --output_dir or TMPDIR on another disk", least)


def caches(request: Request) -> Check:
    """Hugging Face's folders, which hold models and data sets, or would be made."""
    places = {"HF_HOME": hf_home(os.environ).absolute()}
    places |= {name: Path(os.environ[name]) for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE") if os.environ.get(name)}
    for name, place in places.items():
        if why := why_closed(place):
            status = "warning" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else "error"
            fix = f"export {name}=FOLDER with a writable folder that has room"
            return Check(status, "HF_HOME", f"{place} ({name}) cannot be written: {why}", fix)
    fix = "make room there, or set HF_HOME to a folder on another disk"
    return _room("HF_HOME", {str(place): place for place in places.values()}, fix, "a model of 7B takes 15 GB")


def _room(title: str, places: dict[str, Path], fix: str, advice: str) -> Check:
    free = {name: shutil.disk_usage(nearest(place)).free for name, place in places.items()}
    words = ", ".join(f"{memory_size(size)} free in {name}" for name, size in free.items())
    sizes = numbers(**{name: (size, "bytes") for name, size in free.items()})
    if min(free.values()) < _GIB:
        return Check("error", title, words, fix, sizes)
    if min(free.values()) < 10 * _GIB:
        return Check("warning", title, words, advice, sizes)
    return Check("ok", title, words, numbers=sizes)


def why_closed(folder: Path) -> str:
    """Why no file can be made in a folder, or in the one around it; "" if one can."""
    try:
        require_writable(folder)
        return ""
    except OSError as error:
        return error.strerror or str(error)


def nearest(folder: Path) -> Path:
    """The folder, or the innermost one around it that exists."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def shared_memory(request: Request) -> Check | None:
    if sys.platform != "linux":
        return None
    if not _SHARED_MEMORY.is_dir():
        fix = "`mkdir -p /dev/shm && mount -t tmpfs -o size=16g tmpfs /dev/shm`, or another container runtime"
        return Check("error", "/dev/shm", "is missing: DataLoader workers and NCCL pass data through it", fix)
    system = os.statvfs(_SHARED_MEMORY)
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    known = numbers(free=(free, "bytes"), size=(size, "bytes"))
    words = f"{memory_size(free)} of {memory_size(size)} free"
    if system.f_flag & os.ST_RDONLY:
        fix = "`mount -o remount,rw /dev/shm`, or a container without --read-only there (docker --tmpfs /dev/shm)"
        return Check("error", "/dev/shm", "is read-only: DataLoader workers and NCCL write to it", fix, known)
    if free < _GIB:  # by default Docker gives a container 64 MiB, Azure ML a job 2 GiB
        what = f"{words}: DataLoader workers and NCCL pass data through it"
        return Check("warning", "/dev/shm", what, ENLARGE, known)
    if why := why_closed(_SHARED_MEMORY):
        return Check("error", "/dev/shm", f"cannot be written: {why}", "`chmod 1777 /dev/shm`", known)
    return Check("ok", "/dev/shm", words, numbers=known)


ENLARGE = (
    "docker --shm-size=16g; Azure ML shm_size: 16g; else `mount -o remount,size=16g /dev/shm`, or free space there"
)


def cores(request: Request) -> Check:
    """Enough CPU cores for the processes and the DataLoader workers that `standard` gives each."""
    count, has = request.processes_per_node, request.hardware.cores
    run = resolve(place=here(request.processes, local_world_size=count, hardware=request.hardware, environment={}))
    workers = run["dataloader_num_workers"]
    words = f"{has} for {plural(count, 'process')} with {plural(workers, 'DataLoader worker')} each"
    if has < count:
        return Check("warning", "CPU cores", words, "--cpus-per-task, docker --cpus, or fewer processes")
    if has < count * workers:
        return Check("warning", "CPU cores", words, "a smaller --dataloader_num_workers, or more cores")
    return Check("ok", "CPU cores", words)


def compiler(request: Request) -> Check | None:
    """What DeepSpeed needs to build the CPU's Adam, which `memory` offloads to (ds_report)."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    missing = [] if shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") else ["a C++ compiler (g++)"]
    missing += [] if shutil.which("ninja", path=search) else ["ninja"]
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    missing += [] if headers.is_file() else ["Python's headers (python3-dev)"]
    if request.hardware.cuda and not _cuda_home():
        missing.append("nvcc (CUDA toolkit, CUDA_HOME)")
    if missing:
        what = f"missing: {', '.join(missing)}; DeepSpeed builds its Adam for offload (recipe memory) at its first use"
        return Check("warning", "compiler", what, "install them, for instance apt install g++ python3-dev ninja-build")
    return Check("ok", "compiler", "a C++ compiler, ninja and Python's headers")


def _cuda_home() -> bool:
    """Whether torch finds nvcc (torch/utils/cpp_extension.py, _find_cuda_home)."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return bool(shutil.which("nvcc")) or any(home and Path(home, "bin", "nvcc").exists() for home in homes)


CHECKS = (limits, host_memory, disk, caches, shared_memory, cores, compiler)
