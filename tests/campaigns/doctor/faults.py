"""The faults: how each is made in namespaces of its own, how it is named, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass

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
GPUS = f"{UP}; export LD_LIBRARY_PATH=$STAND/cuda-12080 PATH=$STAND/smi:$PATH"
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


NETWORK = (
    Fault("loopback down", "", "loopback", "down", "ip link set lo up"),
    Fault("loopback without its address", f"{UP}; ip addr flush dev lo", "loopback", "127.0.0.1", "ip addr add"),
    Fault(
        "loopback filtered",
        f"{UP}; {filtered('lo', 1, 65535)}",
        "loopback",
        "filtered|answer",
        "firewall",
        mend="tc qdisc del dev lo clsact",
    ),
    Fault("large packets dropped on loopback", f"{UP}; {dropped('lo', 3000)}", "loopback", "large", "mtu"),
    Fault(
        "packets above 1200 bytes dropped on loopback",
        f"{UP}; {dropped('lo', 1200)}",
        "loopback",
        "large",
        "mtu",
    ),
    Fault(
        "half of the ports filtered", f"{UP}; {filtered('lo', 40000, 65535)}", "loopback", "port", "ip_local_port_range"
    ),
    Fault(
        "name server that does not answer",
        f"{UP}; echo 127.0.0.1 localhost >$S/hosts; mount --bind $S/hosts /etc/hosts\n"
        "ip route add 10.255.255.53 dev lo\n"
        "echo nameserver 10.255.255.53 >$S/resolv; mount --bind $S/resolv /etc/resolv.conf",
        "host name",
        "resolve",
        "/etc/hosts",
    ),
    Fault(
        "a wrong interface",
        f"{UP}; export GLOO_SOCKET_IFNAME=nosuch0",
        "connection|GLOO_SOCKET_IFNAME",
        "nosuch0",
        "GLOO_SOCKET_IFNAME=lo|unset",
    ),
    Fault(
        "one absent node",
        TWO,
        "nodes",
        "node 1",
        "node 1",
        words=f"{WORLD} --machine_rank 0",
        mend=JOIN,
    ),
    Fault(
        "no node 0",
        TWO,
        "nodes|rendezvous",
        "10.9.0.1:29",
        "node 0",
        words=f"{WORLD} --machine_rank 1",
        mend=NOT_HERE,
    ),
    Fault(
        "a port in use",
        f"{TWO}{JOIN}\npython3 -m http.server 29400 >/dev/null 2>&1 & sleep 1",
        "nodes|ports|rendezvous",
        "29400",
        "main_process_port",
        words=f"{WORLD} --machine_rank 0",
        mend="kill $!; sleep 0.5",
    ),
    Fault(
        "a name that is unknown",
        TWO,
        "nodes|host name|rendezvous",
        "no-such-node",
        "main_process_ip",
        words=f"{WORLD.replace('10.9.0.1', 'no-such-node.invalid')} --machine_rank 0",
        mend=NOT_HERE,
    ),
    Fault(
        "an address of another machine",
        TWO,
        "nodes|rendezvous",
        "10.9.0.2",
        "main_process_ip|node 0",
        words=f"{WORLD.replace('10.9.0.1', '10.9.0.2')} --machine_rank 0",
        mend=NOT_HERE,
    ),
    Fault(
        "large packets dropped between nodes",
        f"{TWO}{dropped('cable0', 1500)}\n{JOIN}",
        "nodes|network",
        "large",
        "mtu",
        words=f"{WORLD} --machine_rank 0",
        mend="$OTHER ip link set cable1 mtu 1400",
    ),
    Fault(
        "ports filtered between nodes",
        f"{TWO}{filtered('cable0', 32768, 65535)}\n{JOIN}",
        "nodes|network",
        "port",
        "port",
        words=f"{WORLD} --machine_rank 0",
        mend="tc qdisc del dev cable0 clsact",
    ),
)

RANKS = (
    Fault("a stopped rank", UP, "connection|all-reduce", "stopped", "SIGSTOP|kill -CONT", strike="SIGSTOP", mend=UP),
    Fault("a killed rank", UP, "connection|all-reduce", "SIGKILL", "limit|scheduler|memory", strike="SIGKILL", mend=UP),
    Fault(
        "a rank that crashed once",
        UP,
        "connection|all-reduce",
        "once of two",
        "again",
        strike="SIGSEGV",
        once=True,
        mend=UP,
    ),
    Fault(
        "a rank that was killed once",
        UP,
        "connection|all-reduce",
        "once of two",
        "again",
        strike="SIGKILL",
        once=True,
        mend=UP,
    ),
    Fault(
        "a rank that was stopped once",
        UP,
        "connection|all-reduce",
        "once of two",
        "again",
        strike="SIGSTOP",
        once=True,
        mend=UP,
    ),
    Fault("a rank that always crashes", UP, "connection|all-reduce", "SIGSEGV", "torch", strike="SIGSEGV", mend=UP),
)

SHARED_MEMORY = (
    Fault(
        "full /dev/shm",
        f"{UP}; mount -t tmpfs -o size=32m tmpfs /dev/shm; head -c 40m /dev/zero >/dev/shm/full || true",
        "/dev/shm|DataLoader",
        "free|space",
        "size",
        mend=FROM_FIX,
    ),
    Fault(
        "tiny /dev/shm", f"{UP}; mount -t tmpfs -o size=1m tmpfs /dev/shm", "/dev/shm|DataLoader", "free|space", "size"
    ),
    Fault(
        "read-only /dev/shm",
        f"{UP}; mount -t tmpfs -o ro,size=4g tmpfs /dev/shm",
        "/dev/shm",
        "read-only",
        "remount,rw",
    ),
    Fault("no /dev/shm", f"{UP}; {BARE_DEV}", "/dev/shm", "missing", "mount -t tmpfs"),
)

FILES = (
    Fault(
        "HF_HOME on a read-only disk",
        f"{UP}; {SMALL}; mount -o remount,ro $S/small; export HF_HOME=$S/small",
        "HF_HOME",
        "cannot be written",
        "HF_HOME",
        mend="export HF_HOME=$S/hf",
    ),
    Fault(
        "HF_HOME is a file",
        f"{UP}; touch $S/file; export HF_HOME=$S/file",
        "HF_HOME",
        "cannot be written",
        "HF_HOME",
        mend="export HF_HOME=$S/hf",
    ),
    Fault(
        "full HF_HOME",
        f"{UP}; {SMALL}; export HF_HOME=$S/small",
        "HF_HOME",
        "free",
        "HF_HOME",
        mend="export HF_HOME=$S/hf",
    ),
    Fault(
        "full TMPDIR",
        f"{UP}; {SMALL}; export TMPDIR=$S/small",
        "disk",
        "free",
        "room|TMPDIR",
        mend="export TMPDIR=$S/tmp",
    ),
    Fault(
        "TMPDIR on a read-only disk",
        f"{UP}; {SMALL}; mount -o remount,ro $S/small; cd $S/small",
        "disk",
        "cannot be written",
        "writable",
        mend="cd $S",
    ),
)

GPU = (
    Fault(
        "nvidia-smi that hangs",
        f"{GPUS}; export PATH=$STAND/smi-hangs:$PATH",
        "driver",
        "did not return",
        "reboot|dmesg",
        mend=NOT_HERE,
    ),
    Fault(
        "nvidia-smi that hangs on a CPU",
        f"{UP}; export PATH=$STAND/smi-hangs:$PATH",
        "driver",
        "did not return",
        "reboot|dmesg",
        mend="export PATH=${PATH#*:}",
    ),
    Fault(
        "nvidia-smi prints garbage",
        f"{UP}; export PATH=$STAND/smi-garbage:$PATH",
        "driver",
        "not understood|printed",
        "nvidia-smi",
        mend="export PATH=${PATH#*:}",
    ),
    Fault(
        "nvidia-smi prints words",
        f"{UP}; export PATH=$STAND/smi-words:$PATH",
        "driver",
        "Unable to determine",
        "reboot|dmesg",
        mend="export PATH=${PATH#*:}",
    ),
    Fault(
        "nvidia-smi fails",
        f"{UP}; export PATH=$STAND/smi-fails:$PATH",
        "driver",
        "mismatch",
        "reboot",
        mend="export PATH=${PATH#*:}",
    ),
    Fault(
        "nvidia-smi lists GPUs that CUDA does not find",
        f"{UP}; export PATH=$STAND/smi:$PATH",
        "GPUs",
        "lists 2",
        "gpus all",
        mend="export PATH=${PATH#*:}",
    ),
    Fault("CPU-only torch on a GPU machine", GPUS, "torch", "CPU only", "pip install", mend=NOT_HERE),
    Fault(
        "torch's CUDA newer than the driver",
        f"{GPUS}; export PYTHONPATH=$STAND/torch-cu130:$PYTHONPATH",
        "torch",
        "CUDA 13.0.*12.8",
        "driver",
        mend=NOT_HERE,
    ),
    Fault(
        "CUDA_VISIBLE_DEVICES names no GPU",
        f"{GPUS}; export CUDA_VISIBLE_DEVICES=0,7",
        "GPUs",
        "'7'",
        "ordinals",
        mend=NOT_HERE,
    ),
)

SOFTWARE = (
    Fault(
        "an old transformers",
        f"{UP}; export PYTHONPATH=$STAND/old:$PYTHONPATH",
        "versions",
        "transformers 4.40",
        "pip install 'transformers",
        mend="export PYTHONPATH=${PYTHONPATH#*:}",
    ),
    Fault(
        "torch cannot be imported",
        f"{UP}; export PYTHONPATH=$STAND/torch-broken:$PYTHONPATH",
        "torch",
        "libcudart is missing",
        "import torch",
        mend="export PYTHONPATH=${PYTHONPATH#*:}",
    ),
    Fault("few open files", f"{UP}; ulimit -S -n 256", "limits", "256 open files", "ulimit -S -n", status="warning"),
    Fault("too few open files to start", f"{UP}; ulimit -S -n 24", "limits", "24 open files", "ulimit -S -n"),
    Fault(
        "a small address space", f"{UP}; ulimit -S -v 900000", "limits|torch", "address space|ulimit -v", "ulimit -S -v"
    ),
    Fault("a small file size", f"{UP}; ulimit -S -f 0", "limits", "file", "ulimit -S -f"),
    Fault("a short CPU time", f"{UP}; ulimit -S -t 2", "limits|torch|rendezvous", "CPU", "ulimit -S -t"),
    Fault(
        "no compiler",
        f"{UP}; export PATH=/nowhere",
        "compiler",
        "missing|no C",
        "g\\+\\+|gcc",
        status="warning",
        mend="export PATH=/usr/bin:/bin:/usr/sbin:/sbin",
    ),
)

FAULTS = (*NETWORK, *RANKS, *SHARED_MEMORY, *FILES, *GPU, *SOFTWARE)
