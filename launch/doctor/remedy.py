"""After a failure between ranks, `recipes doctor` tries the same run again, then known switches.

A switch is an environment variable of NCCL or gloo. The first set of switches that works is the
fix, if the ranks fail again without this set. The doctor never sets a switch for a training. All
nodes try the same set at the same time.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from launch.doctor.machine import Check, Request
from launch.doctor.network import Meeting, failed_elsewhere, interfaces, own_interface
from launch.doctor.probe import OF_LINKS, OF_ONE, STAGES, StageFailure, probe_run

_LATER = 5  # seconds after --timeout in which another node's probe run may still end
Switches = tuple[tuple[str, str], ...]  # variables and their values

# Sources of the names: NVIDIA's NCCL documentation, "Environment Variables"; documentation of
# torch.distributed, "Choosing the network interface".
_P2P, _IB, _SHM = ("NCCL_P2P_DISABLE", "1"), ("NCCL_IB_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")
_NVLS = ("NCCL_NVLS_ENABLE", "0")
_EFFECTS = {
    "NCCL_P2P_DISABLE": "turns off NVLink and direct PCIe: GPUs exchange data in host memory",
    "NCCL_IB_DISABLE": "turns off InfiniBand and RoCE: nodes use TCP, often at a tenth of the speed",
    "NCCL_SHM_DISABLE": "turns off shared memory: ranks use the network if they cannot reach each other's GPUs",
    "NCCL_NVLS_ENABLE": "turns off sums inside NVSwitch: all-reduce on one node of H100s or newer is slower",
}
_INTERFACE = "uses only this network interface, which costs nothing if it is the node's fastest"


def switch_sets(request: Request) -> list[Switches]:
    """Return the sets of switches that have helped somebody, in the order in which to try them.

    With several nodes, try one interface (to node 0), so that all nodes try equally many sets.
    """
    names = sorted(interfaces(), key=lambda name: name == "lo")
    if request.nodes > 1:
        names = [own_interface(request)[1]]
    sockets: list[Switches] = [((f"{request.backend.upper()}_SOCKET_IFNAME", name),) for name in names]
    if request.backend == "gloo":
        return sockets
    # github.com/NVIDIA/nccl-tests/issues/216: eight H100s hung, and only this switch helped.
    first: list[Switches] = [(_NVLS,)] if request.hardware.capability >= (9, 0) else []
    infiniband: list[Switches] = [(_IB,)] if request.nodes > 1 or Path("/sys/class/infiniband").is_dir() else []
    return [*first, (_P2P,), *infiniband, *sockets, (_P2P, _SHM, _IB)]


def examine(meeting: Meeting, earlier: list[Check]) -> Iterator[Check]:
    """Yield the checks that need ranks, unless an earlier check shows that no rank can start."""
    if any(check.fatal for check in earlier):
        return
    attempts = _Attempts(meeting, OF_ONE if meeting.request.processes == 1 else STAGES)
    checks, own = probe_run(meeting.request, attempts.stages, meeting.port)
    yield from checks
    first = attempts.worst(own, any(check.status == "error" for check in earlier))
    if first:
        yield attempts.diagnosed(first)
    elif attempts.failed:
        yield Check("error", "nodes", *failed_elsewhere(attempts.failed))


@dataclass
class _Attempts:
    """Further probe runs, while time is left. `failed`: other nodes that report a failed check."""

    meeting: Meeting
    stages: tuple[str, ...]
    failed: list[int] = field(default_factory=list)

    def worst(self, own: StageFailure | None, failed: bool = False) -> StageFailure | None:
        """Exchange the nodes' failures (`own` is this node's). Return the failure that explains the
        others, if any: first a rank that was killed from outside, then the failure at the earliest
        stage, and last a failure that is only `by_another`.
        """
        this, later = self.meeting.request.machine_rank, max(0.0, self.meeting.request.seconds_left) + _LATER
        said = self.meeting.exchange(later, failure=own and asdict(own), failed=failed)
        self.failed = [node for node, one in enumerate(said) if one and one["failed"] and node != this]
        gone = StageFailure("rendezvous", "stopped answering", "read the doctor's output on that node", by_another=True)
        failures = []
        for node, one in enumerate(said):
            if one is None or one["failure"]:
                failure = StageFailure(**one["failure"]) if one else gone
                failures.append(failure if node == this else replace(failure, what=f"on node {node}: {failure.what}"))
        return min(failures, key=lambda one: (one.by_another, not one.by_signal, STAGES.index(one.stage)), default=None)

    def run(self, words: str, chosen: Switches = ()) -> StageFailure | None:
        """Print `words`, probe with the switches `chosen`, return the worst failure on any node."""
        print(f"   {words}", file=sys.stderr, flush=True)
        return self.worst(probe_run(self.meeting.request, self.stages, self.meeting.port, chosen)[1])

    def diagnosed(self, first: StageFailure) -> Check:
        request = self.meeting.request
        if request.seconds_left <= 0 or not (first.stage in OF_LINKS or first.by_signal):
            return first.check()
        # Leave out the measurements, unless one of them failed.
        needed = {"start", "rendezvous", "connection", "end", first.stage}
        self.stages = tuple(stage for stage in self.stages if stage in needed)
        again = self.run("trying the same run again")
        if again is None:
            fix = "run the doctor again a few times: even a rare failure can end a training; see also `dmesg`"
            return replace(first, what=f"failed 1 of 2 tries: {first.what}").check(fix)
        if request.seconds_left <= 0:
            return first.check(f"{first.fix}; with --timeout {4 * request.timeout} the doctor can try other fixes")
        return again.check(self.remedy(again.fix) if again.stage in OF_LINKS and not again.by_signal else "")

    def remedy(self, cause: str) -> str:
        """Return `export` lines that let the ranks communicate, or the reason to give none."""
        request, tried, sets = self.meeting.request, 0, switch_sets(self.meeting.request)
        while tried < len(sets) and request.seconds_left > 0:
            switches, tried = sets[tried], tried + 1
            if self.run(f"trying {' '.join(map('='.join, switches))} ({tried} of at most {len(sets)})", switches):
                continue
            if request.seconds_left > 0 and self.run("trying without these variables once more") is None:
                return f"the ranks fail only now and then, so no NCCL or gloo variable is a fix; {cause}"
            chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))}
            now = f" (now: {' '.join(map('='.join, chosen.items()))})" if chosen else ""
            lines = [f"export {name}={value}  # {_EFFECTS.get(name, _INTERFACE)}" for name, value in switches]
            return "\n".join([f"add this to the launcher's environment{now} to let the ranks communicate:", *lines])
        ended = "" if request.seconds_left > 0 else f", and the time is up (use --timeout {4 * request.timeout})"
        return f"none of the {tried} sets of NCCL or gloo variables helped{ended}; {cause}"
