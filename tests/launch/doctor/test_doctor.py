"""`recipes doctor` with real ranks: some hang or die, /dev/shm is full, an interface is wrong."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.doctor.network import interfaces
from launch.host.processes import free_port
from tests.support.doctor import DOCTOR, checks_in, examined

NEW_NAMESPACE = ["unshare", "--map-root-user", "--mount", "bash", "-c"]  # where another /dev/shm can be mounted
TINY = "mount -t tmpfs -o size=1m tmpfs /dev/shm"


def can_mount() -> bool:
    return sys.platform == "linux" and subprocess.run([*NEW_NAMESPACE, TINY], capture_output=True).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="a /dev/shm of its own needs a mount namespace")


def test_a_healthy_machine_passes_every_check():
    code, healthy = examined("--num_processes", "2")
    assert code == 0, healthy
    machines = ["versions", "GPUs", "limits", "RAM", "disk", "HF_HOME", "/dev/shm", "CPU cores", "compiler"]
    network = ["loopback"]
    ranks = ["gloo", "rendezvous", "connection", "bandwidth", "matrices", "CPU Adam"]
    assert list(healthy) == [*machines, *network, *ranks]
    assert healthy["bandwidth"].numbers["all-reduce"]["value"] > 0


@pytest.mark.slow
def test_a_wrong_interface_is_replaced_by_one_that_works(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    code, checks = examined("--num_processes", "2")
    wrong = checks["connection"]
    found = re.search(r"^export GLOO_SOCKET_IFNAME=(\S+)  # costs: ", wrong.fix, flags=re.M)
    assert code == 1 and wrong.found.endswith("Unable to find address for: nosuch0")
    assert found and found.group(1) in interfaces(), wrong.fix


@contextlib.contextmanager
def signalled_in(stage: str, number: signal.Signals, folder: Path, *words: str):
    """The doctor as a process, whose rank 1 gets a signal when it reaches this stage."""
    command = [*DOCTOR, "--num_processes", "2", *words]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        while not any(f'"{stage}"' in file.read_text() for file in folder.glob("recipes-*/1/answer.json")):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
        for pid in pids_of(folder, "/1"):
            os.kill(pid, number)
        yield process


def pids_of(folder: Path, ending: str = "") -> list[int]:
    """The ranks whose notes are in this folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_text().split("\0")
            if any(word.startswith(str(folder)) and word.endswith(ending) for word in words if word):
                found.append(int(file.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGSTOP, "every rank of this node hangs"), (signal.SIGKILL, "rank 1 was killed by SIGKILL")],
    ids=["hangs", "dies"],
)
def test_a_rank_that_hangs_or_dies_once_fails_the_check(number, words, tmp_path):
    with signalled_in("connection", number, tmp_path, "--json", "--timeout", "30") as process:
        wrong = list(checks_in(process.communicate()[0]).values())[-1]
    assert (process.returncode, wrong.status) == (1, "error")
    assert wrong.found.startswith(f"failed once of two: {words}")
    assert "export" not in wrong.fix  # no switch after an accident
    assert not pids_of(tmp_path)


@pytest.mark.slow
def test_an_interrupted_doctor_leaves_no_rank_behind(tmp_path):
    with signalled_in("start", signal.SIGCONT, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        process.wait(300)  # for the doctor to end its ranks
    assert process.returncode == 130
    assert not pids_of(tmp_path)


@pytest.mark.slow
@needs_mount
def test_a_full_shared_memory_on_one_of_two_nodes_is_known_on_both():
    world = [*DOCTOR, "--json", "--nodes", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    world += ["--main_process_port", str(free_port()), "--machine_rank"]
    namespace = [*NEW_NAMESPACE, f'{TINY}; exec "$@"', "_"]
    with subprocess.Popen([*namespace, *world, "1"], stdout=subprocess.PIPE, text=True) as full:
        healthy = subprocess.run([*world, "0"], stdout=subprocess.PIPE, text=True)
        found = checks_in(full.communicate()[0])
    assert (healthy.returncode, full.returncode) == (1, 1)
    assert found["/dev/shm"].status == "error" and "--shm-size" in found["/dev/shm"].fix
    nodes = checks_in(healthy.stdout)["nodes"]
    assert (nodes.found, nodes.fix) == ("node 1 failed a check", "run `recipes doctor` on node 1")
    assert checks_in(healthy.stdout)["connection"].status == "ok"


def test_a_torch_that_cannot_be_imported_is_a_failed_check(broken_torch):
    done = subprocess.run([*DOCTOR, "--num_processes", "1"], capture_output=True, text=True, env=broken_torch)
    assert (done.returncode, done.stderr) == (1, "")
    assert "✗ torch: rank 0: ImportError: libcudart is missing" in done.stdout
