"""What `recipes doctor` learns of the links between ranks: it holds a meeting of fresh processes and reads their notes.

Where the ranks cannot talk, the known switches are tried, each set in fresh processes, and the smallest that works is
the fix. Nothing here is ever set for a training.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from launch.doctor import machine
from launch.doctor.machine import ENLARGE, Check, Patient
from launch.doctor.network import (
    Link,
    Switch,
    bus_bandwidth,
    nccl_version,
    slowest_link,
    smallest_set,
    switches,
    topology,
)
from launch.doctor.ranks import LOOK, Report, hold, title, trouble_of
from launch.doctor.stages import STAGES

MOST_TRIES = 10  # sets of switches
_SLOW = {"nccl": 1.15, "gloo": 2.0}  # times the median; CPU cores are shared with whatever else runs
_ALONE = ("start", "device", "workers", "matmul")  # of one process, which talks to nobody
_TRIED = ("start", "device", "rendezvous", "connection", "all_reduce", "bandwidth", "end")


def examine(patient: Patient, sick: bool) -> Iterator[Check]:
    """The checks that need a meeting; `sick` where a check of this node has failed already, which the others hear."""
    if patient.hardware.cuda and patient.processes_per_node > len(patient.hardware.gpus):
        return
    stages = _ALONE if patient.processes == 1 else tuple(STAGES)
    reports = hold(patient, stages, sick=sick)
    for stage, read in READINGS.items():
        if all(stage in report.found for report in reports):
            check = read(patient, reports)
            if check:
                yield check
    trouble = trouble_of(patient, reports)
    if trouble:
        # A node that has a cross already may not come to another meeting; all know of it, and so none is held.
        sick_nodes = any(report.found.get("rendezvous", {}).get("sick_nodes") for report in reports)
        tries = trouble.of_link and (patient.nodes == 1 or not sick_nodes)
        fix = _remedy(patient) if tries else trouble.fix
        yield Check("error", title(trouble.stage), trouble.what, fix)


# --- Switches --------------------------------------------------------------------------------------------------------


def _remedy(patient: Patient) -> str:
    """The lines for the launcher's environment with which the ranks can talk, if there are any."""
    candidates, tried, alone = switches(patient.backend, _candidate_interfaces(patient)), 0, False

    def works(chosen: tuple[Switch, ...]) -> bool:
        nonlocal tried, alone
        if alone:
            return False
        tried += 1
        words = " ".join(f"{switch.name}={switch.value}" for switch in chosen)
        print(f"   trying {words} ({tried}, of {MOST_TRIES} at the most)", file=sys.stderr, flush=True)
        trouble = trouble_of(patient, hold(patient, _TRIED, chosen=chosen, attempt=tried))
        alone = trouble is not None and trouble.stage == "rendezvous"  # the other nodes have given up
        return trouble is None

    found = smallest_set(candidates, works, MOST_TRIES)
    if found is None:
        return f"none of the {tried} sets of switches that were tried helps; {LOOK}"
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))}
    now = f" (now: {' '.join(map('='.join, chosen.items()))})" if chosen else ""
    lines = [f"export {switch.name}={switch.value}  # costs: {switch.cost}" for switch in found]
    return "\n".join([f"with this in the launcher's environment{now} the ranks can talk:", *lines])


def _candidate_interfaces(patient: Patient) -> list[str]:
    """Networks to choose by name. Over several nodes the one that leads to node 0, so that all try as many sets."""
    found = interfaces()
    if patient.nodes == 1:
        return sorted(found, key=lambda name: name == "lo")
    return [name for name, address in found.items() if address == _own_address(patient)][:1]


def interfaces() -> dict[str, str]:
    """Names and IPv4 addresses of the network interfaces that are up."""
    import fcntl
    import struct

    get_address = 0x8915  # SIOCGIFADDR in linux/sockios.h
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                if Path(f"/sys/class/net/{name}/operstate").read_text().strip() in ("up", "unknown"):
                    answer = fcntl.ioctl(asking, get_address, struct.pack("256s", name.encode()[:15]))
                    found[name] = socket.inet_ntoa(answer[20:24])
            except OSError:  # it has no address
                continue
    return found


