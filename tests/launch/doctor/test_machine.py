"""The doctor's checks on machines that are not here, the requested world, and what is printed."""

import io
import sys

import pytest

from launch.doctor import command, machine
from launch.doctor.check import Check, Request
from launch.doctor.network import invalid_gpu
from recipes.errors import UserError
from tests.support.doctor import requested

# --- The requested world --------------------------------------------------------------------------


def test_by_default_there_is_a_rank_for_each_gpu_or_two_on_a_cpu():
    assert [requested(gpus=4).processes, requested(gpus=1).processes, requested().processes] == [4, 1, 2]


def test_in_a_step_of_slurm_its_variables_describe_the_world():
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "4000"}
    found = requested(gpus=4, environment=step)
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
def test_a_world_that_is_not_possible_is_a_mistake(words, advice):
    with pytest.raises(UserError, match=advice):
        requested(*words.split())


# --- What is printed ------------------------------------------------------------------------------


def test_a_fix_is_printed_in_lines_of_its_own():
    check = Check("error", "connection", "refused", "with this:\nexport A=b")
    line = command.line(7, check, command.signs_for(sys.__stdout__))
    assert line.endswith("connection: refused\n     with this:\n     export A=b")


def test_a_terminal_without_ticks_gets_ascii_only():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print(command.line(1, Check("ok", "disk", "/home/é"), command.signs_for(stream)), file=stream)
    stream.flush()
    assert stream.buffer.getvalue() == b" 1 + disk: /home/?\n"


# --- Machines that are not here -------------------------------------------------------------------


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
def test_a_version_is_compared_with_the_supported_range(version, wanted, how):
    assert machine.outside(version, wanted) == how


@pytest.mark.parametrize(
    ("visible", "invalid"),
    [
        ("0,1", None), ("1", None), ("GPU-b", None), ("0, 1", None), ("0,2", "2"), ("2", "2"), ("0,0", "0"),
        ("0,GPU-a1", "GPU-a1"), ("0,-1,1", "-1"), ("0,,1", ""), ("MIG-1234", None),
    ],
)  # fmt: skip
def test_an_entry_that_is_not_a_gpu_is_found(visible, invalid):
    assert invalid_gpu(visible, ["GPU-a1", "GPU-b2"]) == invalid


def found_on(one: Request) -> dict[str, Check]:
    """The machine's checks by their titles."""
    return {check.title: check for check in machine.examine(one)}


def test_a_gpu_that_others_use_is_a_warning(nvidia_smi, monkeypatch):
    nvidia_smi()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = found_on(requested(gpus=2))
    assert found["GPUs"].status == found["driver"].status == found["bf16"].status == "ok"
    assert found["GPU memory"] == Check(
        "warning",
        "GPU memory",
        "taken: 80,559 of 81,559 MiB of GPU 1",
        "end what holds it, or use other GPUs",
        {"least_free": {"value": 1000 << 20, "unit": "bytes"}},
    )
    assert found["GPU processes"].found == "python (pid 4242)"


def test_an_invalid_ordinal_explains_why_gpus_are_missing(nvidia_smi, monkeypatch):
    nvidia_smi()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,1")
    found = found_on(requested(gpus=1))["GPUs"]
    assert found.status == "error"
    assert found.found.startswith("CUDA sees 1: '2' in CUDA_VISIBLE_DEVICES=0,2,1 is not a GPU")


def test_more_processes_than_gpus_are_an_error():
    found = found_on(requested("--num_processes", "3", gpus=2))["GPUs"]
    assert (found.status, found.fix) == ("error", "--num_processes 2, or more GPUs")


def test_a_driver_that_fails_is_an_error_with_its_own_message(nvidia_smi):
    nvidia_smi("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    assert found_on(requested())["driver"].found.endswith("Driver/library version mismatch")
