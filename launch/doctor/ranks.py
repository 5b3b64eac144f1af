"""Holding the meeting of `recipes doctor`: a fresh process a rank, what each has noted, and why it did not end well."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.doctor.machine import ENLARGE, Patient
from launch.doctor.network import Switch
from launch.doctor.stages import NOTES, REQUEST, STAGES

MEETING = Path(__file__).resolve().with_name("stages.py")
LOOK = "with NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL the same command tells more"
_GRACE = 2.0  # seconds for ranks to say what they have lost when another one is gone
_OF_LINKS = ("connection", "all_reduce", "bandwidth", "latency", "ddp_step", "end")
# What a cold disk, or a node that starts late, may take longer for than a collective: so many times.
_LONGER = {"start": 6, "workers": 6, "rendezvous": 6, "ddp_step": 6}
_TITLES = {"start": "torch", "device": "GPU", "workers": "DataLoader", "ddp_step": "DDP step", "matmul": "matrices"}


def title(stage: str) -> str:
    return _TITLES.get(stage, stage.replace("_", "-"))


@dataclass
class Report:
    """What one rank has noted: the stage it is in, what those before found, and how it ended.

    `code` is its exit code, None where it did not end by itself, and `state` what it did then, as ps shows it.
    """

    rank: int
    stage: str = "start"
    found: dict[str, Any] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    words: str = ""
    failed_at: float = 0.0
    code: int | None = None
    state: str = ""


def hold(
    patient: Patient, stages: tuple[str, ...], sick: bool = False, chosen: tuple[Switch, ...] = (), attempt: int = 0
) -> list[Report]:
    """Start the ranks of this node, wait until they have ended or get no further, and leave none of them behind."""
    first = patient.machine_rank * patient.processes_per_node
    request = {
        "backend": patient.backend,
        "stages": stages,
        "size": patient.processes,
        "local_size": patient.processes_per_node,
        "address": patient.address if patient.nodes > 1 else "127.0.0.1",
        # Another one each time: a node may still be in the last meeting.
        "port": patient.port + attempt if patient.nodes > 1 else _free_port(),
        "cores": patient.hardware.cores,
        "node": patient.machine_rank,
        "sick_node": patient.machine_rank if sick else None,
        "parent": os.getpid(),
    }
    environment = {**os.environ, **{switch.name: switch.value for switch in chosen}}
    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as scratch, _ended() as processes:
        folders = [Path(scratch) / str(local_rank) for local_rank in range(patient.processes_per_node)]
        for local_rank, folder in enumerate(folders):
            own = {**request, "rank": first + local_rank, "local_rank": local_rank}
            processes.append(_started(folder, own, environment))
        _wait(processes, folders, patient.timeout)
        return [_report(first + at, *of_rank) for at, of_rank in enumerate(zip(processes, folders, strict=True))]


@contextlib.contextmanager
def _ended() -> Iterator[list[subprocess.Popen]]:
    """Processes of which none is left at the end, nor any that they have started."""
    processes: list[subprocess.Popen] = []
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):  # not even that ends one inside a driver that hangs
                process.wait(5)


def _started(folder: Path, request: dict[str, Any], environment: dict[str, str]) -> subprocess.Popen:
    folder.mkdir()
    (folder / REQUEST).write_text(json.dumps(request))
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(MEETING), str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(processes: list[subprocess.Popen], folders: list[Path], timeout: int) -> None:
    """Until all have ended, one has died and the others had time to notice, or no one gets any further."""
    noted, since, order = "", time.monotonic(), list(STAGES)
    last_chance = float("inf")
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        now, notes = time.monotonic(), [_notes(folder) for folder in folders]
        if noted != "".join(notes):
            noted, since = "".join(notes), now
        running = [_read(text).stage for text, process in zip(notes, processes, strict=True) if process.poll() is None]
        slowest = min(running, key=order.index, default="end")
        if any(process.poll() for process in processes):
            last_chance = min(last_chance, now + _GRACE)
        if now > min(last_chance, since + timeout * _LONGER.get(slowest, 1)):
            return


def _notes(folder: Path) -> str:
    """The whole lines of a rank's notes."""
    file = folder / NOTES
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1]


def _read(notes: str, rank: int = 0) -> Report:
    report = Report(rank)
    for note in map(json.loads, notes.splitlines()):
        report.stage = note.get("begins", report.stage)
        report.missing = note.get("missing", report.missing)
        if "ends" in note:
            report.found[note["ends"]] = note["found"]
        if "failed" in note:
            report.words, report.failed_at = note["words"], note["time"]
    return report


