"""The doctor's checks on machines that are not here, and the requested world."""

import resource
import sys

import pytest
import torch

from launch.doctor import machine
from recipes.errors import UserError
from tests.launch.doctor.conftest import SMI
from tests.support.doctor import requested

# --- The requested world --------------------------------------------------------------------------


def test_by_default_there_is_a_rank_for_each_gpu_or_two_on_a_cpu():
    assert [requested(gpus=4).processes, requested(gpus=1).processes, requested().processes] == [4, 1, 2]
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "4000"}
    found = requested(gpus=4, environment=step)  # in a step of Slurm its variables describe the world
    assert (found.nodes, found.machine_rank, found.processes, found.address, found.port) == (2, 1, 8, "n1", 4000)


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("--nodes 2", "main_process_ip"),
        ("--nodes 2 --main_process_ip n1 --machine_rank 2", "0 to 1"),
        ("--nodes 2 --main_process_ip n1 --num_processes 3", "2 times"),
    ],
)
def test_a_world_that_is_not_possible_is_a_mistake(words, advice):
    with pytest.raises(UserError, match=advice):
        requested(*words.split())


@pytest.mark.parametrize(
    ("version", "wanted", "how"),
    [
        ("2.11.0a0+vendor", ">=2.11", ""),
        ("2.10.1+cu126", ">=2.11", "older"),
        ("5.24.0", "<5.24,>=5.17", "newer"),
        (None, ">=1", "missing"),
    ],
)
def test_a_version_is_compared_with_the_supported_range(version, wanted, how):
    assert machine.outside(version, wanted) == how


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "invalid"),
    [
        ("0,1", None), ("GPU-b", None), ("0, 1", None), ("0,2", "2"), ("0,0", "0"),
        ("0,GPU-a1", "GPU-a1"), ("0,-1,1", "-1"), ("0,,1", ""), ("MIG-1234", None),
    ],
)  # fmt: skip
def test_an_entry_that_is_not_a_gpu_is_found(visible, invalid):
    assert machine.invalid_gpu(visible, ["GPU-a1", "GPU-b2"]) == invalid


def test_an_invalid_ordinal_explains_why_gpus_are_missing(nvidia_smi, monkeypatch):
    nvidia_smi()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,1")
    found = machine.visible_gpus(requested(gpus=1))
    assert found.status == "error"
    assert found.found.startswith("CUDA sees 1: '2' in CUDA_VISIBLE_DEVICES=0,2,1 is not a GPU")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = machine.visible_gpus(requested("--num_processes", "3", gpus=2))
    assert (found.status, found.fix, found.fatal) == ("error", "--num_processes 2, or more GPUs", True)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["0, 0x0000000000000001, 8, 16"], "GPU 0 has 8 of 16 PCIe lanes"),
        (["0, 0x0, 16, 16", "3, 0x0, 16, 16"], "GPU 1: 3 uncorrected memory errors"),
        (["0, 0x00000000000000C4, 16, 16"], "GPU 0 is slowed down by heat (hardware) and a power brake"),
        (["0, 0x0000000000000005, 16, 16"], ""),  # idle, and a power cap
        (["[N/A], [N/A], [N/A], [N/A]"], ""),
    ],
)
def test_a_sick_gpu_is_named(rows, words, nvidia_smi):
    health = f"--query-gpu={machine._HEALTH}) printf '{chr(10).join(rows)}' ;;\n    --query-gpu=uuid)"
    nvidia_smi(SMI.replace("--query-gpu=uuid)", health))
    check = machine.gpu_health(requested(gpus=2))
    assert check.status == ("warning" if words else "ok") and words in check.found


def test_a_gpu_that_others_use_is_a_warning_that_names_them(nvidia_smi):
    nvidia_smi(SMI.replace(" ;;", "; echo 'WARNING: infoROM is corrupted at gpu 0000:3B:00.0' ;;"))
    found = machine.gpu_memory(requested(gpus=2))
    assert found.found == "taken: 80,559 of 81,559 MiB of GPU 1, by python (pid 4242)"
    assert found.status == "warning" and found.numbers == {"least_free": {"value": 1000 << 20, "unit": "bytes"}}


