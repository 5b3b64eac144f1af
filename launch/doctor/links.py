"""The checks of `recipes doctor` on the links between ranks, read from the notes of a probe run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from launch.doctor import gpus, measured, smi
from launch.doctor.check import Check, Numbers, Request, numbers
from launch.doctor.failures import failure_in, kernel_kills
from launch.doctor.host import ENLARGE
from launch.doctor.meeting import Meeting
from launch.doctor.network import (
    Link,
    bus_bandwidth,
    infiniband_speed,
    interface_speed,
    interfaces,
    nccl_version,
    slowest_link,
    topology,
)
from launch.doctor.ranks import STAGES_OF_ONE, Report, probe_run, title
from launch.doctor.remedy import diagnosed, own_address
from launch.doctor.stages import STAGES
from recipes.errors import Failure

_SLOW = {"nccl": 1.15, "gloo": 2.0}  # times the median's time; CPU cores are shared with whatever else runs


def examine(request: Request, failed: bool, meeting: Meeting) -> Iterator[Check]:
    """The checks that need a probe run.

    `failed` if a check of this node has failed, which the probe run tells the other nodes.
    """
    if request.hardware.cuda and request.processes_per_node > len(request.hardware.gpus):
        return
    stages = STAGES_OF_ONE if request.processes == 1 else tuple(STAGES)
    killed_before = kernel_kills()
    reports = probe_run(request, stages, failed=failed)
    for stage, read in READINGS.items():
        if all(stage in report.results for report in reports):
            check = read(request, reports)
            if check:
                yield check
    failure = failure_in(request, reports, kernel_kills() - killed_before)
    found = diagnosed(meeting, failure)
    if found:
        yield found


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
def all_gather(request: Request, reports: list[Report]) -> Check:
    return Check("ok", "sharding", "reduce-scatter and all-gather, as in ZeRO and FSDP, are right")


@reading
def sweep(request: Request, reports: list[Report]) -> Check:
    """Bus bandwidth as nccl-tests counts it, so that collectives and sizes can be compared."""
    known, words = numbers(), []
    for one in reports[0].results["sweep"]["sizes"]:
        reached = bus_bandwidth(one["bytes"], one["seconds"], request.processes)
        reached /= 1 if one["collective"] == "all-reduce" else 2
        known |= numbers(**{f"{one['collective']} of {one['bytes']} bytes": (reached, "bytes/s")})
        words.append(f"{one['collective']} {reached / 1e9:,.2f}")
    largest = max(one["bytes"] for one in reports[0].results["sweep"]["sizes"])
    return Check("ok", "sizes", f"at {largest >> 20} MiB, in GB/s: {', '.join(words[-3:])}", numbers=known)


@reading
def bandwidth(request: Request, reports: list[Report]) -> Check:
    result, link = reports[0].results["bandwidth"], _link(request)
    reached = bus_bandwidth(result["bytes"], result["seconds"], request.processes)
    known = numbers(bus_bandwidth=(reached, "bytes/s"))
    text = f"{reached / 1e9:,.2f} GB/s of all-reduce bus bandwidth over {link}"
    if link.is_far_above(reached):
        fix = "NCCL_DEBUG=INFO shows which links NCCL uses"
        return Check("warning", "bandwidth", f"{text}: far below its speed", fix, known)
    return Check("ok", "bandwidth", text, numbers=known)


@reading
def latency(request: Request, reports: list[Report]) -> Check:
    seconds = reports[0].results["latency"]["seconds"]
    what = f"{seconds * 1e6:,.0f} us for the smallest all-reduce"
    return Check("ok", "latency", what, numbers=numbers(all_reduce=(seconds, "s")))


@reading
def ddp_step(request: Request, reports: list[Report]) -> Check:
    kinds = reports[0].results["ddp_step"]["dtypes"]
    return Check("ok", title("ddp_step"), f"equal weights on every rank afterwards, in {' and '.join(kinds)}")


@reading
def matmul(request: Request, reports: list[Report]) -> Check:
    result = reports[0].results["matmul"]
    seconds = result["seconds"]
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    times = seconds[slowest] / sorted(seconds)[(len(seconds) - 1) // 2]
    known = numbers(slowest=(result["flops"] / seconds[slowest], "FLOP/s"), of_median=(times, "times"))
    speed = f"{result['flops'] / seconds[slowest] / 1e9:,.0f} GFLOP/s in {result['dtype']}"
    text = f"{speed} on the slowest of {len(seconds)}, {times:.2f} times the median's time"
    if times > _SLOW[request.backend]:
        node, local_rank = divmod(slowest, request.processes_per_node)
        where = f"rank {slowest}, {'GPU' if request.hardware.cuda else 'process'} {local_rank} of node {node}"
        look = "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE`" if request.hardware.cuda else "`top`"
        fix = f"every step waits for it: see {look}, and what else runs there"
        return Check("warning", title("matmul"), f"{where}: {text}", fix, known)
    return Check("ok", title("matmul"), text, numbers=known)


@reading
def adam(request: Request, reports: list[Report]) -> Check:
    """The time of the whole node: its ranks update at the same time."""
    seconds = measured.adam_seconds([report.results["adam"] for report in reports])
    what = f"{seconds * 1e9:.2f} s for a billion parameters on all cores of this node"
    return Check("ok", title("adam"), what, numbers=numbers(update=(seconds, "s/parameter")))


@reading
def pcie(request: Request, reports: list[Report]) -> Check | None:
    if not request.hardware.cuda:
        return None
    speeds = [report.results["pcie"] for report in reports]
    to, back = (min(speed[name] for speed in speeds) for name in ("to", "from"))
    adam = measured.adam_seconds([report.results["adam"] for report in reports])
    what = f"{to / 1e9:,.1f} GB/s to each GPU and {back / 1e9:,.1f} GB/s from it, all at once"
    card, count = request.hardware.gpus[0].name, request.processes_per_node
    known = numbers(to_gpu=(to, "bytes/s"), from_gpu=(back, "bytes/s"))
    return _kept(title("pcie"), what, lambda: measured.keep_host(card, count, adam, min(to, back)), known)


@reading
def context(request: Request, reports: list[Report]) -> Check | None:
    if not request.hardware.cuda:
        return None
    sizes = [size for report in reports if (size := report.results["context"]["bytes"])]
    if not sizes:
        return Check("ok", title("context"), "unknown: other processes use the GPU, or nvidia-smi does not show them")
    card, several = request.hardware.gpus[0].name, request.processes > 1
    what = f"{max(sizes) / 2**20:,.0f} MiB of the GPU beside what torch reserves"
    known = numbers(context=(max(sizes), "bytes"))
    return _kept(title("context"), what, lambda: measured.keep_context(card, several, max(sizes)), known)


def _kept(title: str, what: str, keep: Callable[[], None], known: Numbers) -> Check:
    """A finding that the next plan on this machine uses, if it can be kept."""
    try:
        keep()
    except Failure as error:
        return Check("warning", title, f"{what}; {error}", "HF_HOME with a writable folder, for the next plan", known)
    return Check("ok", title, f"{what}; kept for `recipes plan`", numbers=known)


def _pairs() -> dict[tuple[int, int], str]:
    return topology(smi.nvidia_smi("topo", "-m")[0])


def _link(request: Request) -> Link:
    """What the ranks communicate over."""
    if request.nodes == 1:
        if request.backend == "nccl":
            return slowest_link(_pairs().values(), request.hardware.capability, gpus.pcie())
        return Link("loopback, which has no rated speed")
    infiniband = infiniband_speed()
    if request.backend == "nccl" and infiniband:
        return Link("InfiniBand or RoCE", infiniband)
    own = own_address(request)
    name = next((name for name, address in interfaces().items() if address == own), "an unknown network")
    return Link(name, interface_speed(name))
