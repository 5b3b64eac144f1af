"""`recipes doctor`: real ranks over gloo, some of which hang or die, a full /dev/shm, a wrong interface; the preflight.

What belongs to GPUs is read here from what their tools print; tests/gpu runs it on one.
"""

import argparse
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch.cli import main
from launch.doctor import command as doctor
from launch.doctor import links, machine
from launch.doctor import ranks as convene
from launch.doctor.machine import Check, Patient
from launch.doctor.network import (
    Switch,
    bus_bandwidth,
    invalid_gpu,
    nccl_version,
    slowest_link,
    smallest_set,
    switches,
    topology,
)
from launch.doctor.ranks import Report
from launch.jobs import azure as azure_job
from launch.jobs import local as local_job
from launch.jobs import slurm as slurm_job
from launch.jobs.azure import Azure
from launch.jobs.azure_check import training_in
from launch.jobs.job import Job, job_of
from launch.jobs.slurm import Slurm
from recipes.errors import UserError
from recipes.run import resolve
from recipes.run.hardware import Gpu, Hardware
from tests.support.hostile import hostile_job, received
from tests.support.running import ROOT, run

DOCTOR = [sys.executable, "-m", "launch", "doctor"]
NEW_ROOM = ["unshare", "--map-root-user", "--mount", "bash", "-c"]  # where /dev/shm can be another
TINY = "mount -t tmpfs -o size=1m tmpfs /dev/shm"


def examined(*words: str) -> tuple[int, dict[str, Check]]:
    """The exit code, and the checks by their titles."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(["doctor", "--json", *words])
    return code, checks_in(printed.getvalue())


def checks_in(text: str) -> dict[str, Check]:
    return {check["title"]: Check(**check) for check in json.loads(text)["checks"]}


def can_mount() -> bool:
    return sys.platform == "linux" and subprocess.run([*NEW_ROOM, TINY], capture_output=True).returncode == 0


needs_mount = pytest.mark.skipif(not can_mount(), reason="a /dev/shm of its own needs a mount namespace")


# --- Real ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy():
    code, checks = examined("--num_processes", "2")
    assert code == 0, checks
    return checks


@pytest.mark.slow
def test_a_healthy_machine_says_so_of_every_part(healthy):
    machines = ["Python", "versions", "GPUs", "RAM", "disk", "/dev/shm", "limits", "CPU cores"]
    ranks = ["gloo", "DataLoader", "rendezvous", "all-reduce", "bandwidth", "latency", "DDP step", "matrices"]
    assert list(healthy) == [*machines, *ranks]


@pytest.mark.slow
def test_bandwidth_is_measured(healthy):
    assert float(healthy["bandwidth"].found.split()[0]) > 0


@pytest.mark.slow
def test_a_wrong_interface_is_replaced_by_one_that_works(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    code, checks = examined("--num_processes", "2")
    wrong = checks["connection"]
    found = re.search(r"^export GLOO_SOCKET_IFNAME=(\S+)  # costs: ", wrong.fix, flags=re.M)
    assert code == 1 and wrong.found.endswith("Unable to find address for: nosuch0")
    assert found and found.group(1) in links.interfaces(), wrong.fix


@contextlib.contextmanager
def told_in(stage: str, number: signal.Signals, folder: Path, *words: str):
    """The doctor as a process, whose rank 1 got a signal when it came to this stage."""
    command = [*DOCTOR, "--num_processes", "2", *words]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        while not any(f'"{stage}"' in file.read_text() for file in folder.glob("doctor-*/1/notes.jsonl")):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
        for pid in pids_of(folder, "/1"):
            os.kill(pid, number)
        yield process


def pids_of(folder: Path, ending: str = "") -> list[int]:
    """Ranks whose notes are in this folder."""
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
    [(signal.SIGSTOP, "a signal has stopped it; rank 0 waited for it"), (signal.SIGKILL, "was killed by SIGKILL")],
    ids=["hangs", "dies"],
)
def test_the_rank_that_hangs_or_dies_is_named(number, words, tmp_path):
    with told_in("connection", number, tmp_path, "--json", "--timeout", "4") as process:
        wrong = list(checks_in(process.communicate()[0]).values())[-1]
    assert (process.returncode, wrong.status) == (1, "error")
    assert wrong.found.startswith("rank 1 ") and words in wrong.found
    assert not pids_of(tmp_path)


@pytest.mark.slow
def test_an_interrupted_doctor_leaves_no_rank_behind(tmp_path):
    with told_in("start", signal.SIGCONT, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert process.returncode == 130
    assert not pids_of(tmp_path)


@pytest.mark.slow
@needs_mount
def test_a_full_shared_memory_on_one_of_two_nodes_is_known_on_both():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    world = [*DOCTOR, "--json", "--nodes", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    world += ["--main_process_port", port, "--machine_rank"]
    room = [*NEW_ROOM, f'{TINY}; exec "$@"', "_"]
    with subprocess.Popen([*room, *world, "1"], stdout=subprocess.PIPE, text=True) as full:
        well = subprocess.run([*world, "0"], stdout=subprocess.PIPE, text=True)
        said = checks_in(full.communicate()[0])
    assert (well.returncode, full.returncode) == (1, 1)
    assert "No space left on device" in said["DataLoader"].found and "--shm-size" in said["DataLoader"].fix
    assert said["/dev/shm"].status == "warning"
    assert checks_in(well.stdout)["nodes"].found == "node 1 has a cross of its own"
    assert checks_in(well.stdout)["all-reduce"].found == "the sums are right on 2 ranks"


def test_a_torch_that_cannot_be_imported_is_a_finding(broken_torch):
    done = subprocess.run([*DOCTOR, "--num_processes", "1"], capture_output=True, text=True, env=broken_torch)
    assert (done.returncode, done.stderr) == (1, "")
    assert "✗ torch: rank 0: ImportError: libcudart is missing" in done.stdout


@pytest.fixture
def broken_torch(tmp_path) -> dict[str, str]:
    """An environment in which `import torch` fails."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise ImportError('libcudart is missing')")
    search = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": search, "PYTHONIOENCODING": "utf-8"}


