"""The faults: how each is made in namespaces of its own, how it is named, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass, replace

FROM_FIX = "the commands of the fix"
NOT_HERE = "not here"  # what mends it needs another machine


@dataclass(frozen=True)
class Fault:
    """`made`: bash lines before the doctor, as root in fresh network, mount and process namespaces.

    The check `title` must say `says`, its fix must match `fix` (regular expressions). `mend`: bash
    lines that apply that fix, by default those that the fix itself prints. `strike`: a signal that
    rank 1 gets in the stage `connection`, in the first probe run only if `once`.
    """

    name: str
    made: str
    title: str
    says: str
    fix: str
    mend: str = FROM_FIX
    words: str = ""
    status: str = "error"
    strike: str = ""
    once: bool = False


UP = "ip link set lo up"
SHM = "mount -t tmpfs -o size=4g tmpfs /dev/shm"
GPUS = f"{UP}; export LD_LIBRARY_PATH=$STAND/cuda PATH=$STAND/smi:$PATH"
BARE_DEV = """mkdir $S/dev; mount -t tmpfs tmpfs $S/dev
for name in null zero random urandom; do touch $S/dev/$name; mount --bind /dev/$name $S/dev/$name; done
mount --rbind $S/dev /dev"""
SMALL = "mkdir -p $S/small; mount -t tmpfs -o size=64k tmpfs $S/small"
WORLD = "--nodes 2 --num_processes 2 --main_process_ip 10.9.0.1 --main_process_port 29400"
# Two nodes: a second network namespace at the end of a cable. $OTHER runs a command there.
TWO = f"""{UP}
unshare -n sleep 1000 & other=$!
sleep 0.3; OTHER="nsenter -t $other -n"
ip link add cable0 mtu 9000 type veth peer name cable1 netns $other; ip link set cable0 gso_max_segs 1
$OTHER ip link set lo up; $OTHER ip link set cable1 mtu 9000; $OTHER ip link set cable1 gso_max_segs 1
ip addr add 10.9.0.1/24 dev cable0; ip link set cable0 up
$OTHER ip addr add 10.9.0.2/24 dev cable1; $OTHER ip link set cable1 up
export GLOO_SOCKET_IFNAME=cable0
"""
JOIN = f"(sleep 1; GLOO_SOCKET_IFNAME=cable1 $OTHER $DOCTOR {WORLD} --machine_rank 1 >$S/other.json 2>&1) &"


def dropped(device: str, longer_than: int) -> str:
    """Packets longer than this are lost without a word, as where a tunnel is narrower.

    On the wire there are no packets of many segments, so there are none here.
    """
    program = f"4,128 0 0 0,53 0 1 {longer_than + 15},6 0 0 2,6 0 0 0"
    single = f"ip link set {device} gso_max_segs 1"
    return f"{single}; tc qdisc add dev {device} clsact; tc filter add dev {device} egress bpf bytecode '{program}' da"


def filtered(device: str, first: int, last: int) -> str:
    """New TCP connections to these ports get no answer."""
    program = (
        f"8,48 0 0 47,84 0 0 18,21 0 4 2,40 0 0 36,53 0 2 {first},37 1 0 {last},6 0 0 2,6 0 0 0"  # SYN without ACK
    )
    return f"tc qdisc add dev {device} clsact; tc filter add dev {device} egress bpf bytecode '{program}' da"


def between_nodes(name: str, made: str, title: str, says: str, fix: str, mend: str, words: str = WORLD) -> Fault:
    """A fault of two nodes, as node 0 sees it unless `words` say otherwise."""
    rank = "" if "--machine_rank" in words else " --machine_rank 0"
    return Fault(name, f"{TWO}{made}", title, says, fix, mend, f"{words}{rank}")


def struck(name: str, strike: str, says: str, fix: str) -> Fault:
    """A rank that a signal strikes in every probe run; nothing strikes it when its fix is tried."""
    return Fault(name, UP, "connection", says, fix, mend=UP, strike=strike)


def struck_once(name: str, strike: str) -> Fault:
    return replace(struck(name, strike, "once of two", "again"), once=True)


def shm(name: str, made: str, says: str, fix: str) -> Fault:
    return Fault(name, f"{UP}; {made}", "/dev/shm", says, fix)


def hf_home(name: str, made: str, says: str) -> Fault:
    return Fault(name, f"{UP}; {made}", "HF_HOME", says, "HF_HOME", mend="export HF_HOME=$S/hf")


def smi(name: str, stand_in: str, says: str, fix: str, title: str = "driver") -> Fault:
    """Another nvidia-smi comes first on PATH of a machine without GPUs."""
    made = f"{UP}; export PATH=$STAND/{stand_in}:$PATH"
    return Fault(name, made, title, says, fix, mend="export PATH=${PATH#*:}")


def with_gpus(name: str, made: str, title: str, says: str, fix: str) -> Fault:
    return Fault(name, f"{GPUS}; {made}", title, says, fix, mend=NOT_HERE)


def package(name: str, stand_in: str, title: str, says: str, fix: str, status: str = "error") -> Fault:
    """Another package comes first on PYTHONPATH."""
    made = f"{UP}; export PYTHONPATH=$STAND/{stand_in}:$PYTHONPATH"
    return Fault(name, made, title, says, fix, mend="export PYTHONPATH=${PYTHONPATH#*:}", status=status)


def limit(name: str, made: str, title: str, says: str, fix: str, status: str = "error") -> Fault:
    return Fault(name, f"{UP}; ulimit -S {made}", title, says, f"ulimit -S {fix}", status=status)


ALL_PORTS, SOME_PORTS = (filtered("lo", first, 65535) for first in (1, 40000))
FULL_SHM = "mount -t tmpfs -o size=32m tmpfs /dev/shm; head -c 40m /dev/zero >/dev/shm/full || true"
READ_ONLY = f"{SMALL}; mount -o remount,ro $S/small"
UNKNOWN, OF_ANOTHER = (WORLD.replace("10.9.0.1", other) for other in ("no-such-node.invalid", "10.9.0.2"))
PORT_IN_USE = f"{JOIN}\npython3 -m http.server 29400 >/dev/null 2>&1 & sleep 1"
NARROW, BLOCKED = f"{dropped('cable0', 1500)}\n{JOIN}", f"{filtered('cable0', 32768, 65535)}\n{JOIN}"
PATHS, OPEN = "export PATH=/usr/bin:/bin:/usr/sbin:/sbin", "tc qdisc del dev lo clsact"

NETWORK = (
    Fault("loopback down", "", "loopback", "is down", "ip link set lo up"),
    Fault("loopback without its address", f"{UP}; ip addr flush dev lo", "loopback", "127.0.0.1", "ip addr replace"),
    Fault("loopback filtered", f"{UP}; {ALL_PORTS}", "loopback", "filtered", "firewall", OPEN),
    Fault("half of the ports filtered", f"{UP}; {SOME_PORTS}", "loopback", "from 4", "firewall", OPEN),
    Fault("large packets dropped on loopback", f"{UP}; {dropped('lo', 3000)}", "loopback", "large", "mtu"),
    Fault("a wrong interface", f"{UP}; export GLOO_SOCKET_IFNAME=nosuch0", "connection", "nosuch0", "SOCKET_IFNAME=lo"),
    between_nodes("one absent node", "", "nodes", "node 1", "node 1", JOIN),
    between_nodes("no node 0", "", "nodes", "10.9.0.1:29", "node 0", NOT_HERE, f"{WORLD} --machine_rank 1"),
    between_nodes("a port in use", PORT_IN_USE, "nodes", "29400", "main_process_port", "kill $!; sleep 0.5"),
    between_nodes("a name that is unknown", "", "nodes", "no-such-node", "main_process_ip", NOT_HERE, UNKNOWN),
    between_nodes("an address of another machine", "", "nodes", "10.9.0.2", "main_process_ip", NOT_HERE, OF_ANOTHER),
    between_nodes(
        "large packets dropped between nodes", NARROW, "nodes", "large", "mtu", "$OTHER ip link set cable1 mtu 1400"
    ),
    between_nodes("ports filtered between nodes", BLOCKED, "nodes", "port", "port", "tc qdisc del dev cable0 clsact"),
)
RANKS = (
    struck("a killed rank", "SIGKILL", "SIGKILL", "limit|scheduler|memory"),
    struck("a rank that always crashes", "SIGSEGV", "SIGSEGV", "torch"),
    struck_once("a rank that was killed once", "SIGKILL"),
    struck_once("a rank that hung once", "SIGSTOP"),
)
SHARED_MEMORY = (
    shm("full /dev/shm", FULL_SHM, "free", "size"),
    shm("tiny /dev/shm", "mount -t tmpfs -o size=1m tmpfs /dev/shm", "free", "size"),
    shm("read-only /dev/shm", "mount -t tmpfs -o ro,size=4g tmpfs /dev/shm", "read-only", "remount,rw"),
    shm("no /dev/shm", BARE_DEV, "no such file", "mount -t tmpfs"),
)
FILES = (
    hf_home("HF_HOME on a read-only disk", f"{READ_ONLY}; export HF_HOME=$S/small", "cannot be written"),
    hf_home("HF_HOME is a file", "touch $S/file; export HF_HOME=$S/file", "cannot be written"),
    hf_home("HF_HOME in /proc", "export HF_HOME=/proc/nothing", "cannot be written"),
    hf_home("full HF_HOME", f"{SMALL}; export HF_HOME=$S/small", "free"),
    Fault("full TMPDIR", f"{UP}; {SMALL}; export TMPDIR=$S/small", "disk", "free", "TMPDIR", "export TMPDIR=$S/tmp"),
)
GPU = (
    with_gpus("nvidia-smi that hangs", "export PATH=$STAND/smi-hangs:$PATH", "driver", "did not return", "reboot"),
    smi("nvidia-smi prints words", "smi-words", "Unable to determine", "reboot"),
    smi("nvidia-smi fails", "smi-fails", "mismatch", "reboot"),
    smi("nvidia-smi lists GPUs that CUDA does not find", "smi", "lists 2", "gpus all", title="GPUs"),
    with_gpus("CPU-only torch on a GPU machine", "true", "torch", "not compiled with CUDA", "pytorch.org"),
    with_gpus("CUDA_VISIBLE_DEVICES names no GPU", "export CUDA_VISIBLE_DEVICES=0,7", "GPUs", "'7'", "ordinals"),
)
SOFTWARE = (
    package("an old transformers", "old", "versions", "transformers 4.40", "pip install 'transformers", "warning"),
    package("torch cannot be imported", "torch-broken", "torch", "libcudart is missing", "torch works"),
    limit("few open files", "-n 256", "limits", "256 open files", "-n", status="warning"),
    limit("too few open files to start", "-n 24", "limits", "24 open files", "-n"),
    limit("a small address space", "-v 900000", "limits|torch", "address space|ulimit -v", "-v"),
    Fault("no compiler", f"{UP}; export PATH=/nowhere", "compiler", "missing", "g\\+\\+", PATHS, status="warning"),
)

FAULTS = (*NETWORK, *RANKS, *SHARED_MEMORY, *FILES, *GPU, *SOFTWARE)
