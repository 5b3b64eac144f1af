"""What `recipes doctor` looks at on the machine itself: small checks in reading order, none of which imports torch."""

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
from launch.terminal import memory_size
from recipes.legal.source import version
from recipes.run import resolve
from recipes.run.hardware import Hardware

_GIB = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
_PATIENCE = 20  # seconds for nvidia-smi: a driver that hangs does so without end


@dataclass(frozen=True)
class Check:
    """One line of the doctor's: `status` is ok, warning or error, `found` what there is, `fix` what to do about it."""

    status: str
    title: str
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Patient:
    """The machine, and what is asked of it. `address` and `port` are where several nodes meet."""

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


CHECKS: list[Callable[[Patient], Check | None]] = []


def check(function: Callable[[Patient], Check | None]) -> Callable[[Patient], Check | None]:
    """Makes it one of the checks, after those above; None where it says nothing of this machine."""
    CHECKS.append(function)
    return function


def examine(patient: Patient) -> Iterator[Check]:
    for one in CHECKS:
        try:
            found = one(patient)
        except OSError as error:  # what a machine withholds is a finding too
            found = Check("error", one.__name__.replace("_", " "), f"cannot be read: {error}", "see why, as this user")
        if found:
            yield found


# --- Software --------------------------------------------------------------------------------------------------------


@check
def python(patient: Patient) -> Check:
    found = ".".join(map(str, sys.version_info[:3]))
    wanted = _supported()[0]
    if outside(found, wanted):
        return Check("error", "Python", f"{found}, supported is {wanted}", f"an environment with Python {wanted}")
    return Check("ok", "Python", found)


@check
def versions(patient: Patient) -> Check:
    """Of the libraries, against the ranges that this package was released with."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in _supported()[1]]
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    if not wanted:
        return Check("warning", "versions", "what is supported is not known here", "pip install this package")
    found = {one.name: version(one.name) for one in wanted}
    wrong = {one: outside(found[one.name], str(one.specifier)) for one in wanted}
    words = [f"{one.name} {found[one.name] or 'missing'} (supported: {one.specifier})" for one in wanted if wrong[one]]
    if words:
        status = "warning" if all(how in ("", "newer") for how in wrong.values()) else "error"
        install = " ".join(f"'{one.name}{one.specifier}'" for one in wanted if wrong[one])
        return Check(status, "versions", ", ".join(words), f"pip install {install}")
    words = [f"{name} {found[name]}" for name in ("torch", "transformers", "accelerate")]
    return Check("ok", "versions", ", ".join(words))


@cache
def _supported() -> tuple[str, list[str]]:
    """The range of Python and the requirements: of the installed package, or of the checkout that runs without."""
    from importlib import metadata

    try:
        said = metadata.metadata("accelerate-recipes")
        return said["Requires-Python"], metadata.requires("accelerate-recipes") or []
    except metadata.PackageNotFoundError:
        pass
    import tomllib

    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    project = tomllib.loads(file.read_text())["project"] if file.exists() else {}
    return project.get("requires-python", ""), project.get("dependencies", [])


def outside(found: str | None, wanted: str) -> str:
    """How a version is outside a range: missing, newer, older; empty where it is not."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    if found is None:
        return "missing"
    release = Version(Version(found).base_version)  # vendors ship 2.12.0a0+theirs, which sorts before 2.12
    against = [one for one in SpecifierSet(wanted) if not one.contains(release, prereleases=True)]
    if not against:
        return ""
    return "newer" if all(one.operator.startswith("<") for one in against) else "older"


# --- GPUs ------------------------------------------------------------------------------------------------------------


