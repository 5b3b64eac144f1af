"""The checks of `recipes doctor` that look at this machine alone, in the order they are printed.

None imports torch.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launch.doctor.network import invalid_gpu
from launch.host import memory
from launch.host.own_packages import NAMES, other_owners
from launch.terminal import memory_size, plural
from recipes.legal.source import version
from recipes.run import resolve
from recipes.run.hardware import Hardware

_GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
_SMI_SECONDS = 20  # nvidia-smi never returns when the driver hangs


@dataclass(frozen=True)
class Check:
    """One line of the report.

    `status` is ok, warning or error, `found` the finding, `fix` what to do about it.
    """

    status: str
    title: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Request:
    """The machine and the world that it should train in.

    Rank 0 of several nodes listens at `address` and `port`. `timeout` is in seconds, for one
    collective.
    """

    hardware: Hardware
    nodes: int
    machine_rank: int
    processes_per_node: int
    address: str
    port: int
    timeout: int

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def backend(self) -> str:
        return "nccl" if self.hardware.cuda else "gloo"


CHECKS: list[Callable[[Request], Check | None]] = []


def check(function: Callable[[Request], Check | None]) -> Callable[[Request], Check | None]:
    """Register a check, to run after those above.

    It returns None if it does not apply to this machine.
    """
    CHECKS.append(function)
    return function


def examine(request: Request) -> Iterator[Check]:
    """Run the checks.

    One that cannot read what it needs is an error of its own, and the others go on.
    """
    for one in CHECKS:
        try:
            result = one(request)
        except OSError as error:
            result = Check(
                "error", one.__name__.replace("_", " "), f"cannot be read: {error}", "run it as a user who may read it"
            )
        if result:
            yield result


# --- Software -------------------------------------------------------------------------------------


@check
def python(request: Request) -> Check:
    installed = ".".join(map(str, sys.version_info[:3]))
    wanted = _supported()[0]
    if outside(installed, wanted):
        fix = f"use an environment with Python {wanted}"
        return Check("error", "Python", f"{installed}, supported is {wanted}", fix)
    return Check("ok", "Python", installed)


@check
def versions(request: Request) -> Check:
    """The libraries' versions, compared with the ranges that this package supports."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in _supported()[1]]
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    if not wanted:
        return Check("warning", "versions", "the supported versions are unknown here", "pip install this package")
    installed = {one.name: version(one.name) for one in wanted}
    wrong = {one: outside(installed[one.name], str(one.specifier)) for one in wanted}
    if any(wrong.values()):
        outsiders = [one for one in wanted if wrong[one]]
        what = ", ".join(
            f"{one.name} {installed[one.name] or 'missing'} (supported: {one.specifier})" for one in outsiders
        )
        status = "warning" if all(how in ("", "newer") for how in wrong.values()) else "error"
        install = " ".join(f"'{one.name}{one.specifier}'" for one in outsiders)
        return Check(status, "versions", what, f"pip install {install}")
    for name in NAMES:
        if others := other_owners(name):  # it works here: ours came last, or is imported first
            what = f"{' and '.join(others)} has a package {name} too, and takes that name if it is installed again"
            return Check("warning", "versions", what, "an environment of its own for one of them")
    return Check(
        "ok", "versions", ", ".join(f"{name} {installed[name]}" for name in ("torch", "transformers", "accelerate"))
    )


@cache
def _supported() -> tuple[str, list[str]]:
    """Supported Python and requirements: of the installed package, else of the checkout."""
    from importlib import metadata

    try:
        declared = metadata.metadata("accelerate-recipes")
        return declared["Requires-Python"], metadata.requires("accelerate-recipes") or []
    except metadata.PackageNotFoundError:
        pass
    import tomllib

    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    project = tomllib.loads(file.read_text())["project"] if file.exists() else {}
    return project.get("requires-python", ""), project.get("dependencies", [])