# --- The preflight ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_preflight_that_fails_ends_the_job_before_it_trains(broken_torch, tmp_path):
    command = [sys.executable, "-m", "launch", "submit", "local", "--recipe", "baseline", "--preflight"]
    outcome = run([*command, "--", "--output_dir", str(tmp_path / "out")], tmp_path / "out", broken_torch)
    assert outcome.code == 1 and "sick: 1 of" in outcome.output
    assert outcome.record == {} and "Traceback" not in outcome.output


@pytest.mark.slow
def test_after_a_preflight_that_passes_the_script_starts(tmp_path):
    text = local_job.render(replace(hostile_job(["a b"], tmp_path), preflight=True))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True)
    assert (done.returncode, received(tmp_path)) == (0, ["a b"]), done.stderr
    assert "healthy: " in done.stdout


def job(nodes: int, processes: int, preflight: bool = True) -> Job:
    hardware = Hardware((Gpu("GPU", (8, 0), 80 << 30),) * processes, cores=8)
    spec = resolve(world_size=nodes * processes, local_world_size=processes, hardware=hardware, environment={})
    return job_of(spec, nodes, processes, [], preflight)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    "render", [local_job.render, lambda job: slurm_job.render(job, Slurm(venv="/v"))], ids=["local", "slurm"]
)
def test_the_preflight_is_bash_and_comes_first(render, nodes):
    text = render(job(nodes, 4))
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert re.search(rf"launch doctor --nodes {nodes} --num_processes {4 * nodes} .*&& exec .*accelerate", text)


def test_the_training_in_a_job_for_azure_is_found_behind_its_preflight():
    found = {}
    for preflight in (True, False):
        body = yaml.safe_load(azure_job.render(job(2, 4, preflight), Azure(compute="cluster")))
        assert ("launch doctor" in body["command"]) == preflight
        found[preflight] = training_in(body)
    assert found[True] == found[False] is not None


# --- The world that is asked for -------------------------------------------------------------------------------------


def patient(*words: str, gpus: int = 0, **environment: str) -> Patient:
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    hardware = Hardware((Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 << 30),) * gpus, cores=8)
    return doctor.patient_of(parser.parse_args(["doctor", *words]), hardware, environment)


def test_a_world_is_one_rank_a_gpu_and_two_on_a_cpu():
    assert [patient(gpus=4).processes, patient(gpus=1).processes, patient().processes] == [4, 1, 2]


def test_a_step_of_slurm_says_which_nodes_there_are():
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "4000"}
    found = patient(gpus=4, **step)
    assert (found.nodes, found.machine_rank, found.processes) == (2, 1, 8)
    assert (found.address, found.port) == ("n1", 4000)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--nodes 2", "main_process_ip"),
        ("--nodes 2 --main_process_ip n1 --machine_rank 2", "0 to 1"),
        ("--nodes 2 --main_process_ip n1 --num_processes 3", "2 times"),
    ],
)
def test_a_world_that_cannot_be_is_a_mistake(words, advice):
    with pytest.raises(UserError, match=advice):
        patient(*words.split())