@check
def gpus(patient: Patient) -> Check:
    found, asked = patient.hardware.gpus, patient.processes_per_node
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = smi_rows("--query-gpu=uuid")
    hidden = visible in ("", "-1")  # on purpose
    if visible and listed.rows and not hidden:
        invalid = invalid_gpu(visible, [row[0] for row in listed.rows])
        if invalid is not None:
            what = f"CUDA sees {len(found)}: {invalid!r} in CUDA_VISIBLE_DEVICES={visible} is none, or there twice"
            return Check("error", "GPUs", what, f"some of 0 to {len(listed.rows) - 1}, each once")
    if not found and listed.rows and not hidden:
        what = f"nvidia-smi lists {len(listed.rows)}, CUDA finds none"
        fix = "in a container: --gpus all; else `modprobe nvidia_uvm`, and on NVSwitch machines nvidia-fabricmanager"
        return Check("error", "GPUs", what, fix)
    if not found:
        why = " (CUDA_VISIBLE_DEVICES hides all)" if listed.rows else ""
        if visible and not listed.rows and not hidden:
            what = f"CUDA_VISIBLE_DEVICES={visible} asks for some, and there is no NVIDIA driver"
            return Check("warning", "GPUs", what, "install it, or unset the variable: this would train on the CPU")
        return Check("ok", "GPUs", f"none{why}: ranks train on the CPU and talk over gloo, and so do these checks")
    names = " and ".join(sorted({gpu.name for gpu in found}))
    words = f"{len(found)} x {names} visible, {asked} asked for"
    if asked > len(found):
        return Check("error", "GPUs", words, f"--num_processes {len(found) * patient.nodes}, or more GPUs")
    if len({gpu.name for gpu in found}) > 1:
        return Check("warning", "GPUs", words, "GPUs of one kind: a step takes as long as on the slowest")
    return Check("ok", "GPUs", words)


@check
def driver(patient: Patient) -> Check | None:
    said = smi_rows("--query-gpu=driver_version")
    if said.problem:
        fix = "see `dmesg | grep -i nvrm`; a driver that was updated works after a reboot"
        return Check("error", "driver", said.problem, fix)
    if said.rows:
        return Check("ok", "driver", said.rows[0][0])
    if patient.hardware.cuda:
        return Check("warning", "driver", "there is no nvidia-smi, which would tell more", "install it")
    return None


@check
def gpu_memory(patient: Patient) -> Check | None:
    rows = smi_rows("--query-gpu=index,memory.free,memory.total").numbers()
    taken = [(index, total - free, total) for index, free, total in rows if free < 0.9 * total]
    if taken:
        words = ", ".join(f"{used:,.0f} of {total:,.0f} MiB of GPU {index:.0f}" for index, used, total in taken)
        return Check("warning", "GPU memory", f"taken: {words}", "end what holds it, or use other GPUs")
    return Check("ok", "GPU memory", f"{min(free for _, free, _ in rows):,.0f} MiB free on each") if rows else None


@check
def gpu_processes(patient: Patient) -> Check | None:
    if not smi_rows("--query-gpu=uuid").rows:
        return None
    rows = smi_rows("--query-compute-apps=pid,process_name").rows
    if not rows:
        return Check("ok", "GPU processes", "none but this")
    found = ", ".join(f"{row[-1]} (pid {row[0]})" for row in rows)
    return Check("warning", "GPU processes", found, "end them if they are yours: they take memory and time")


@check
def precision(patient: Patient) -> Check | None:
    if not patient.hardware.cuda:
        return None
    major, minor = patient.hardware.capability
    words = f"compute capability {major}.{minor}"
    if (major, minor) < (8, 0):  # CUDA programming guide: bf16 on tensor cores from 8.0 on
        return Check("warning", "bf16", f"{words} has no bf16", "none is needed: the recipes take fp16 here")
    return Check("ok", "bf16", f"{words} has it")


@dataclass(frozen=True)
class _Said:
    """Rows that nvidia-smi printed, or why it did not. Neither where there is none."""

    rows: tuple[tuple[str, ...], ...] = ()
    problem: str = ""

    def numbers(self) -> list[list[float]]:
        """Rows of nothing but numbers: a part of a GPU says [N/A] of its memory."""
        return [[float(cell) for cell in row] for row in self.rows if all(_is_number(cell) for cell in row)]


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


@cache
def smi_rows(query: str) -> _Said:
    """It lists all GPUs, whatever CUDA_VISIBLE_DEVICES says."""
    text, problem = nvidia_smi(query, "--format=csv,noheader,nounits")
    return _Said(tuple(tuple(cell.strip() for cell in line.split(",")) for line in text.splitlines() if line), problem)


