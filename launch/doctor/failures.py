"""What went wrong in a probe run of `recipes doctor`, read from what its ranks have noted."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from launch.doctor.check import Request
from launch.doctor.host import ENLARGE
from launch.doctor.ranks import OF_LINKS, STOPPED, Report, patience
from launch.doctor.stages import STAGES
from launch.host import processes

LOOK = "run it again with NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL for more detail"


@dataclass(frozen=True)
class StageFailure:
    """Why a probe run failed: the stage, what happened in it, and what to do.

    `of_link` if it may be the link. `by_signal` if something ended or stopped a rank from outside.
    """

    stage: str
    what: str
    fix: str
    of_link: bool = False
    by_signal: bool = False


def failure_in(request: Request, reports: list[Report], oom_kills: int = 0) -> StageFailure | None:
    """What went wrong first in a probe run, None if every rank ended well.

    `oom_kills`: how many processes the kernel has killed meanwhile because memory ran out.
    """
    if all(report.code == 0 for report in reports):
        return None
    killed = next((report for report in reports if report.code is not None and report.code < 0), None)
    if killed:
        return _killed(killed, oom_kills)
    failed = [report for report in reports if report.code]
    if failed:
        return _failed(request, min(failed, key=lambda report: report.failed_at))
    return _hung(request, [report for report in reports if report.code is None])


def kernel_kills() -> int:
    """How many processes the kernel has killed since it started, because memory ran out."""
    try:
        words = Path("/proc/vmstat").read_text().split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError):
        return 0


def _killed(report: Report, oom_kills: int) -> StageFailure:
    code = report.code or 0
    what = f"rank {report.rank} was {processes.how_it_ended(code)}"
    if code == -signal.SIGKILL and oom_kills:
        fix = "request more memory, or use fewer processes: `dmesg` shows what the kernel killed"
        return StageFailure(report.stage, f"{what}, by the kernel because memory ran out", fix, by_signal=True)
    if code == -signal.SIGKILL:
        what = f"{what}, not by the kernel for lack of memory"
        fix = "find what kills processes here: a limit (`ulimit -a`), the scheduler or container, another user"
        return StageFailure(report.stage, what, fix, by_signal=True)
    if code == -signal.SIGXCPU:
        return StageFailure(report.stage, f"{what}: its CPU time is used up", "`ulimit -t unlimited`")
    if code == -signal.SIGBUS:
        return StageFailure(report.stage, what, f"usually /dev/shm is full. {ENLARGE}")
    if report.error:
        what = f"{what}: {report.error}"
    fix = f"a fault in native code, torch's or a library's: reinstall torch, or {LOOK}"
    return StageFailure(report.stage, what, fix, report.stage in OF_LINKS, by_signal=True)


def _failed(request: Request, report: Report) -> StageFailure:
    what = f"rank {report.rank}: {report.error}"
    lost = any(text in report.error for text in ("closed by peer", "reset by peer"))
    if lost and request.nodes > 1:
        return StageFailure(
            report.stage, what, "run `recipes doctor` on the other nodes: one of them says which rank was lost"
        )
    fixes = {
        "start": "use an environment in which `import torch` works",
        "device": "install a torch that is built for this GPU and driver: see https://pytorch.org/get-started/locally",
        "rendezvous": "use an address of node 0 for --main_process_ip and a free port there for --main_process_port",
    }
    return StageFailure(report.stage, what, fixes.get(report.stage, LOOK), report.stage in OF_LINKS)


def _hung(request: Request, reports: list[Report]) -> StageFailure:
    """Which rank hangs: one that the system holds, else one that is behind the others, else all."""
    order = list(STAGES)
    slowest = min(reports, key=lambda report: order.index(report.stage))
    held = next((report for report in reports if report.state in _HELD), None)
    behind = any(report.stage != slowest.stage for report in reports)
    if slowest.out_of_time and (held is None or held.state == "D"):  # D is also reading a disk
        return _out_of_time(request, slowest)
    if held is None and not behind:
        return _all_hung(request, slowest)
    one = held or slowest
    waiting = ", ".join(f"rank {report.rank}" for report in reports if report is not one)
    waits = f"; {waiting} waited for it" if waiting else ""
    if held:
        what, fix = _HELD[held.state]
        return StageFailure(one.stage, f"rank {one.rank} {what}{waits}", fix, by_signal=held.state in STOPPED)
    what = f"rank {one.rank} did not finish within {patience(request, one.stage):.0f} s{waits}"
    return StageFailure(one.stage, what, LOOK, one.stage in OF_LINKS)


# Process states that ps shows.
_HELD = {
    "T": (
        "is alive, but a signal has stopped it",
        "find what sent SIGSTOP, SIGTSTP or SIGTTIN: a scheduler that suspends jobs, Ctrl-Z; "
        "a stopped process goes on with `kill -CONT PID`",
    ),
    "t": ("is alive, but a debugger has stopped it", "end the debugger (gdb, strace) or let it go on"),
    "D": (
        "waits inside the kernel, where nothing can end it",
        "see `dmesg` for a driver or a disk that blocks it; a network disk that is gone, or reboot",
    ),
}


def _out_of_time(request: Request, report: Report) -> StageFailure:
    what = f"the {request.timeout} s of --timeout were over before rank {report.rank} was done; nothing has failed"
    return StageFailure(report.stage, what, f"--timeout {4 * request.timeout}: a cold disk or a busy machine is slow")


def _all_hung(request: Request, report: Report) -> StageFailure:
    seconds = patience(request, report.stage)
    if report.stage == "rendezvous" and request.nodes > 1:
        return _no_rendezvous(request, report, seconds)
    what = f"every rank of this node hangs: none gets further, within {seconds:.0f} s at most"
    return StageFailure(report.stage, what, LOOK, report.stage in OF_LINKS)


def _no_rendezvous(request: Request, report: Report, seconds: float) -> StageFailure:
    where = f"{request.address}:{request.port}"
    fix = f"run the doctor on every node at the same time, and check that all of them can reach {where} on node 0"
    if not report.missing:
        return StageFailure("rendezvous", f"nothing answered at {where} within {seconds:.0f} s", fix)
    nodes = sorted({rank // request.processes_per_node for rank in report.missing})
    ranks = f"rank{'s' * (len(report.missing) > 1)} {', '.join(map(str, report.missing))}"
    what = f"{ranks} on node {', '.join(map(str, nodes))} did not join within {seconds:.0f} s"
    return StageFailure("rendezvous", what, fix)