# --- What is printed -------------------------------------------------------------------------------------------------


def test_a_fix_stands_below_its_line_ready_to_be_copied():
    check = Check("error", "connection", "refused", "with this:\nexport A=b")
    assert doctor.line(7, check, doctor.signs_for(sys.__stdout__)).endswith(
        "connection: refused\n     with this:\n     export A=b"
    )


def test_a_terminal_without_ticks_gets_ascii_only():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print(doctor.line(1, Check("ok", "disk", "/home/é"), doctor.signs_for(stream)), file=stream)
    stream.flush()
    assert stream.buffer.getvalue() == b" 1 + disk: /home/?\n"


# --- Machines that are not here --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "wanted", "how"),
    [
        ("2.11.0", ">=2.11", ""),
        ("2.11.0a0+vendor", ">=2.11", ""),
        ("2.10.1+cu126", ">=2.11", "older"),
        ("5.24.0", "<5.24,>=5.17", "newer"),
        (None, ">=1", "missing"),
    ],
)
def test_a_version_is_held_against_the_supported_range(version, wanted, how):
    assert machine.outside(version, wanted) == how


@pytest.mark.parametrize(
    ("visible", "invalid"),
    [
        ("0,1", None), ("1", None), ("GPU-b", None), ("0, 1", None), ("0,2", "2"), ("2", "2"), ("0,0", "0"),
        ("0,GPU-a1", "GPU-a1"), ("0,-1,1", "-1"), ("0,,1", ""), ("MIG-1234", None),
    ],
)  # fmt: skip
def test_an_ordinal_that_is_no_gpu_is_found(visible, invalid):
    assert invalid_gpu(visible, ["GPU-a1", "GPU-b2"]) == invalid


