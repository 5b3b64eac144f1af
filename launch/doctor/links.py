"""The checks of `recipes doctor` on the links between ranks, read from the notes of a probe run.

If the ranks cannot communicate, it tries the known switches, each set in fresh processes, and the
smallest set that works is the fix. It never sets one for a training.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator

from launch.doctor import machine
from launch.doctor.machine import ENLARGE, Check, Request
from launch.doctor.network import (
    Link,
    Switch,
    bus_bandwidth,
    infiniband_speed,
    interface_speed,
    interfaces,
    nccl_version,
    slowest_link,
    smallest_set,
    switches,
    topology,
)
from launch.doctor.ranks import LOOK, Report, failure_in, probe_run, title
from launch.doctor.stages import STAGES

MOST_TRIES = 10  # sets of switches
_SLOW = {"nccl": 1.15, "gloo": 2.0}  # times the median's time; CPU cores are shared with whatever else runs
_STAGES_OF_ONE = ("start", "device", "workers", "matmul")  # for a single process, which communicates with no other
_STAGES_OF_A_TRY = ("start", "device", "rendezvous", "connection", "all_reduce", "bandwidth", "end")


def examine(request: Request, failed: bool) -> Iterator[Check]:
    """The checks that need a probe run.

    `failed` if a check of this node has failed, which the probe run tells the other nodes.
    """
    if request.hardware.cuda and request.processes_per_node > len(request.hardware.gpus):
        return
    stages = _STAGES_OF_ONE if request.processes == 1 else tuple(STAGES)
    reports = probe_run(request, stages, failed=failed)
    for stage, read in READINGS.items():
        if all(stage in report.results for report in reports):
            check = read(request, reports)
            if check:
                yield check
    failure = failure_in(request, reports)
    if failure:
        # A node with a failed check may not join another probe run: then all nodes skip the tries.
        failed_nodes = any(report.results.get("rendezvous", {}).get("failed_nodes") for report in reports)
        tries = failure.of_link and (request.nodes == 1 or not failed_nodes)
        fix = _remedy(request) if tries else failure.fix
        yield Check("error", title(failure.stage), failure.what, fix)


# --- Switches -------------------------------------------------------------------------------------


def _remedy(request: Request) -> str:
    """Lines for the launcher's environment that let the ranks communicate, if any do."""
    candidates, tried, alone = switches(request.backend, _candidate_interfaces(request)), 0, False

    def works(chosen: tuple[Switch, ...]) -> bool:
        nonlocal tried, alone
        if alone:
            return False
        tried += 1
        settings = " ".join(f"{switch.name}={switch.value}" for switch in chosen)
        print(f"   trying {settings} ({tried} of at most {MOST_TRIES})", file=sys.stderr, flush=True)
        failure = failure_in(request, probe_run(request, _STAGES_OF_A_TRY, chosen=chosen, attempt=tried))
        alone = failure is not None and failure.stage == "rendezvous"  # the other nodes have given up
        return failure is None

    smallest = smallest_set(candidates, works, MOST_TRIES)
    if smallest is None:
        return f"none of the {tried} sets of switches helped; {LOOK}"
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
    return [name for name, address in addresses.items() if address == _own_address(request)][:1]


