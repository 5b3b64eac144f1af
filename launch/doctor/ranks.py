"""The probe run of `recipes doctor`: the ranks of this node, their notes, and what failed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from launch.doctor.machine import ENLARGE, Request
from launch.doctor.network import Switch
from launch.doctor.stages import NOTES, REQUEST, STAGES
from launch.host import processes
from launch.host.parent import threads_per_process
from recipes.run import Json

LOOK = "run it again with NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL for more detail"
_STAGES = "launch.doctor.stages"
_GRACE = 2.0  # seconds after the first failure for the other ranks to report their errors
_OF_LINKS = ("connection", "all_reduce", "bandwidth", "latency", "ddp_step", "end")
# Factors on the timeout of a collective, for stages that a cold disk or a late node delays.
_TIMES_LONGER = {"start": 6, "workers": 6, "rendezvous": 6, "ddp_step": 6}
_TITLES = {"start": "torch", "device": "GPU", "workers": "DataLoader", "ddp_step": "DDP step", "matmul": "matrices"}


def title(stage: str) -> str:
    """The name of a stage as it is printed."""
    return _TITLES.get(stage, stage.replace("_", "-"))


@dataclass
class Report:
    """What one rank has noted: its stage, the results of the stages before, and how it ended.

    `code` is its exit code, None if it had to be killed; `state` is then its process state as ps
    shows it. `missing` are the ranks that it waits for. `error` is noted at `failed_at`, in seconds
    since 1970, or else the last line of its log.
    """

    rank: int
    stage: str = "start"
    results: Json = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    error: str = ""
    failed_at: float = 0.0
    code: int | None = None
    state: str = ""


def probe_run(
    request: Request, stages: tuple[str, ...], failed: bool = False, chosen: tuple[Switch, ...] = (), attempt: int = 0
) -> list[Report]:
    """Start the ranks of this node, wait until they end or hang, and leave none of them behind.

    `failed` tells the other nodes that a check of this one has failed. `chosen` switches are set
    for the ranks.
    """
    first = request.machine_rank * request.processes_per_node
    of_all = {
        "backend": request.backend,
        "stages": stages,
        "size": request.processes,
        "local_size": request.processes_per_node,
        "address": request.address if request.nodes > 1 else "127.0.0.1",
        # A port of its own for each attempt: another node may still be in the attempt before.
        "port": request.port + attempt if request.nodes > 1 else processes.free_port(),
        "threads": threads_per_process(request.hardware.cores, request.processes_per_node),
        "node": request.machine_rank,
        "failed_node": request.machine_rank if failed else None,
    }
    environment = {**os.environ, **{switch.name: switch.value for switch in chosen}}
    with tempfile.TemporaryDirectory(prefix="doctor-", ignore_cleanup_errors=True) as scratch:
        folders = [Path(scratch) / str(local_rank) for local_rank in range(request.processes_per_node)]
        with processes.group() as ranks:
            for local_rank, folder in enumerate(folders):
                folder.mkdir()
                own = {**of_all, "rank": first + local_rank, "local_rank": local_rank}
                (folder / REQUEST).write_text(json.dumps(own))
                log = folder / "log"
                ranks.append(processes.start_module(_STAGES, folder, log=log, environment=environment))
            _wait(ranks, folders, request.timeout)
            return [_report(first + at, *of_rank) for at, of_rank in enumerate(zip(ranks, folders, strict=True))]


def _wait(ranks: list[subprocess.Popen[bytes]], folders: list[Path], timeout: int) -> None:
    """Return when all ranks have ended or none gets any further.

    After the first failure the other ranks have a moment to report their errors.
    """
    noted, since, order = "", time.monotonic(), list(STAGES)
    last_chance = float("inf")
    for codes in processes.watch(ranks):
        now, notes = time.monotonic(), [_notes(folder) for folder in folders]
        if noted != "".join(notes):
            noted, since = "".join(notes), now
        stages = [_read(text).stage for text, code in zip(notes, codes, strict=True) if code is None]
        slowest = min(stages, key=order.index)
        if any(codes):
            last_chance = min(last_chance, now + _GRACE)
        if now > min(last_chance, since + timeout * _TIMES_LONGER.get(slowest, 1)):
            return


def _notes(folder: Path) -> str:
    """The complete lines of a rank's notes."""
    file = folder / NOTES
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1]


def _read(notes: str, rank: int = 0) -> Report:
    report = Report(rank)
    for note in map(json.loads, notes.splitlines()):
        report.stage = note.get("begins", report.stage)
        report.missing = note.get("missing", report.missing)
        if "ends" in note:
            report.results[note["ends"]] = note["result"]
        if "failed" in note:
            report.error, report.failed_at = note["error"], note["time"]
    return report