SMI = """\
#!/bin/sh
case "$1" in
    --query-gpu=uuid) printf 'GPU-a\\nGPU-b\\n' ;;
    --query-gpu=driver_version) printf '580.1\\n580.1\\n' ;;
    --query-gpu=index,memory.free,memory.total) printf '0, 80000, 81559\\n1, 1000, 81559\\n' ;;
    --query-compute-apps=*) printf '4242, python\\n' ;;
    --query-gpu=pcie*) printf '5, 16\\n5, 16\\n' ;;
    topo) printf '\\tGPU0\\tGPU1\\tCPU Affinity\\nGPU0\\t X \\tNV18\\t0-7\\nGPU1\\tNV18\\t X \\t0-7\\n' ;;
esac
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Writes a stand-in for nvidia-smi that is found before any other."""

    def write(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    machine.smi_rows.cache_clear()
    yield write
    machine.smi_rows.cache_clear()


def found_on(one: Patient) -> dict[str, Check]:
    return {check.title: check for check in machine.examine(one)}


def test_a_gpu_that_others_use_is_a_warning(nvidia_smi, monkeypatch):
    nvidia_smi(SMI)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = found_on(patient(gpus=2))
    assert found["GPUs"].status == found["driver"].status == found["bf16"].status == "ok"
    assert found["GPU memory"] == Check(
        "warning", "GPU memory", "taken: 80,559 of 81,559 MiB of GPU 1", "end what holds it, or use other GPUs"
    )
    assert found["GPU processes"].found == "python (pid 4242)"


def test_an_invalid_ordinal_explains_why_gpus_are_missing(nvidia_smi, monkeypatch):
    nvidia_smi(SMI)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,1")
    found = found_on(patient(gpus=1))["GPUs"]
    assert found.status == "error" and found.found.startswith("CUDA sees 1: '2' in CUDA_VISIBLE_DEVICES=0,2,1 is none")


def test_more_processes_than_gpus_are_a_cross():
    found = found_on(patient("--num_processes", "3", gpus=2))["GPUs"]
    assert (found.status, found.fix) == ("error", "--num_processes 2, or more GPUs")


def test_a_driver_that_does_not_work_is_a_cross_in_its_own_words(nvidia_smi):
    nvidia_smi("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    assert found_on(patient())["driver"].found.endswith("Driver/library version mismatch")


# --- Links that are not here -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "text"), [((2, 18, 5), "2.18.5"), (21805, "2.18.5"), (2708, "2.7.8")])
def test_every_form_of_nccls_version_reads_the_same(version, text):
    assert nccl_version(version) == text


TOPOLOGY = """\
        GPU0    GPU1    GPU2    NIC0    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV4     SYS     PIX     0-23            0               N/A
GPU1    NV4      X      PHB     SYS     0-23            0               N/A
GPU2    SYS     PHB      X      SYS     24-47           1               N/A
NIC0    PIX     SYS     SYS      X

Legend:
  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


@pytest.mark.parametrize("text", [TOPOLOGY, TOPOLOGY.replace("        GPU0", "\t\x1b[4mGPU0", 1)], ids=["plain", "tty"])
def test_the_topology_is_read_from_the_matrix(text):
    assert topology(text) == {(0, 1): "NV4", (0, 2): "SYS", (1, 2): "PHB"}


def test_a_topology_that_nobody_prints_has_no_pairs():
    assert topology("") == topology("No devices were found") == {}


@pytest.mark.parametrize(
    ("pairs", "capability", "pcie", "words"),
    [
        (["NV12"], (8, 0), (4, 16), "NVLink, 12 links (300.0 GB/s)"),
        (["NV18", "NV18"], (10, 0), (5, 16), "NVLink, 18 links (900.0 GB/s)"),
        (["NV4", "SYS"], (7, 0), (3, 16), "PCIe 3.0 x16 (15.8 GB/s)"),
        (["PHB"], (8, 9), (4, 8), "PCIe 4.0 x8 (15.8 GB/s)"),
        ([], (8, 0), None, "PCIe"),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(pairs, capability, pcie, words):
    assert str(slowest_link(pairs, capability, pcie)) == words


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert bus_bandwidth(8_000_000, 0.5, 4) == 24_000_000


def reports(stage: str, found: object) -> list[Report]:
    return [Report(rank, found={stage: found}, code=0) for rank in range(2)]


def test_a_bandwidth_far_below_the_link_is_a_warning(nvidia_smi):
    nvidia_smi(SMI)
    slow, fast = ({"bytes": 1 << 28, "seconds": seconds} for seconds in (0.1, 0.001))
    assert links.bandwidth(patient(gpus=2), reports("bandwidth", slow)).status == "warning"
    assert links.bandwidth(patient(gpus=2), reports("bandwidth", fast)).status == "ok"


def test_gpus_that_cannot_reach_each_other_over_their_nvlink_are_a_warning(nvidia_smi):
    nvidia_smi(SMI)
    found = [links.device(patient(gpus=2), reports("device", {"no_peers": peers})) for peers in ([1], [])]
    assert [check.status for check in found] == ["warning", "ok"]


def test_a_device_that_is_slow_is_named():
    found = {"flops": 1e12, "seconds": [1.0, 1.0, 1.3, 1.0], "dtype": "bfloat16"}
    check = links.matmul(patient("--num_processes", "4", gpus=4), reports("matmul", found))
    assert check.status == "warning" and check.found.startswith("rank 2, GPU 2 of node 0")


def test_the_node_that_did_not_come_is_named():
    world = patient(*"--nodes 3 --main_process_ip n0 --main_process_port 4000".split(), gpus=2)
    waiting = [Report(rank, "rendezvous", missing=[4, 5]) for rank in (0, 1)]
    assert convene.trouble_of(world, waiting).what == "ranks 4, 5 on node 2 did not come within 120 s"


# --- Switches --------------------------------------------------------------------------------------------------------

NAMES = [Switch(name, value, "") for name, value in (("A", "1"), ("B", "1"), ("C", "1"), ("D", "x"), ("D", "y"))]


@given(st.sets(st.frozensets(st.sampled_from(NAMES)), max_size=8))
def test_the_smallest_set_that_works_is_found(working):
    found = smallest_set(NAMES, lambda chosen: frozenset(chosen) in working, tries=100)
    possible = [one for one in working if one and len({switch.name for switch in one}) == len(one)]
    assert (found is None) == (not possible)
    assert found is None or (frozenset(found) in working and len(found) == min(map(len, possible)))


@given(st.integers(1, 20))
def test_no_more_sets_are_tried_than_may_be(tries):
    tried = []
    assert smallest_set(NAMES, tried.append, tries) is None
    assert len(tried) == len(set(tried)) == min(tries, 23)


def test_one_switch_is_tried_before_two():
    tried = []
    smallest_set(switches("nccl", ["eth0"]), tried.append, 10)
    assert [len(chosen) for chosen in tried] == [1] * 4 + [2] * 6