def nvidia_smi(*words: str) -> tuple[str, str]:
    """What it prints, and what is wrong where it does not work; both are empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return "", ""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi does not answer within {_PATIENCE} s: the driver or a GPU hangs"
    if done.returncode:
        return "", f"nvidia-smi says: {' '.join((done.stdout + done.stderr).split())}"
    return done.stdout, ""


def pcie() -> tuple[int, int] | None:
    """Generation and lanes of the slowest GPU's slot, as they are under load; None where nobody says."""
    rows = smi_rows("--query-gpu=pcie.link.gen.max,pcie.link.width.max").numbers()
    return min(((int(row[0]), int(row[1])) for row in rows), default=None)


# --- The rest of the machine -----------------------------------------------------------------------------------------


@check
def host_memory(patient: Patient) -> Check:
    known = [size for size in (memory.free_ram(), *_left_in_cgroups()) if size is not None]
    if not known:
        return Check("warning", "RAM", "free memory is unknown", "see for yourself whether it is enough")
    free, count = min(known), patient.processes_per_node
    words = f"{memory_size(free)} free for {count} process{'es' * (count > 1)}"
    if free < count * _GIB:  # the imports alone take half of it
        return Check("error", "RAM", words, f"{count} GiB at the least: fewer processes, or ask the scheduler for more")
    if free < 4 * count * _GIB:
        return Check("warning", "RAM", words, "enough for small models only")
    return Check("ok", "RAM", words)


def _left_in_cgroups() -> Iterator[int]:
    """Bytes that a container or a scheduler leaves this process, by cgroup v2: of its own group and all above."""
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
        except OSError:  # the root of all has no limit
            continue


@check
def disk(patient: Patient) -> Check:
    """Where a run writes unless told otherwise, and where its libraries put what is passing."""
    places = {str(Path.cwd()): Path.cwd(), tempfile.gettempdir(): Path(tempfile.gettempdir())}
    free = {name: shutil.disk_usage(place).free for name, place in places.items()}
    words = ", ".join(f"{memory_size(size)} free in {name}" for name, size in free.items())
    closed = [name for name, place in places.items() if not os.access(place, os.W_OK)]
    if closed:
        return Check("error", "disk", f"{closed[0]} cannot be written", "--output_dir or TMPDIR with one that can")
    if min(free.values()) < _GIB:
        return Check("error", "disk", words, "make room, or --output_dir on another disk")
    if min(free.values()) < 10 * _GIB:
        return Check("warning", "disk", words, "a checkpoint takes 12 bytes a parameter: --save_total_limit, more room")
    return Check("ok", "disk", words)


@check
def shared_memory(patient: Patient) -> Check | None:
    if sys.platform != "linux":
        return None
    system = os.statvfs(_SHARED_MEMORY)
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    words = f"{memory_size(free)} of {memory_size(size)} free"
    if free < _GIB:  # a container of Docker's has 64 MiB, a job of Azure ML's 2 GiB, unless they are told
        return Check("warning", "/dev/shm", f"{words}: DataLoader workers and NCCL pass data in it", ENLARGE)
    return Check("ok", "/dev/shm", words)


ENLARGE = "docker --shm-size=16g; Azure ML shm_size: 16g; else mount -o remount,size=16g /dev/shm, or empty it"


@check
def limits(patient: Patient) -> Check:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    words = f"{'any number of' if files == resource.RLIM_INFINITY else files} open files"
    if files != resource.RLIM_INFINITY and files < 1024:
        return Check("warning", "limits", f"{words}: workers pass each tensor as one", "ulimit -n 65536")
    if Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        what = f"{memory_size(locked)} of locked memory, which InfiniBand needs"
        return Check("warning", "limits", what, "ulimit -l unlimited, or docker --ulimit memlock=-1")
    return Check("ok", "limits", words)


@check
def cores(patient: Patient) -> Check:
    """For the processes and the DataLoader workers that `standard` gives each."""
    count, has = patient.processes_per_node, patient.hardware.cores
    run = resolve(world_size=patient.processes, local_world_size=count, hardware=patient.hardware, environment={})
    workers = run["dataloader_num_workers"]
    words = f"{has} for {count} process{'es' * (count > 1)} with {workers} DataLoader worker{'s' * (workers != 1)} each"
    if has < count:
        return Check("warning", "CPU cores", words, "a core a process: --cpus-per-task, docker --cpus, fewer processes")
    if has < count * workers:
        return Check("warning", "CPU cores", words, "--dataloader_num_workers with fewer, or more cores")
    return Check("ok", "CPU cores", words)