def outside(installed: str | None, wanted: str) -> str:
    """How a version is outside a range: "missing", "newer", "older", or "" if it is inside."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    if installed is None:
        return "missing"
    release = Version(Version(installed).base_version)  # vendors ship 2.12.0a0+x, which sorts before 2.12
    violated = [one for one in SpecifierSet(wanted) if not one.contains(release, prereleases=True)]
    if not violated:
        return ""
    return "newer" if all(one.operator.startswith("<") for one in violated) else "older"


# --- GPUs -----------------------------------------------------------------------------------------


@check
def gpus(request: Request) -> Check:
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


@check
def driver(request: Request) -> Check | None:
    output = smi_rows("--query-gpu=driver_version")
    if output.problem:
        fix = "see `dmesg | grep -i nvrm`; reboot if the driver was updated"
        return Check("error", "driver", output.problem, fix)
    if output.rows:
        return Check("ok", "driver", output.rows[0][0])
    if request.hardware.cuda:
        return Check("warning", "driver", "unknown, because nvidia-smi is missing", "install nvidia-smi")
    return None


@check
def gpu_memory(request: Request) -> Check | None:
    rows = smi_rows("--query-gpu=index,memory.free,memory.total").numbers()
    taken = [(index, total - free, total) for index, free, total in rows if free < 0.9 * total]
    if taken:
        words = ", ".join(f"{used:,.0f} of {total:,.0f} MiB of GPU {index:.0f}" for index, used, total in taken)
        return Check("warning", "GPU memory", f"taken: {words}", "end what holds it, or use other GPUs")
    return Check("ok", "GPU memory", f"{min(free for _, free, _ in rows):,.0f} MiB free on each") if rows else None


@check
def gpu_processes(request: Request) -> Check | None:
    if not smi_rows("--query-gpu=uuid").rows:
        return None
    rows = smi_rows("--query-compute-apps=pid,process_name").rows
    if not rows:
        return Check("ok", "GPU processes", "no others")
    others = ", ".join(f"{row[-1]} (pid {row[0]})" for row in rows)
    return Check("warning", "GPU processes", others, "end them if they are yours: they take memory and time on the GPU")


@check
def precision(request: Request) -> Check | None:
    if not request.hardware.cuda:
        return None
    major, minor = request.hardware.capability
    words = f"compute capability {major}.{minor}"
    if (major, minor) < (8, 0):  # CUDA programming guide: bf16 on tensor cores from 8.0 on
        return Check("warning", "bf16", f"{words} has no bf16", "nothing to do: the recipes choose fp16 here")
    return Check("ok", "bf16", f"{words} has bf16")


@dataclass(frozen=True)
class _SmiOutput:
    """Rows that nvidia-smi printed, or why it failed. Both are empty if there is no nvidia-smi."""

    rows: tuple[tuple[str, ...], ...] = ()
    problem: str = ""

    def numbers(self) -> list[list[float]]:
        """The rows that hold numbers only: for a part of a GPU (MIG), the memory reads [N/A]."""
        return [[float(cell) for cell in row] for row in self.rows if all(_is_number(cell) for cell in row)]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


@cache
def smi_rows(query: str) -> _SmiOutput:
    """The rows for all GPUs, whatever CUDA_VISIBLE_DEVICES says."""
    text, problem = nvidia_smi(query, "--format=csv,noheader,nounits")
    rows = (tuple(cell.strip() for cell in line.split(",")) for line in text.splitlines() if line)
    return _SmiOutput(tuple(rows), problem)


def nvidia_smi(*arguments: str) -> tuple[str, str]:
    """Its output, and what is wrong if it fails. Both are empty if there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return "", ""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi did not return within {_SMI_SECONDS} s: the driver or a GPU hangs"
    if done.returncode:
        return "", f"nvidia-smi failed: {' '.join((done.stdout + done.stderr).split())}"
    return done.stdout, ""


