"""Faults that are made for real, and `recipes doctor` beside each: it names the fault, and prints
the fix that mends it.

As root, in network, mount and process namespaces of their own: nothing of this machine is changed.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest

from tests.support.doctor import DOCTOR, SMI
from tests.support.running import ROOT

NAMESPACES = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]


def can_make() -> bool:
    if sys.platform != "linux" or shutil.which("gcc") is None:
        return False
    return subprocess.run([*NAMESPACES, "ip link set lo up"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.skipif(not can_make(), reason="faults are made as root, in namespaces, with gcc"),
    pytest.mark.skipif("+cpu" not in version("torch"), reason="one fault is a torch without CUDA"),
]

# --- How they are made: lines of bash before the doctor, in a folder $S of their own --------------

UP = "ip link set lo up"
SMALL = "mkdir $S/small; mount -t tmpfs -o size=64k tmpfs $S/small"
WORLD = "--nodes 2 --num_processes 2 --main_process_ip 10.9.0.1 --main_process_port 29400"
NODE_0 = f"{WORLD} --machine_rank 0"
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
# What launch/ and recipes/ ask of an NVIDIA driver: two H100s.
CUDA = r"""mkdir $S/cuda; gcc -shared -fPIC -x c - -o $S/cuda/libcuda.so.1 <<'END'
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA H100 80GB HBM3", size); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = (size_t)80 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 75 ? 9 : 0; return 0; }
END
export LD_LIBRARY_PATH=$S/cuda"""


def dropped(device: str, longer_than: int) -> str:
    """Packets longer than this are lost without a word, as where a tunnel is narrower.

    On the wire there are no packets of many segments, so there are none here.
    """
    program = f"4,128 0 0 0,53 0 1 {longer_than + 15},6 0 0 2,6 0 0 0"
    return f"ip link set {device} gso_max_segs 1; {_filter(device, program)}"


def filtered(device: str, first: int) -> str:
    """New TCP connections to the ports from `first` on get no answer."""
    syn_without_ack = f"8,48 0 0 47,84 0 0 18,21 0 4 2,40 0 0 36,53 0 2 {first},37 1 0 65535,6 0 0 2,6 0 0 0"
    return _filter(device, syn_without_ack)


def _filter(device: str, program: str) -> str:
    return f"tc qdisc add dev {device} clsact; tc filter add dev {device} egress bpf bytecode '{program}' da"


def nvidia_smi(script: str) -> str:
    """This nvidia-smi comes first on the PATH."""
    return f"mkdir $S/bin; cat >$S/bin/nvidia-smi <<'END'\n{script}\nEND\nchmod +x $S/bin/nvidia-smi; PATH=$S/bin:$PATH"


# --- The faults -----------------------------------------------------------------------------------

FROM_FIX = "the commands of the fix"
NOT_HERE = "not here"  # what mends it needs another machine
FAILS = "#!/bin/sh\necho Driver/library version mismatch; exit 18"
FAST = ("loopback down", "loopback without its address", "half of the ports filtered", "torch without CUDA")
# Name -> how it is made, the check that names it, its words, those of its fix (regular
# expressions), bash lines that apply the fix and, between two nodes, the flags of node 0.
FAULTS = {
    "loopback down": ("", "loopback", "is down", "ip link set lo up", FROM_FIX),
    "loopback without its address": (
        f"{UP}; ip addr flush dev lo", "loopback", "127.0.0.1", "ip addr replace", FROM_FIX),
    "half of the ports filtered": (
        f"{UP}; {filtered('lo', 40000)}", "loopback", "from 4", "firewall", "tc qdisc del dev lo clsact"),
    "large packets dropped on loopback": (f"{UP}; {dropped('lo', 3000)}", "loopback", "large", "mtu", FROM_FIX),
    "a wrong interface": (
        f"{UP}; export GLOO_SOCKET_IFNAME=nosuch0", "connection", "nosuch0", "SOCKET_IFNAME=lo", FROM_FIX),
    "tiny /dev/shm": (f"{UP}; mount -t tmpfs -o size=1m tmpfs /dev/shm", "/dev/shm", "free", "size", FROM_FIX),
    "read-only /dev/shm": (
        f"{UP}; mount -t tmpfs -o ro,size=4g tmpfs /dev/shm", "/dev/shm", "read-only", "remount,rw", FROM_FIX),
    "full TMPDIR": (
        f"{UP}; {SMALL}; export TMPDIR=$S/small", "disk", "free", "TMPDIR", "export TMPDIR=$S/tmp"),
    "a failing nvidia-smi": (
        f"{UP}; {nvidia_smi(FAILS)}", "driver", "mismatch", "reboot", "rm $S/bin/nvidia-smi"),
    "GPUs that CUDA does not find": (
        f"{UP}; {nvidia_smi(SMI)}", "GPUs", "lists 2", "gpus all", "rm $S/bin/nvidia-smi"),
    "torch without CUDA": (
        f"{UP}; {CUDA}; {nvidia_smi(SMI)}", "torch", "not compiled with CUDA", "pytorch.org", NOT_HERE),
    "one absent node": (TWO, "nodes", "node 1", "node 1", JOIN, NODE_0),
    "an address of another machine": (
        TWO, "nodes", "10.9.0.2", "main_process_ip", NOT_HERE, NODE_0.replace("10.9.0.1", "10.9.0.2")),
    "large packets dropped between nodes": (
        f"{TWO}{dropped('cable0', 1500)}\n{JOIN}", "nodes", "large", "mtu",
        "$OTHER ip link set cable1 mtu 1400", NODE_0),
    "ports filtered between nodes": (
        f"{TWO}{filtered('cable0', 32768)}\n{JOIN}", "nodes", "port", "port",
        "tc qdisc del dev cable0 clsact", NODE_0),
}  # fmt: skip
# A signal that rank 1 gets as it connects, whether it gets it once, and what is said of it.
STRUCK = {
    "a killed rank": (signal.SIGKILL, False, "SIGKILL", "limit|scheduler|memory"),
    "a rank that was killed once": (signal.SIGKILL, True, "1 of 2 tries", "again"),
    "a rank that hung once": (signal.SIGSTOP, True, "1 of 2 tries", "again"),
}


# --- The doctor beside them -----------------------------------------------------------------------


def doctor(folder: Path, lines: str, words: str, patience: int, strike: int = 0, once: bool = False):
    """The exit code of a doctor after these lines, its checks, and all that it printed."""
    (folder / "tmp").mkdir(parents=True)
    command = f"{' '.join(DOCTOR)} --json --timeout {patience}"
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"S": str(folder), "TMPDIR": f"{folder}/tmp", "HF_HOME": f"{folder}/hf", "DOCTOR": command}
    # Without `set -e`, what follows a mount that failed would change the machine's own folders.
    script = f"set -e\n{lines}\nset +e\n$DOCTOR {words}\nexit $?"
    process = subprocess.Popen(
        [*NAMESPACES, script],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if strike:
        threading.Thread(target=strike_ranks, args=(process, folder / "tmp", strike, once)).start()
    text, _ = process.communicate(timeout=300)
    try:
        checks = json.loads(text[text.index("{") : text.rindex("}") + 1])["checks"]
    except ValueError:
        checks = []
    return process.returncode, checks, text


def strike_ranks(process: subprocess.Popen[str], folder: Path, number: int, once: bool) -> None:
    """Send rank 1 of each probe run the signal as soon as it connects."""
    known: dict[Path, list[int]] = {}  # found before the rank connects, because to look for it takes long
    struck: set[Path] = set()
    while process.poll() is None:
        for notes in {*folder.glob("recipes-*/1/answer.json")} - struck:
            pids = known.setdefault(notes, processes_with(str(notes.parent)))
            with contextlib.suppress(OSError):
                if not (once and struck) and '"connection"' in notes.read_text():
                    struck.add(notes)
                    for pid in pids:
                        os.kill(pid, number)
        time.sleep(0.005)


def processes_with(argument: str) -> list[int]:
    """The processes that were started with this argument."""
    return [one.pid for one in psutil.process_iter(["cmdline"]) if argument in (one.info["cmdline"] or ())]


def named(checks: list[dict], title: str, says: str, fix: str) -> dict:
    """The check that names the fault."""
    for check in checks:
        found = check["title"] == title and re.search(says, check["found"], re.S | re.I)
        if found and check["status"] == "error" and re.search(fix, check["fix"], re.S):
            return check
    wrong = [f"{one['title']}: {one['found']} [{one['fix']}]" for one in checks if one["status"] != "ok"]
    raise AssertionError(f"{title}: nothing says {says!r}: {wrong}")


def tiers(faults: dict) -> list:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in faults]


@pytest.mark.parametrize("name", tiers(FAULTS))
def test_doctor_names_a_fault_and_reports_healthy_after_the_fix(name, tmp_path):
    made, title, says, fix, mend, *flags = FAULTS[name]
    words = flags[0] if flags else "--num_processes 2"
    code, checks, text = doctor(tmp_path / "ill", made, words, patience=48)
    assert code == 1 and checks, text
    check = named(checks, title, says, fix)
    if mend == FROM_FIX:
        mend = "\n".join([*re.findall(r"`([^`]+)`", check["fix"]), *re.findall(r"^export [^#\n]*", check["fix"], re.M)])
    if mend != NOT_HERE:
        code, checks, text = doctor(tmp_path / "mended", f"{made}\n{mend}", words, patience=240)
        assert code == 0 and not [one for one in checks if one["title"] == title and one["status"] != "ok"], text


@pytest.mark.parametrize("name", tiers(STRUCK))
def test_doctor_distinguishes_a_rank_killed_or_hung_once_from_a_rank_killed_every_time(name, tmp_path):
    strike, once, says, fix = STRUCK[name]
    code, checks, text = doctor(tmp_path / "struck", UP, "--num_processes 2", 72, strike, once)
    assert code == 1, text
    named(checks, "connection", says, fix)