def _report(rank: int, process: subprocess.Popen, folder: Path) -> Report:
    report = _read(_notes(folder), rank)
    report.code = process.poll()
    if report.code is None:
        report.state = _state(process.pid)
    report.error = report.error or "".join(processes.last_lines(folder / "log", 1))
    return report


def _state(pid: int) -> str:
    """A letter as ps shows it: T stopped, D inside the kernel, ...; empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


# --- What went wrong ------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageFailure:
    """Why a probe run failed: the stage, what happened in it, and what to do.

    `of_link` if it may be the link.
    """

    stage: str
    what: str
    fix: str
    of_link: bool = False


def failure_in(request: Request, reports: list[Report]) -> StageFailure | None:
    """What went wrong first in a probe run, None if every rank ended well."""
    if all(report.code == 0 for report in reports):
        return None
    killed = next((report for report in reports if report.code is not None and report.code < 0), None)
    if killed:
        return _killed(killed)
    failed = [report for report in reports if report.code]
    if failed:
        return _failed(request, min(failed, key=lambda report: report.failed_at))
    return _hung(request, [report for report in reports if report.code is None])


def _killed(report: Report) -> StageFailure:
    code = report.code or 0
    what = f"rank {report.rank} was {processes.how_it_ended(code)}"
    if code == -signal.SIGKILL:
        return StageFailure(report.stage, what, "see `dmesg`: the kernel kills processes when memory runs out")
    if code == -signal.SIGBUS:
        return StageFailure(report.stage, what, f"usually /dev/shm is full. {ENLARGE}")
    return StageFailure(report.stage, f"{what}: {report.error}", LOOK, report.stage in _OF_LINKS)


def _failed(request: Request, report: Report) -> StageFailure:
    what = f"rank {report.rank}: {report.error}"
    lost = any(text in report.error for text in ("closed by peer", "reset by peer"))
    if lost and request.nodes > 1:
        return StageFailure(
            report.stage, what, "run `recipes doctor` on the other nodes: one of them says which rank was lost"
        )
    fixes = {
        "start": "use an environment in which `import torch` works",
        "device": "install a torch that is built for CUDA and this driver: see https://pytorch.org/get-started/locally",
        "rendezvous": "use an address of node 0 for --main_process_ip and a free port there for --main_process_port",
    }
    return StageFailure(report.stage, what, fixes.get(report.stage, LOOK), report.stage in _OF_LINKS)


def _hung(request: Request, reports: list[Report]) -> StageFailure:
    """Which rank hangs: one that the system holds, else one that is behind the others, else all."""
    order = list(STAGES)
    slowest = min(reports, key=lambda report: order.index(report.stage))
    held = next((report for report in reports if report.state in _HELD), None)
    behind = any(report.stage != slowest.stage for report in reports)
    seconds = request.timeout * _TIMES_LONGER.get(slowest.stage, 1)
    if held is None and not behind:
        return _all_hung(request, slowest, seconds)
    one = held or slowest
    waiting = ", ".join(f"rank {report.rank}" for report in reports if report is not one)
    waits = f"; {waiting} waited for it" if waiting else ""
    what = f"rank {one.rank} did not finish within {seconds} s{_HELD.get(one.state, '')}{waits}"
    if held:
        return StageFailure(
            one.stage, what, "see `dmesg` for a driver or a disk that blocks it, or find out what stopped it"
        )
    return StageFailure(one.stage, what, LOOK, one.stage in _OF_LINKS)


_HELD = {"T": ": a signal has stopped it", "D": ": it waits inside the kernel"}  # process states that ps shows


def _all_hung(request: Request, report: Report, seconds: int) -> StageFailure:
    if report.stage == "rendezvous" and request.nodes > 1:
        return _no_rendezvous(request, report, seconds)
    what = f"every rank of this node hangs: none finished within {seconds} s"
    return StageFailure(report.stage, what, LOOK, report.stage in _OF_LINKS)


def _no_rendezvous(request: Request, report: Report, seconds: int) -> StageFailure:
    where = f"{request.address}:{request.port}"
    fix = f"run the doctor on every node at the same time, and check that all of them can reach {where} on node 0"
    if not report.missing:
        return StageFailure("rendezvous", f"nothing answered at {where} within {seconds} s", fix)
    nodes = sorted({rank // request.processes_per_node for rank in report.missing})
    ranks = f"rank{'s' * (len(report.missing) > 1)} {', '.join(map(str, report.missing))}"
    what = f"{ranks} on node {', '.join(map(str, nodes))} did not join within {seconds} s"
    return StageFailure("rendezvous", what, fix)