def pcie() -> tuple[int, int] | None:
    """Generation and lanes of the slowest GPU's slot under load; None if unknown."""
    rows = smi_rows("--query-gpu=pcie.link.gen.max,pcie.link.width.max").numbers()
    return min(((int(row[0]), int(row[1])) for row in rows), default=None)


# --- The rest of the machine ----------------------------------------------------------------------


@check
def host_memory(request: Request) -> Check:
    known = [size for size in (memory.free_ram(), *_left_in_cgroups()) if size is not None]
    if not known:
        return Check("warning", "RAM", "free memory is unknown", "check it by hand, with `free -h` for instance")
    free, count = min(known), request.processes_per_node
    words = f"{memory_size(free)} free for {plural(count, 'process')}"
    if free < count * _GIB:  # the imports alone take half of it
        return Check("error", "RAM", words, f"{count} GiB at least: use fewer processes, or request more memory")
    if free < 4 * count * _GIB:
        return Check("warning", "RAM", words, "enough for small models only: request more memory for others")
    return Check("ok", "RAM", words)


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


@check
def disk(request: Request) -> Check:
    """Free space where a run writes by default, and where libraries put temporary files."""
    places = {str(Path.cwd()): Path.cwd(), tempfile.gettempdir(): Path(tempfile.gettempdir())}
    free = {name: shutil.disk_usage(place).free for name, place in places.items()}
    words = ", ".join(f"{memory_size(size)} free in {name}" for name, size in free.items())
    closed = [name for name, place in places.items() if not os.access(place, os.W_OK)]
    if closed:
        return Check("error", "disk", f"{closed[0]} cannot be written", "choose a writable --output_dir or TMPDIR")
    if min(free.values()) < _GIB:
        return Check("error", "disk", words, "make room, or choose --output_dir on another disk")
    if min(free.values()) < 10 * _GIB:
        return Check("warning", "disk", words, "a checkpoint takes 12 bytes per parameter: --save_total_limit")
    return Check("ok", "disk", words)


@check
def shared_memory(request: Request) -> Check | None:
    if sys.platform != "linux":
        return None
    system = os.statvfs(_SHARED_MEMORY)
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    words = f"{memory_size(free)} of {memory_size(size)} free"
    if free < _GIB:  # by default Docker gives a container 64 MiB, Azure ML a job 2 GiB
        return Check("warning", "/dev/shm", f"{words}: DataLoader workers and NCCL pass data through it", ENLARGE)
    return Check("ok", "/dev/shm", words)


ENLARGE = "docker --shm-size=16g; Azure ML shm_size: 16g; else mount -o remount,size=16g /dev/shm, or free space there"


@check
def limits(request: Request) -> Check:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    words = f"{'any number of' if files == resource.RLIM_INFINITY else files} open files"
    if files != resource.RLIM_INFINITY and files < 1024:
        return Check("warning", "limits", f"{words}: DataLoader workers open one per tensor", "ulimit -n 65536")
    if Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        what = f"{memory_size(locked)} of locked memory, which InfiniBand needs"
        return Check("warning", "limits", what, "ulimit -l unlimited, or docker --ulimit memlock=-1")
    return Check("ok", "limits", words)


@check
def cores(request: Request) -> Check:
    """Enough CPU cores for the processes and the DataLoader workers that `standard` gives each."""
    count, has = request.processes_per_node, request.hardware.cores
    run = resolve(world_size=request.processes, local_world_size=count, hardware=request.hardware, environment={})
    workers = run["dataloader_num_workers"]
    words = f"{has} for {plural(count, 'process')} with {plural(workers, 'DataLoader worker')} each"
    if has < count:
        return Check("warning", "CPU cores", words, "--cpus-per-task, docker --cpus, or fewer processes")
    if has < count * workers:
        return Check("warning", "CPU cores", words, "a smaller --dataloader_num_workers, or more cores")
    return Check("ok", "CPU cores", words)
