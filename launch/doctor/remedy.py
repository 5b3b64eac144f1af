"""What `recipes doctor` tries after a failure between ranks: the same again, then known switches.

The smallest set of switches that works is the fix, if without it the ranks fail again. It never
sets one for a training. All nodes try the same at the same time.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from launch.doctor.check import Check, Request
from launch.doctor.failures import LOOK, StageFailure, failure_in, kernel_kills
from launch.doctor.meeting import Meeting
from launch.doctor.network import Switch, infiniband_devices, interfaces, smallest_set, switches
from launch.doctor.ranks import OF_LINKS, STAGES_OF_ONE, probe_run, title
from launch.doctor.stages import STAGES

MOST_TRIES = 10  # sets of switches
_ONLY_MEASURE = ("bandwidth", "sweep", "latency")
_OTHERS_LATER = 5  # seconds that another node's probe run may end after this one's, beside --timeout


def diagnosed(meeting: Meeting, failure: StageFailure | None) -> Check | None:
    """What to say of a probe run, None if it succeeded on every node."""
    attempts = _Attempts(meeting)
    everywhere = attempts.everywhere(failure)
    if all(one is None for one in everywhere):
        return None
    if meeting.request.seconds_left <= 0 or not all(one is None or one["again"] for one in everywhere):
        return _check(meeting.request, failure, everywhere)
    return attempts.diagnosed(failure, everywhere)


def _up_to(failed: set[str], processes: int) -> tuple[str, ...]:
    """The stages that show whether these fail again: what was measured before is left out."""
    order = list(STAGES if processes > 1 else STAGES_OF_ONE)
    last = max(order.index(stage) for stage in failed)
    needed = ("start", "device", "rendezvous", *OF_LINKS)
    before = [stage for stage in order[:last] if stage in needed and stage not in _ONLY_MEASURE]
    rest = ["rendezvous", "connection", "end"] if processes > 1 else []
    return tuple(dict.fromkeys([*before, order[last], *rest]))


def _check(request: Request, failure: StageFailure | None, everywhere: list[dict | None], fix: str = "") -> Check:
    """The failure of this node, or that of another, where one can read more of it."""
    if failure:
        return Check("error", title(failure.stage), failure.what, fix or failure.fix)
    node, other = next((node, one) for node, one in enumerate(everywhere) if one)
    return Check("error", title(other["stage"]), f"on node {node}: {other['what']}", fix or other["fix"])


@dataclass
class _Attempts:
    """Further probe runs, as many as the time allows."""

    meeting: Meeting
    count: int = 0
    stages: tuple[str, ...] = ()

    @property
    def request(self) -> Request:
        return self.meeting.request

    def everywhere(self, failure: StageFailure | None) -> list[dict | None]:
        """The failures of all nodes, by their numbers."""
        own = failure and {
            "stage": failure.stage,
            "what": failure.what,
            "fix": failure.fix,
            "again": failure.of_link or failure.by_signal,
            "of_link": failure.of_link,
        }
        said = self.meeting.exchange(max(0.0, self.request.seconds_left) + _OTHERS_LATER, failure=own)
        gone = {"stage": "rendezvous", "what": "does not answer any more", "again": False, "of_link": False}
        gone["fix"] = "see what the doctor says there"
        return [one.get("failure") if one else gone for one in said]

    def run(self, words: str, chosen: tuple[Switch, ...] = ()) -> StageFailure | None:
        """One more probe run, with what is set for it in words for the user."""
        print(f"   {words}", file=sys.stderr, flush=True)
        self.count += 1
        before = kernel_kills()
        reports = probe_run(self.request, self.stages, chosen=chosen, attempt=self.count)
        return failure_in(self.request, reports, kernel_kills() - before)

    def diagnosed(self, failure: StageFailure | None, first: list[dict | None]) -> Check:
        request = self.request
        self.stages = _up_to({one["stage"] for one in first if one}, request.processes)
        again = self.run("trying the same again")
        second = self.everywhere(again)
        if all(one is None for one in second):
            check = _check(request, failure, first)
            fix = "run it again some times: what fails now and then will end a training too; `dmesg` may show why"
            return Check("error", check.title, f"failed once of two: {check.found}", fix)
        if request.seconds_left <= 0:
            fix = f"{failure.fix if failure else LOOK}; --timeout {4 * request.timeout} leaves time to try switches"
            return _check(request, failure, first, fix)
        # A rank that is killed or stopped needs no switch.
        if any(one is not None and not one["of_link"] for one in second):
            return _check(request, again, second)
        return _check(request, again, second, self.remedy(second))

    def remedy(self, without: list[dict | None]) -> str:
        """Lines for the launcher's environment that let the ranks communicate, if any do."""
        request, tried, intermittent = self.request, 0, False

        def works(chosen: tuple[Switch, ...]) -> bool:
            nonlocal tried
            if request.seconds_left <= 0:
                return False
            settings = " ".join(f"{switch.name}={switch.value}" for switch in chosen)
            words = f"trying {settings} ({tried + 1} of at most {MOST_TRIES})"
            failed = self.everywhere(self.run(words, chosen=chosen))
            tried += request.seconds_left > 0
            return all(one is None for one in failed)

        candidates = switches(request.backend, _candidate_interfaces(request), infiniband_devices())
        smallest = smallest_set(candidates, works, MOST_TRIES)
        if smallest and request.seconds_left > 0:
            last = self.everywhere(self.run("trying without it once more"))
            intermittent = request.seconds_left > 0 and all(one is None for one in last)
        cause = next(one["fix"] for one in without if one)
        if intermittent:
            return f"it fails now and then, with or without a switch: no switch is the fix; {cause}"
        if smallest is None:
            ended = f", and the time is up (--timeout {4 * request.timeout})" if request.seconds_left <= 0 else ""
            return f"none of the {tried} sets of switches helped{ended}; {cause}"
        chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))}
        now = f" (now: {' '.join(map('='.join, chosen.items()))})" if chosen else ""
        lines = [f"export {switch.name}={switch.value}  # costs: {switch.cost}" for switch in smallest]
        return "\n".join([f"with this in the launcher's environment{now} the ranks can communicate:", *lines])


def _candidate_interfaces(request: Request) -> list[str]:
    """The networks to try.

    Over several nodes only the one that leads to node 0, so that all try as many sets.
    """
    addresses = interfaces()
    if request.nodes == 1:
        return sorted(addresses, key=lambda name: name == "lo")
    return [name for name, address in addresses.items() if address == own_address(request)][:1]


def own_address(request: Request) -> str:
    """This node's address on its way to node 0, "" if unknown.

    Connecting a UDP socket sends no packet.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((request.address, request.port))
        except OSError:
            return ""
        return asking.getsockname()[0]