def test_an_nvidia_smi_that_hangs_is_given_up_once(nvidia_smi, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_SECONDS", 0.3)
    nvidia_smi(f"#!/bin/sh\necho asked >>{tmp_path}/asked\nsleep 1000\n")
    for query in ("--query-gpu=uuid", "--query-gpu=memory.total"):
        assert not machine.smi_rows(query)
    assert "did not return" in machine.driver_of_gpus(requested()).found
    assert (tmp_path / "asked").read_text() == "asked\n"


@pytest.mark.parametrize("script", ["head -c 4000 /dev/urandom", "echo '<html>'"])
def test_what_nvidia_smi_prints_instead_of_an_answer_is_shown_and_not_believed(script, nvidia_smi):
    nvidia_smi(f"#!/bin/sh\n{script}\n")
    check = machine.driver_of_gpus(requested())
    assert (check.status, check.title) == ("error", "driver") and "is not understood: " in check.found
    assert check.found.isprintable()
    assert machine.visible_gpus(requested()).status == "ok"


@pytest.mark.parametrize(
    ("build", "driver", "words", "advice"),
    [
        (("2.13.0+cpu", None), (12, 8), "built for the CPU only", "pip install --force-reinstall torch==2.13.0"),
        (("2.13.0+cu130", "13.0"), (12, 8), "CUDA 13.0, and the driver runs CUDA up to 12.8", "a newer driver"),
        (("2.13.0+cu129", "12.9"), (12, 2), None, None),  # the same major version
        (("2.13.0+cu126", "12.6"), (13, 0), None, None),
        (("2.13.0+cu126", "12.6"), None, None, None),
        (None, (12, 8), None, None),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_named_before_ranks_start(build, driver, words, advice, monkeypatch):
    monkeypatch.setattr(machine, "_build", lambda: build)
    monkeypatch.setattr(machine, "driver_cuda", lambda: driver)
    check = machine.torch_build(requested(gpus=2))
    assert (check is None) == (words is None)
    assert check is None or (check.fatal and words in check.found and advice in check.fix)
    assert machine.torch_build(requested()) is None
    monkeypatch.undo()
    assert machine._build() == (torch.__version__, torch.version.cuda)  # read without importing it


# --- Limits, disks, /dev/shm ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "soft", "hard", "status", "fix"),
    [
        (resource.RLIMIT_NOFILE, 256, 20000, "warning", "`ulimit -S -n 20000`"),
        (resource.RLIMIT_NOFILE, 24, resource.RLIM_INFINITY, "error", "`ulimit -S -n 65536`"),
        (resource.RLIMIT_NOFILE, 256, 256, "warning", "a higher hard limit than 256"),
        (resource.RLIMIT_AS, 1 << 30, resource.RLIM_INFINITY, "error", "`ulimit -S -v unlimited`"),
    ],
)
def test_a_low_limit_is_raised_as_far_as_one_may(which, soft, hard, status, fix, monkeypatch):
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (soft, hard) if asked == which else none)
    check = machine.limits(requested())
    assert check.status == status and fix in check.fix


@pytest.mark.parametrize(("offline", "status"), [("0", "error"), ("1", "warning")])  # which is only read
def test_a_cache_that_is_a_file_is_named_with_its_variable(offline, status, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    check = machine.caches(requested())
    assert check.status == status and f"{tmp_path}/file cannot be written" in check.found
    assert "export HF_HOME=" in check.fix


@pytest.mark.parametrize(("free", "status"), [(1 << 29, "error"), (5 << 30, "warning"), (1 << 40, "ok")])
def test_free_space_is_a_number_of_bytes(free, status, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    check = machine.caches(requested())
    assert check.status == status
    assert list(check.numbers.values()) == [{"value": free, "unit": "bytes"}]


def test_a_missing_compiler_is_a_warning(monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(machine.shutil, "which", lambda *_, **__: None)
    check = machine.compiler(requested())
    assert check.status == "warning" and "g++" in check.found and "ninja" in check.found


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm")
def test_a_missing_shared_memory_is_an_error_with_its_own_fix(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_SHARED_MEMORY", tmp_path / "shm")
    check = machine.shared_memory(requested())
    assert (check.status, "mount -t tmpfs" in check.fix) == ("error", True)
