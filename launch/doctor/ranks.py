"""The probe run of `recipes doctor`: the ranks of this node, their notes, and what failed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.doctor import smi
from launch.doctor.check import Request
from launch.doctor.collectives import NOTES
from launch.doctor.measured import used_bytes
from launch.doctor.network import Switch
from launch.doctor.stages import STAGES
from launch.host import processes
from launch.host.launcher import threads_per_process
from recipes.run import Json

_STAGES = "launch.doctor.stages"
_GRACE = 2.0  # seconds after the first failure for the other ranks to report their errors
_STOPPED_SECONDS = 2.0  # a stopped rank may be let go on at once
_IDLE_SECONDS = 4.0  # of all ranks, in a collective: one that waits for a busy one does not make that one idle
OF_LINKS = (
    "connection",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "bandwidth",
    "sweep",
    "latency",
    "ddp_step",
    "end",
)
_COLLECTIVES = tuple(stage for stage in OF_LINKS if stage != "ddp_step")  # whose first import takes long
# For a single process, which communicates with no other.
STAGES_OF_ONE = ("start", "device", "workers", "matmul", "adam", "pcie", "context")
# A collective hangs after this share of the time, or so many seconds. A cold disk, a late node or a
# busy CPU may delay the other stages, which have all of it.
_OF_TIMEOUT, _COLLECTIVE_SECONDS = 1 / 6, 20
_TITLES = {"start": "torch", "device": "GPU", "workers": "DataLoader", "ddp_step": "DDP step", "matmul": "matrices"}
_TITLES |= {"adam": "CPU Adam", "pcie": "PCIe", "context": "CUDA context"}


def title(stage: str) -> str:
    """The name of a stage as it is printed."""
    return _TITLES.get(stage, stage.replace("_", "-"))


@dataclass
class Report:
    """What one rank has noted: its stage, the results of the stages before, and how it ended.

    `code` is its exit code, None if it had to be killed; `state` is then its process state as ps
    shows it, and it was `out_of_time` if no hang was seen. `missing` are the ranks that it waits
    for. `error` is noted at `failed_at`, in seconds since 1970, or else read from its log.
    """

    rank: int
    stage: str = "start"
    results: Json = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    error: str = ""
    failed_at: float = 0.0
    code: int | None = None
    state: str = ""
    out_of_time: bool = False


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
        "used_bytes": used_bytes() if request.hardware.cuda else {},
        "smi": not smi.driver().problem,
    }
    environment = {**os.environ, **{switch.name: switch.value for switch in chosen}}
    asked = [{**of_all, "rank": first + at, "local_rank": at} for at in range(request.processes_per_node)]
    with processes.ask(_STAGES, asked, environment) as ranks:
        out_of_time = _wait(ranks, request)
        reports = [_report(first + at, rank) for at, rank in enumerate(ranks)]
    return [replace(report, out_of_time=out_of_time) for report in reports]


def _wait(ranks: list[processes.Child], request: Request) -> bool:
    """Return when all ranks have ended, none gets any further, or the time is up: then True.

    After the first failure the other ranks have a moment to report their errors.
    """
    noted, order = "", list(STAGES)
    since = idle = stopped = time.monotonic()
    work, last_chance = 0.0, float("inf")
    quick = request.nodes == 1 and request.backend == "gloo"  # not another node or a GPU that works instead
    for codes in processes.watch(ranks):
        now, notes = time.monotonic(), [_notes(rank) for rank in ranks]
        running = [rank.process.pid for rank, code in zip(ranks, codes, strict=True) if code is None]
        states = [_state(pid) for pid in running]
        if noted != "".join(notes):
            noted, since = "".join(notes), now
        if (done := sum(map(_cpu_ticks, running))) != work or "D" in states or "R" in states or since == now:
            work, idle = done, now
        if not any(state in STOPPED for state in states):
            stopped = now
        stages = [_read(text).stage for text, code in zip(notes, codes, strict=True) if code is None]
        slowest = min(stages, key=order.index)
        if any(codes):
            last_chance = min(last_chance, now + _GRACE)
        hangs = now - since > patience(request, slowest)
        hangs |= quick and slowest in _COLLECTIVES and now - idle > _IDLE_SECONDS
        if hangs or now > last_chance or now - stopped > _STOPPED_SECONDS:
            return False
        if request.seconds_left < 0:
            return True
    return False


STOPPED = ("T", "t")  # by a signal, by a debugger


def patience(request: Request, stage: str) -> float:
    """Seconds after which a stage hangs."""
    return min(_COLLECTIVE_SECONDS, request.timeout * _OF_TIMEOUT) if stage in _COLLECTIVES else request.timeout


def _cpu_ticks(pid: int) -> float:
    """What a process has worked until now, in all its threads (proc(5): utime and stime)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return float(words[11]) + float(words[12])


def _notes(rank: processes.Child) -> str:
    """The complete lines of a rank's notes."""
    file = rank.folder / NOTES
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


def _report(number: int, rank: processes.Child) -> Report:
    report = _read(_notes(rank), number)
    report.code = rank.process.poll()
    if report.code is None:
        report.state = _state(rank.process.pid)
    report.error = report.error or _last_words(rank)
    return report


def _last_words(rank: processes.Child) -> str:
    """The last line of a log; of a crash in native code the Python line that it happened in."""
    lines = rank.last_lines(200)
    crashed = [at for at, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    if not crashed:
        return "".join(lines[-1:])
    where = next((line.strip() for line in lines[crashed[0] :] if line.startswith("  File ")), "")
    return f"{lines[crashed[0]].removeprefix('Fatal Python error: ')}{where and ' in '}{where}"


def _state(pid: int) -> str:
    """A letter as ps shows it: T stopped, D inside the kernel, ...; empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
