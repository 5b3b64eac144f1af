"""The probe run of `recipes doctor`: start the ranks of this node, and find out why one failed."""

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from launch.doctor.machine import ENLARGE, Check, Request
from launch.host import processes
from launch.host.launcher import threads_per_process
from recipes.run import Json

# Stages, which are functions of links.py, in the order in which they run.
STAGES = ("start", "rendezvous", "connection", "bandwidth", "matmul", "end")
OF_LINKS = ("connection", "bandwidth", "end")
OF_ONE = ("start", "matmul")  # for a single process, which has nobody to communicate with
_GRACE = 2.0  # seconds after the first failure for the other ranks to report their errors
# A collective counts as hanging after this share of --timeout, but at most this many seconds. Other
# stages have all of --timeout, because a cold disk, a late node or a busy CPU may delay them.
_OF_TIMEOUT, _COLLECTIVE_SECONDS = 1 / 6, 20
_LOOK = "run the doctor again with NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL for more detail"
_FIXES = {
    "start": "install a torch that works here, built for the driver's CUDA: https://pytorch.org/get-started/locally",
    "rendezvous": "give --main_process_ip an address of node 0 that every node can reach",
}


@dataclass(frozen=True)
class StageFailure:
    """The failure of a probe run: the stage, what happened in the stage, and the fix.

    `by_signal` is True if a rank was killed from outside, by SIGKILL. `by_another` is True if the
    error only reports that another rank is lost.
    """

    stage: str
    what: str
    fix: str
    by_signal: bool = False
    by_another: bool = False

    def check(self, fix: str = "") -> Check:
        return Check("error", "torch" if self.stage == "start" else self.stage, self.what, fix or self.fix)


@dataclass
class Report:
    """The report of one rank: its stage, its findings, and how it ended.

    `code` is the exit code; None if the rank had to be killed. `error` is the error that the rank
    reported at `failed_at` (seconds since 1970), or else the last line of its log.
    """

    rank: int
    stage: str = "start"
    found: Json = field(default_factory=dict)
    error: str = ""
    failed_at: float = 0.0
    code: int | None = None


def probe_run(
    request: Request, stages: tuple[str, ...], port: int, chosen: Iterable[tuple[str, str]] = ()
) -> tuple[list[Check], StageFailure | None]:
    """Run the ranks of this node until they end or hang. Return the checks and the failure, if any.

    Ranks that still run after a failure, a hang or --timeout are killed. Rank 0 listens on `port`.
    `chosen` adds environment variables.
    """
    first = request.machine_rank * request.processes_per_node
    of_all = {
        "backend": request.backend,
        "stages": stages,
        "size": request.processes,
        "local_size": request.processes_per_node,
        "address": request.address if request.nodes > 1 else "127.0.0.1",
        "port": port,
        "threads": threads_per_process(request.hardware.cores, request.processes_per_node),
        "card": request.hardware.gpus[0].name if request.hardware.cuda else "",
    }
    asked = [{**of_all, "rank": first + at, "local_rank": at} for at in range(request.processes_per_node)]
    with processes.ask("launch.doctor.links", asked, {**os.environ, **dict(chosen)}) as ranks:
        in_time = _wait(ranks, request)
        reports = []
        for at, rank in enumerate(ranks):
            noted = {"error": "".join(processes.last_lines(rank.folder / "log", 1)), **(rank.answer or {})}
            reports.append(Report(first + at, code=rank.process.poll(), **noted))
    found = [reports[0].found[stage] for stage in stages if all(stage in report.found for report in reports)]
    return [Check(**one) for one in found if one], failure_in(request, reports, in_time)


def _wait(ranks: list[processes.Child], request: Request) -> bool:
    """Wait until all ranks have ended or hang. Return False if --timeout is over first, else True.

    After the first failure the other ranks have a moment to report their errors.
    """
    noted: list[Json | None] = []
    since, last_chance = time.monotonic(), float("inf")
    for codes in processes.watch(ranks):
        now, before, noted = time.monotonic(), noted, [rank.answer for rank in ranks]
        since = since if noted == before else now
        if any(codes):
            last_chance = min(last_chance, now + _GRACE)
        running = [(note or {}).get("stage", "start") for note, code in zip(noted, codes, strict=True) if code is None]
        hangs = now - since > patience(request, min(running, key=STAGES.index))
        if hangs or now > last_chance:
            return True
        if request.seconds_left < 0:
            return False
    return True


def patience(request: Request, stage: str) -> float:
    """Return the seconds without progress after which a stage counts as hanging."""
    return min(_COLLECTIVE_SECONDS, request.timeout * _OF_TIMEOUT) if stage in OF_LINKS else request.timeout


# --- Failures -------------------------------------------------------------------------------------


def failure_in(request: Request, reports: list[Report], in_time: bool = True) -> StageFailure | None:
    """Return a probe run's failure: a killed rank, else the first error, else a hang, else None."""
    killed = [report for report in reports if report.code is not None and report.code < 0]
    failed = [report for report in reports if report.code]
    if killed:
        return _killed(killed[0])
    if failed:
        one = min(failed, key=lambda report: report.failed_at)
        lost = any(text in one.error for text in ("closed by peer", "reset by peer"))
        what = f"rank {one.rank}: {one.error}"
        return StageFailure(one.stage, what, _FIXES.get(one.stage, _LOOK), by_another=lost)
    hung = [report for report in reports if report.code is None]
    return _hung(request, hung, in_time) if hung else None


def _killed(report: Report) -> StageFailure:
    code = report.code or 0
    what = f"rank {report.rank} was {processes.how_it_ended(code)}"
    fix = f"reinstall torch, if native code of torch or of a library is at fault; or {_LOOK}"
    if code == -signal.SIGKILL:
        fix = "find what kills processes here: the kernel when memory runs out (see `dmesg`), a limit "
        fix += "(see `ulimit -a`), the scheduler, the container or another user"
    elif code == -signal.SIGBUS:
        fix = f"enlarge /dev/shm, which is full in most such cases: {ENLARGE}"
    return StageFailure(report.stage, what, fix, by_signal=code == -signal.SIGKILL)


def _hung(request: Request, reports: list[Report], in_time: bool) -> StageFailure:
    """Return the failure of ranks that still run: --timeout is over, or one rank or all hang."""
    one = min(reports, key=lambda report: STAGES.index(report.stage))
    if not in_time:
        what = f"the {request.timeout} s of --timeout were over before rank {one.rank} had finished; nothing has failed"
        return StageFailure(one.stage, what, f"use --timeout {4 * request.timeout} if a disk is cold or a CPU busy")
    seconds = patience(request, one.stage)
    waited = ", ".join(f"rank {report.rank}" for report in reports if report.stage != one.stage)
    what = f"every rank of this node hangs: none made progress within {seconds:.0f} s"
    if waited:
        what = f"rank {one.rank} did not finish within {seconds:.0f} s; {waited} waited for it"
    return StageFailure(one.stage, what, _LOOK)