def _own_address(request: Request) -> str:
    """This node's address on its way to node 0, "" if unknown.

    Connecting a UDP socket sends no packet.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((request.address, request.port))
        except OSError:
            return ""
        return asking.getsockname()[0]


# --- A check for each stage -----------------------------------------------------------------------

Reading = Callable[[Request, list[Report]], Check | None]
READINGS: dict[str, Reading] = {}


def reading(function: Reading) -> Reading:
    """Register the reader of the stage of the same name.

    It returns None if there is nothing to say.
    """
    READINGS[function.__name__] = function
    return function


@reading
def start(request: Request, reports: list[Report]) -> Check:
    torch = reports[0].results["start"]
    if request.backend == "nccl" and torch["nccl"]:
        return Check("ok", "NCCL", f"{nccl_version(torch['nccl'])}, from torch {torch['torch']}")
    return Check("ok", "gloo", f"from torch {torch['torch']}")


@reading
def device(request: Request, reports: list[Report]) -> Check | None:
    if request.backend != "nccl" or request.processes_per_node == 1:
        return None
    pairs = _pairs()
    kinds = ", ".join(sorted(set(pairs.values()))) or "unknown, because nvidia-smi does not show it"
    closed = [report.rank for report in reports if report.results["device"]["no_peers"]]
    if closed and any(word.startswith("NV") for word in pairs.values()):
        what = f"{kinds}, but GPUs cannot reach each other's memory on ranks {', '.join(map(str, closed))}"
        return Check("warning", "topology", what, "NVLink is off: see `nvidia-smi nvlink -s`")
    return Check("ok", "topology", kinds + (", through the node's memory" if closed else ", GPU to GPU"))


@reading
def workers(request: Request, reports: list[Report]) -> Check:
    wrong = reports[0].results["workers"]["wrong"]
    if wrong:
        return Check("error", title("workers"), f"a worker cannot pass a tensor of 8 MiB: {wrong}", ENLARGE)
    return Check("ok", title("workers"), "a worker passes tensors through /dev/shm")


@reading
def rendezvous(request: Request, reports: list[Report]) -> Check:
    others = [node for node in reports[0].results["rendezvous"]["failed_nodes"] if node != request.machine_rank]
    if others:
        nodes = ", ".join(map(str, others))
        which = f"node {nodes}" if len(others) == 1 else f"each of the nodes {nodes}"
        return Check("error", "nodes", f"{which} failed a check", f"run `recipes doctor` on {which}")
    where = f" on {request.nodes} nodes, at {request.address}" if request.nodes > 1 else ""
    return Check("ok", "rendezvous", f"{request.processes} ranks{where}")


@reading
def all_reduce(request: Request, reports: list[Report]) -> Check:
    return Check("ok", title("all_reduce"), f"the sums are right on {request.processes} ranks")


@reading
def bandwidth(request: Request, reports: list[Report]) -> Check:
    result, link = reports[0].results["bandwidth"], _link(request)
    reached = bus_bandwidth(result["bytes"], result["seconds"], request.processes)
    text = f"{reached / 1e9:,.2f} GB/s of all-reduce bus bandwidth over {link}"
    if link.is_far_above(reached):
        fix = "NCCL_DEBUG=INFO shows which links NCCL uses"
        return Check("warning", "bandwidth", f"{text}: far below its speed", fix)
    return Check("ok", "bandwidth", text)


@reading
def latency(request: Request, reports: list[Report]) -> Check:
    return Check(
        "ok", "latency", f"{reports[0].results['latency']['seconds'] * 1e6:,.0f} us for the smallest all-reduce"
    )


@reading
def ddp_step(request: Request, reports: list[Report]) -> Check:
    return Check("ok", title("ddp_step"), "equal weights on every rank afterwards")


@reading
def matmul(request: Request, reports: list[Report]) -> Check:
    result = reports[0].results["matmul"]
    seconds = result["seconds"]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    times = seconds[slowest] / sorted(seconds)[(len(seconds) - 1) // 2]
    speed = f"{result['flops'] / seconds[slowest] / 1e9:,.0f} GFLOP/s in {result['dtype']}"
    text = f"{speed} on the slowest of {len(seconds)}, {times:.2f} times the median's time"
    if times > _SLOW[request.backend]:
        node, local_rank = divmod(slowest, request.processes_per_node)
        where = f"rank {slowest}, {'GPU' if request.hardware.cuda else 'process'} {local_rank} of node {node}"
        look = "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE`" if request.hardware.cuda else "`top`"
        fix = f"every step waits for it: see {look}, and what else runs there"
        return Check("warning", title("matmul"), f"{where}: {text}", fix)
    return Check("ok", title("matmul"), text)


def _pairs() -> dict[tuple[int, int], str]:
    return topology(machine.nvidia_smi("topo", "-m")[0])


def _link(request: Request) -> Link:
    """What the ranks communicate over."""
    if request.nodes == 1:
        if request.backend == "nccl":
            return slowest_link(_pairs().values(), request.hardware.capability, machine.pcie())
        return Link("loopback, which has no rated speed")
    infiniband = infiniband_speed()
    if request.backend == "nccl" and infiniband:
        return Link("InfiniBand or RoCE", infiniband)
    own = _own_address(request)
    name = next((name for name, address in interfaces().items() if address == own), "an unknown network")
    return Link(name, interface_speed(name))
