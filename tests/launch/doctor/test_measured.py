"""What a machine finds out about its GPU and host is kept, and the next plan uses it."""

import json
import os
from functools import partial
from types import SimpleNamespace

import pytest

from launch.doctor import links, measured
from launch.host.world import World
from launch.training.banner import show_results
from recipes.planner.measured import context_of, file_in, host_of
from recipes.run.hardware import Gpu, Hardware
from tests.recipes.planner.small import run_of

MIB = 2**20
H100 = "NVIDIA H100 80GB HBM3"
CARD = Hardware((Gpu(H100, (9, 0), 80 << 30),), cores=8)
KEEP_HOST = partial(measured.keep_host, H100, 2)
UUID = "GPU-3f1a9d52-0000-0000-0000-000000000001"
SMI = """\
#!/bin/sh
case "$1" in
    --query-gpu=driver_version) echo 580.1 ;;
    --query-compute-apps=*) cat "$(dirname "$0")/processes" ;;
esac
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


@pytest.fixture
def gpu(nvidia_smi, tmp_path, monkeypatch):
    """620 MiB of a GPU are taken, of which torch has reserved 100, by these processes."""
    import torch

    def shows(*processes: int) -> None:
        (tmp_path / "processes").write_text("".join(f"{UUID}, {pid}\n" for pid in processes))

    nvidia_smi(SMI)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80_380 * MIB, 81_000 * MIB))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = SimpleNamespace(uuid=UUID.removeprefix("GPU-"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 100 * MIB)
    return shows


def own(world=1):
    return context_of(run_of(hardware=Hardware(CARD.gpus * world, cores=8), world=world), os.environ)


# --- What a process takes of its GPU --------------------------------------------------------------


@pytest.mark.parametrize(("processes", "size"), [((42,), 520 * MIB), ((), 520 * MIB), ((42, 77), None)])
def test_the_context_is_what_is_taken_beside_torch_unless_others_take_it_too(processes, size, gpu):
    """A container hides processes, or shows them under other numbers."""
    gpu(*processes)
    assert measured.outside_torch() == size


# --- Kept for the next plan -----------------------------------------------------------------------


def test_a_training_keeps_the_largest_context_for_such_a_card_and_no_other(gpu):
    gpu(os.getpid())
    measured.keep_context(H100, False, 300 * MIB)
    measured.keep_own_context(H100, several=False)
    measured.keep_context(H100, False, 400 * MIB)
    measured.keep_context(H100, True, 900 * MIB)
    assert (own().bytes, own(world=2).bytes) == (520 * MIB, 900 * MIB)
    assert own().source.startswith("measured here with torch ") and own().source.endswith("driver 580.1")
    assert len(json.loads(file_in(os.environ).read_text())["context"]) == 2


@pytest.mark.parametrize("content", [b"{", b'{"context": 3, "host": [null]}', b'{"later": {"is": "kept"}}'])
def test_a_damaged_file_is_replaced_and_what_a_later_release_keeps_there_stays(content, nvidia_smi):
    nvidia_smi(SMI)
    file_in(os.environ).parent.mkdir(parents=True)
    file_in(os.environ).write_bytes(content)
    measured.keep_context(H100, False, 500 * MIB)
    assert own().bytes == 500 * MIB
    assert (b"later" in content) == (json.loads(file_in(os.environ).read_text()).get("later") == {"is": "kept"})


@pytest.mark.parametrize("writable", [True, False])
def test_every_training_on_a_gpu_keeps_its_context_or_says_in_a_line_why_not(writable, gpu, tmp_path, capsys):
    gpu(os.getpid())
    if not writable:
        (tmp_path / "cache").write_text("a file where the folder should be")
    run = run_of("standard", "--output_dir", str(tmp_path), hardware=CARD)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(free_memory=lambda: None))
    results = {"global_step": 2, "train_runtime": 1, "peak_memory_bytes": MIB, "peak_memory_of": "a GPU"}
    show_results(results, run, World(), trainer)
    said = capsys.readouterr().err
    assert (own().bytes == 520 * MIB, said == "") == (writable, writable)
    if not writable:
        assert "the run is finished, but" in said and said.count("cannot be written") == 1


@pytest.mark.parametrize("writable", [True, False])
def test_the_doctor_keeps_the_speed_of_the_host_or_warns(writable, tmp_path):
    if not writable:
        (tmp_path / "cache").write_text("")
    check = links.kept(SimpleNamespace(local_rank=0), "PCIe", "10.0 GB/s", partial(KEEP_HOST, 2e-9, 1e10), {})
    if not writable:
        assert check.status == "warning" and "HF_HOME" in check.fix
        return
    assert (check.status, check.found) == ("ok", "10.0 GB/s; kept for `recipes plan`")
    host, source = host_of(run_of(hardware=Hardware(CARD.gpus * 2, cores=8), world=2))
    assert (host.adam, host.pcie, source) == (2e-9, 1e10, "measured here")