def _own_address(patient: Patient) -> str:
    """This node's address on the way to node 0. A datagram's socket that is connected sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((patient.address, patient.port))
        except OSError:
            return ""
        return asking.getsockname()[0]


# --- What the stages found -------------------------------------------------------------------------------------------

Reading = Callable[[Patient, list[Report]], Check | None]
READINGS: dict[str, Reading] = {}


def reading(function: Reading) -> Reading:
    """Makes it the reader of the stage of its name; None where there is nothing to say."""
    READINGS[function.__name__] = function
    return function


@reading
def start(patient: Patient, reports: list[Report]) -> Check:
    found = reports[0].found["start"]
    if patient.backend == "nccl" and found["nccl"]:
        return Check("ok", "NCCL", f"{nccl_version(found['nccl'])}, of torch {found['torch']}")
    return Check("ok", "gloo", f"of torch {found['torch']}")


@reading
def device(patient: Patient, reports: list[Report]) -> Check | None:
    if patient.backend != "nccl" or patient.processes_per_node == 1:
        return None
    pairs = _pairs()
    found = ", ".join(sorted(set(pairs.values()))) or "nvidia-smi does not say"
    closed = [report.rank for report in reports if report.found["device"]["no_peers"]]
    if closed and any(word.startswith("NV") for word in pairs.values()):
        what = f"{found}, but GPUs cannot reach each other's memory on ranks {', '.join(map(str, closed))}"
        return Check("warning", "topology", what, "NVLink is off: see `nvidia-smi nvlink -s`")
    return Check("ok", "topology", found + (", through the node's memory" if closed else ", GPU to GPU"))


@reading
def workers(patient: Patient, reports: list[Report]) -> Check:
    wrong = reports[0].found["workers"]["wrong"]
    if wrong:
        return Check("error", title("workers"), f"a worker cannot pass a tensor of 8 MiB: {wrong}", ENLARGE)
    return Check("ok", title("workers"), "a worker passes tensors through /dev/shm")


@reading
def rendezvous(patient: Patient, reports: list[Report]) -> Check:
    others = [node for node in reports[0].found["rendezvous"]["sick_nodes"] if node != patient.machine_rank]
    if others:
        what = f"node {', '.join(map(str, others))} has a cross of its own"
        return Check("error", "nodes", what, "see what the doctor says there")
    where = f" on {patient.nodes} nodes, at {patient.address}" if patient.nodes > 1 else ""
    return Check("ok", "rendezvous", f"{patient.processes} ranks{where}")


@reading
def all_reduce(patient: Patient, reports: list[Report]) -> Check:
    return Check("ok", title("all_reduce"), f"the sums are right on {patient.processes} ranks")


@reading
def bandwidth(patient: Patient, reports: list[Report]) -> Check:
    found, link = reports[0].found["bandwidth"], _link(patient)
    reached = bus_bandwidth(found["bytes"], found["seconds"], patient.processes)
    words = f"{reached / 1e9:,.2f} GB/s of all-reduce bus bandwidth over {link}"
    if link.is_far_above(reached):
        return Check("warning", "bandwidth", f"{words}: far below it", "NCCL_DEBUG=INFO shows the way NCCL takes")
    return Check("ok", "bandwidth", words)


@reading
def latency(patient: Patient, reports: list[Report]) -> Check:
    return Check("ok", "latency", f"{reports[0].found['latency']['seconds'] * 1e6:,.0f} us for the smallest all-reduce")


@reading
def ddp_step(patient: Patient, reports: list[Report]) -> Check:
    return Check("ok", title("ddp_step"), "the same weights on every rank afterwards")


@reading
def matmul(patient: Patient, reports: list[Report]) -> Check:
    found = reports[0].found["matmul"]
    seconds = found["seconds"]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    times = seconds[slowest] / sorted(seconds)[(len(seconds) - 1) // 2]
    speed = f"{found['flops'] / seconds[slowest] / 1e9:,.0f} GFLOP/s in {found['dtype']}"
    words = f"{speed} on the slowest of {len(seconds)}, {times:.2f} times the median's time"
    if times > _SLOW[patient.backend]:
        node, local_rank = divmod(slowest, patient.processes_per_node)
        where = f"rank {slowest}, {'GPU' if patient.hardware.cuda else 'process'} {local_rank} of node {node}"
        look = "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE`" if patient.hardware.cuda else "`top`"
        fix = f"every step waits for it: see {look}, and what else runs there"
        return Check("warning", title("matmul"), f"{where}: {words}", fix)
    return Check("ok", title("matmul"), words)


def _pairs() -> dict[tuple[int, int], str]:
    return topology(machine.nvidia_smi("topo", "-m")[0])


def _link(patient: Patient) -> Link:
    """What the ranks talk over."""
    if patient.nodes == 1:
        if patient.backend == "nccl":
            return slowest_link(_pairs().values(), patient.hardware.capability, machine.pcie())
        return Link("loopback, which has no rated speed")
    rates: list[float] = [_number(file) for file in Path("/sys/class/infiniband").glob("*/ports/*/rate")]
    if patient.backend == "nccl" and any(rates):
        return Link("InfiniBand or RoCE", sum(rates) * 1e9 / 8)  # "200 Gb/sec (4X HDR)", for each port
    own = _own_address(patient)
    name = next((name for name, address in interfaces().items() if address == own), "an unknown network")
    speed = _number(Path(f"/sys/class/net/{name}/speed"))  # in Mbit/s; -1 where the driver does not know
    return Link(name, speed * 1e6 / 8 if speed > 0 else None)


def _number(file: Path) -> float:
    try:
        return float(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
