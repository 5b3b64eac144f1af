"""A checkpoint's manifest: whatever differs from what was written is named, and nothing is run."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.output import manifest
from launch.output.checkpoints import faults, inspect, newest_valid

FILES = (
    "config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt",
    "tokenizer.json", "tokenizer_config.json", "trainer_state.json", "training_args.bin",
)  # fmt: skip


@pytest.fixture
def checkpoint(real_checkpoint, tmp_path):
    return shutil.copytree(real_checkpoint, tmp_path / "checkpoint-4")


def commit(folder: Path) -> None:
    manifest.commit(folder, manifest.listed(folder))


def flip_a_bit(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def zero_a_page(content: bytes) -> bytes:
    start = len(content) // 2
    return content[:start] + bytes(len(content[start : start + 4096])) + content[start + 4096 :]


def test_it_names_what_wrote_the_checkpoint_and_every_file(checkpoint):
    contents = manifest.read(checkpoint)
    assert (contents["step"], contents["engine"], contents["world_size"]) == (4, "one process", 1)
    assert set(FILES) <= set(contents["files"]) and faults(checkpoint) == []
    assert contents["files"]["optimizer.pt"]["bytes"] == (checkpoint / "optimizer.pt").stat().st_size


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip_a_bit, zero_a_page], ids=["a flipped bit", "a page of zeros"])
def test_a_change_that_keeps_the_size_is_named(damage, name, checkpoint):
    file = checkpoint / name
    file.write_bytes(damage(file.read_bytes()))
    assert faults(checkpoint) == [f"{name} has changed since it was written"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_cut_off_file_is_named(name, checkpoint):
    file = checkpoint / name
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    assert faults(checkpoint) == [f"{name} has {size - 1} bytes, not {size}"]
    file.unlink()
    assert faults(checkpoint) == [f"{name} is missing"]


@pytest.mark.parametrize("name", ["rng_state_1.pth", "adapter_model.safetensors", "global_step4/zero.pt"])
def test_a_foreign_file_is_named(name, checkpoint):
    (checkpoint / name).parent.mkdir(exist_ok=True)
    (checkpoint / name).write_bytes(b"of another run")
    assert f"{name} does not belong to it" in faults(checkpoint)


def test_a_foreign_folder_is_named(checkpoint):
    (checkpoint / "pytorch_model_fsdp_0").mkdir()
    assert faults(checkpoint) == ["pytorch_model_fsdp_0/ does not belong to it"]


def test_what_a_file_system_keeps_for_itself_is_not_foreign(checkpoint):
    (checkpoint / ".nfs0000001").write_bytes(b"open elsewhere")
    assert faults(checkpoint) == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_byte_of_the_manifest_itself_counts(data, checkpoint):
    file = checkpoint / "manifest.json"
    before = file.read_bytes()
    position = data.draw(st.integers(0, len(before) - 1))
    byte = data.draw(st.integers(33, 126).filter(lambda number: number != before[position]))
    file.write_bytes(before[:position] + bytes([byte]) + before[position + 1 :])
    try:
        assert faults(checkpoint) == ["manifest.json is damaged"] or json.loads(file.read_bytes()) == json.loads(before)
    finally:
        file.write_bytes(before)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", bytes(200), b"[" * 100_000])
def test_an_unreadable_manifest_is_a_fault(content, checkpoint):
    (checkpoint / "manifest.json").write_bytes(content)
    assert inspect(checkpoint).faults


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["a folder", "a pipe"])
def test_a_manifest_that_is_not_a_file_is_a_fault(make, checkpoint):
    (checkpoint / "manifest.json").unlink()
    make(checkpoint / "manifest.json")
    assert faults(checkpoint)[0] == "manifest.json cannot be read"


def test_a_checkpoint_whose_save_was_cut_short_is_named(checkpoint):
    manifest.begin(checkpoint, 4, "one process", 1)
    assert faults(checkpoint) == ["its save was not completed"]
    commit(checkpoint)
    assert faults(checkpoint) == []


def test_nothing_is_committed_if_a_file_has_vanished(checkpoint):
    manifest.begin(checkpoint, 4, "one process", 1)
    assert not manifest.commit(checkpoint, [*manifest.listed(checkpoint), "gone.pt"])
    assert not manifest.is_committed(checkpoint)


def test_a_manifest_of_another_step_is_a_fault(checkpoint):
    assert faults(checkpoint.rename(checkpoint.with_name("checkpoint-6"))) == ["manifest.json is that of step 4"]


def test_a_state_that_this_trainer_cannot_read_is_a_fault(checkpoint):
    file = checkpoint / "trainer_state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "a_field_of_old": 1}))
    commit(checkpoint)
    assert faults(checkpoint) == ["trainer_state.json is not Trainer's"]


def test_the_one_before_is_taken(checkpoint):
    newer = shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-6"))
    (newer / "config.json").write_bytes(b"")
    newest, (damaged,) = newest_valid(checkpoint.parent)
    assert (newest.step, damaged.step) == (4, 6)


# --- Nothing is executed --------------------------------------------------------------------------


class Touches:
    """Pickled, it makes whoever loads it create a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.fixture
def by_deepspeed(checkpoint, tmp_path):
    """As DeepSpeed leaves one, with pickles that create the file `ran`; and without a manifest."""
    import torch

    (checkpoint / "manifest.json").unlink()
    folder = checkpoint / "global_step4"
    folder.mkdir()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"a": torch.ones(9), "b": Touches(tmp_path / "ran")}, folder / name)
    (checkpoint / "latest").write_text(folder.name)
    return checkpoint


def test_judging_deepspeeds_files_runs_nothing(by_deepspeed, tmp_path):
    assert faults(by_deepspeed) == []
    assert not (tmp_path / "ran").exists()


def test_a_damaged_file_of_deepspeeds_is_named_all_the_same(by_deepspeed):
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    file = by_deepspeed / "global_step4" / name
    file.write_bytes(file.read_bytes()[:-100])
    assert faults(by_deepspeed) == [f"{name} is cut off or damaged"]


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_config_that_a_resume_could_not_read_is_a_fault(name, checkpoint):
    (checkpoint / "manifest.json").unlink()
    (checkpoint / name).write_text("{")
    assert faults(checkpoint) == [f"{name} cannot be read"]