def _report(rank: int, process: subprocess.Popen, folder: Path) -> Report:
    report = _read(_notes(folder), rank)
    report.code = process.poll()
    if report.code is None:
        report.state = _state(process.pid)
    log = (folder / "log").read_text(errors="replace").strip()
    report.words = report.words or log.rpartition("\n")[2]
    return report


def _state(pid: int) -> str:
    """A letter, as in ps: T stopped, D inside the kernel, ...; empty where nobody says."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# --- What went wrong -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trouble:
    """Why a meeting did not end: the stage, what happened in it, and what to do; `of_link` where it may be the link."""

    stage: str
    what: str
    fix: str
    of_link: bool = False


def trouble_of(patient: Patient, reports: list[Report]) -> Trouble | None:
    if all(report.code == 0 for report in reports):
        return None
    killed = next((report for report in reports if report.code is not None and report.code < 0), None)
    if killed:
        return _killed(killed)
    failed = [report for report in reports if report.code]
    if failed:
        return _failed(patient, min(failed, key=lambda report: report.failed_at))
    return _hung(patient, [report for report in reports if report.code is None])


def _killed(report: Report) -> Trouble:
    number = signal.Signals(-(report.code or 0))
    what = f"rank {report.rank} was killed by {number.name}"
    if number == signal.SIGKILL:
        return Trouble(report.stage, what, "see `dmesg`: the system kills so when its memory runs out")
    if number == signal.SIGBUS:
        return Trouble(report.stage, what, f"a full /dev/shm ends so. {ENLARGE}")
    return Trouble(report.stage, f"{what}: {report.words}", LOOK, report.stage in _OF_LINKS)


def _failed(patient: Patient, report: Report) -> Trouble:
    what = f"rank {report.rank}: {report.words}"
    lost = any(words in report.words for words in ("closed by peer", "reset by peer"))
    if lost and patient.nodes > 1:
        return Trouble(report.stage, what, "another node's doctor says which rank was lost")
    fixes = {
        "start": "an environment in which `import torch` works",
        "device": "a torch that is built for CUDA and for this driver: see https://pytorch.org/get-started/locally",
        "rendezvous": "--main_process_ip with an address of node 0, --main_process_port with one that is free there",
    }
    return Trouble(report.stage, what, fixes.get(report.stage, LOOK), report.stage in _OF_LINKS)


def _hung(patient: Patient, reports: list[Report]) -> Trouble:
    """Who got no further: a rank that the system holds, else the one that is behind, else all of them."""
    order = list(STAGES)
    slowest = min(reports, key=lambda report: order.index(report.stage))
    held = next((report for report in reports if report.state in _HELD), None)
    behind = any(report.stage != slowest.stage for report in reports)
    seconds = patient.timeout * _LONGER.get(slowest.stage, 1)
    if held is None and not behind:
        return _all_hung(patient, slowest, seconds)
    one = held or slowest
    waiting = ", ".join(f"rank {report.rank}" for report in reports if report is not one)
    waits = f"; {waiting} waited for it" if waiting else ""
    what = f"rank {one.rank} did not finish it within {seconds} s{_HELD.get(one.state, '')}{waits}"
    if held:
        return Trouble(one.stage, what, "see `dmesg` for a driver or a disk that holds it, or who has stopped it")
    return Trouble(one.stage, what, LOOK, one.stage in _OF_LINKS)


_HELD = {"T": ": a signal has stopped it", "D": ": it waits inside the kernel"}


def _all_hung(patient: Patient, report: Report, seconds: int) -> Trouble:
    if report.stage == "rendezvous" and patient.nodes > 1:
        return _nobody_came(patient, report, seconds)
    what = f"no rank of this node got any further within {seconds} s"
    return Trouble(report.stage, what, LOOK, report.stage in _OF_LINKS)


def _nobody_came(patient: Patient, report: Report, seconds: int) -> Trouble:
    where = f"{patient.address}:{patient.port}"
    fix = f"see that every node runs the doctor, and that {where} on node 0 can be reached from all of them"
    if not report.missing:
        return Trouble("rendezvous", f"nobody answers at {where} within {seconds} s", fix)
    nodes = sorted({rank // patient.processes_per_node for rank in report.missing})
    ranks = f"rank{'s' * (len(report.missing) > 1)} {', '.join(map(str, report.missing))}"
    what = f"{ranks} on node {', '.join(map(str, nodes))} did not come within {seconds} s"
    return Trouble("rendezvous", what, fix)
