"""The doctor's checks on machines that are not here, and the requested world."""

import os
import resource
import sys
from functools import cache

import pytest
from packaging.specifiers import SpecifierSet

from launch.doctor import machine
from tests.support.doctor import SMI, requested

# --- The requested world --------------------------------------------------------------------------


def test_the_doctor_defaults_to_one_rank_per_gpu_or_two_on_a_cpu_and_reads_slurm_variables():
    assert [requested(gpus=4).processes, requested(gpus=1).processes, requested().processes] == [4, 1, 2]
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "4000"}
    found = requested(gpus=4, environment=step)  # in a step of Slurm its variables describe the world
    assert (found.nodes, found.machine_rank, found.processes, found.address, found.port) == (2, 1, 8, "n1", 4000)


@pytest.mark.parametrize(
    ("version", "wanted", "yes"),
    [("2.11.0a0+vendor", ">=2.11", True), ("2.10.1+cu126", ">=2.11", False), (None, ">=1", False)],
)
def test_a_library_version_is_compared_with_the_supported_range(version, wanted, yes):
    assert machine.supported(version, SpecifierSet(wanted)) == yes


# --- GPUs -----------------------------------------------------------------------------------------


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Replaces nvidia-smi by a script, by default one that shows two H100s connected by NVLink."""

    def write(script: str = SMI) -> None:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    for answer in (machine.driver, machine.smi_rows):
        monkeypatch.setattr(machine, answer.__name__, cache(answer.__wrapped__))
    return write


@pytest.mark.parametrize(
    ("visible", "invalid"),
    [
        ("0,1", None), ("GPU-b", None), ("0,2", "2"), ("0,0", "0"), ("0,GPU-a1", "GPU-a1"), ("MIG-1234", None),
    ],
)  # fmt: skip
def test_an_invalid_entry_of_cuda_visible_devices_is_named(visible, invalid):
    assert machine.invalid_gpu(visible, ["GPU-a1", "GPU-b2"]) == invalid


def test_missing_gpus_are_an_error_that_names_the_invalid_device_or_the_number_of_gpus(nvidia_smi, monkeypatch):
    nvidia_smi()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,1")
    found = machine.visible_gpus(requested(gpus=1))
    assert found.status == "error"
    assert found.found == "'2' in CUDA_VISIBLE_DEVICES=0,2,1 names no GPU or repeats one; GPUs left: 1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = machine.visible_gpus(requested(gpus=0))
    assert (found.status, found.found) == ("error", "nvidia-smi lists 2, but CUDA finds none")
    found = machine.visible_gpus(requested("--num_processes", "3", gpus=2))
    assert (found.status, found.fix, found.fatal) == ("error", "use --num_processes 2", True)


def test_the_warning_about_a_gpu_in_use_names_the_process_that_uses_it(nvidia_smi):
    nvidia_smi(SMI.replace(" ;;", "; echo 'WARNING: infoROM is corrupted at gpu 0000:3B:00.0' ;;"))
    found = machine.gpu_memory(requested(gpus=2))
    assert found.found == "taken: 80,559 of 81,559 MiB of GPU 1, by python (pid 4242)"
    assert found.status == "warning" and found.numbers == {"least_free": {"value": 1000 << 20, "unit": "bytes"}}


def test_a_hanging_nvidia_smi_is_called_only_once(nvidia_smi, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_SECONDS", 0.3)
    nvidia_smi(f"#!/bin/sh\necho asked >>{tmp_path}/asked\nsleep 1000\n")
    for query in ("--query-gpu=uuid", "--query-gpu=memory.total"):
        assert not machine.smi_rows(query)
    assert "did not return" in machine.driver_of_gpus(requested()).found
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_an_nvidia_smi_error_message_is_shown_as_a_driver_error_and_not_parsed_as_gpus(nvidia_smi):
    nvidia_smi("#!/bin/sh\necho 'Unable to determine the device handle for GPU0'\n")
    check = machine.driver_of_gpus(requested())
    assert (check.status, check.title) == ("error", "driver") and "handle for GPU0" in check.found
    assert machine.visible_gpus(requested()).status == "ok"


# --- Limits, disks, /dev/shm ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "soft", "hard", "status", "fix"),
    [
        (resource.RLIMIT_NOFILE, 256, 20000, "warning", "`ulimit -S -n 20000`"),
        (resource.RLIMIT_NOFILE, 24, resource.RLIM_INFINITY, "error", "`ulimit -S -n unlimited`"),
        (resource.RLIMIT_NOFILE, 256, 256, "warning", "the hard limit to 1024 or more"),
        (resource.RLIMIT_AS, 1 << 30, resource.RLIM_INFINITY, "error", "`ulimit -S -v unlimited`"),
    ],
)
def test_a_low_ulimit_is_reported_with_how_to_raise_it(which, soft, hard, status, fix, monkeypatch):
    none = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda asked: (soft, hard) if asked == which else none)
    check = machine.limits(requested())
    assert check.status == status and fix in check.fix


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
@pytest.mark.parametrize("place", ["/proc/nothing", "/dev/null/cache", "{file}"])
def test_an_unwritable_hf_cache_folder_is_an_error_that_names_the_folder(variable, place, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    place = place.format(file=tmp_path / "file")
    monkeypatch.setenv(variable, place)
    check = machine.disk(requested())
    assert check.status == "error" and check.found.startswith(f"{place} cannot be written")
    assert "export HF_HOME=" in check.fix and variable in check.fix


@pytest.mark.parametrize(("free", "status"), [(1 << 29, "error"), (5 << 30, "warning"), (1 << 40, "ok")])
def test_the_disk_check_reports_the_free_bytes_and_warns_or_fails_if_they_are_few(free, status, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    check = machine.disk(requested())
    assert check.status == status
    assert {number["value"] for number in check.numbers.values()} == {free}


def test_a_missing_cpp_compiler_for_deepspeed_is_a_warning(monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr(machine.shutil, "which", lambda *_, **__: None)
    check = machine.compiler(requested())
    assert check.status == "warning" and "g++" in check.fix


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm")
def test_a_missing_dev_shm_is_an_error_whose_fix_mounts_a_tmpfs(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_SHARED_MEMORY", tmp_path / "shm")
    check = machine.shared_memory(requested())
    assert (check.status, "mount -t tmpfs" in check.fix) == ("error", True)
