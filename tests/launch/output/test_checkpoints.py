"""A run resumes only from a valid checkpoint: whatever is wrong is named, and nothing is run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.output import manifest
from launch.output.checkpoints import archive_damaged, faults, inspect, newest_valid, notes, numbered, rotate

STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
FILES = (
    *STATES, "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "trainer_state.json", "training_args.bin",
)  # fmt: skip


@pytest.fixture
def checkpoint(real_checkpoint, tmp_path):
    return shutil.copytree(real_checkpoint, tmp_path / "checkpoint-4")


@pytest.fixture
def plain(checkpoint):
    """As plain Trainer writes it, without a manifest."""
    (checkpoint / "manifest.json").unlink()
    return checkpoint


# --- With a manifest ------------------------------------------------------------------------------


def test_a_manifest_names_what_wrote_the_checkpoint_and_every_file(checkpoint):
    contents = manifest.read(checkpoint)
    assert (contents["step"], contents["engine"], contents["world_size"]) == (4, "one process", 1)
    assert set(FILES) <= set(contents["files"])
    assert (faults(checkpoint), notes(checkpoint)) == ([], [])


@pytest.mark.parametrize("name", FILES)
def test_any_damage_to_any_file_is_named(name, checkpoint):
    file = checkpoint / name
    whole, changed = file.read_bytes(), [f"{name} has changed since it was written"]
    half = len(whole) // 2
    for content, found in (
        (bytes([whole[0] ^ 1]) + whole[1:], changed),
        (whole[:half] + bytes(len(whole) - half), changed),
        (whole[:-1], [f"{name} has {len(whole) - 1} bytes, not {len(whole)}"]),
    ):
        file.write_bytes(content)
        assert faults(checkpoint) == found
    file.unlink()
    assert faults(checkpoint) == [f"{name} is missing"]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", bytes(200)])
def test_an_unreadable_manifest_is_a_fault(content, checkpoint):
    (checkpoint / "manifest.json").write_bytes(content)
    assert faults(checkpoint) == ["manifest.json is damaged"]


def test_a_save_that_was_cut_short_is_named(checkpoint):
    manifest.begin(checkpoint, 4, "one process", 1)
    assert faults(checkpoint) == ["its save was not completed"]
    assert not manifest.commit(checkpoint, [*manifest.listed(checkpoint), "gone.pt"])
    assert not manifest.is_committed(checkpoint)
    assert manifest.commit(checkpoint, manifest.listed(checkpoint)) and faults(checkpoint) == []


# --- Trainer's state ------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 5, 40])
def test_a_number_that_is_not_its_step_is_a_fault(step, checkpoint):
    moved = checkpoint.rename(checkpoint.with_name(f"checkpoint-{step}"))
    assert faults(moved) == ["trainer_state.json is that of step 4"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a_field_of_old": 1}'])
def test_a_state_that_this_trainer_cannot_read_is_a_fault(content, checkpoint):
    (checkpoint / "trainer_state.json").write_text(content)
    manifest.commit(checkpoint, manifest.listed(checkpoint))
    assert faults(checkpoint) == ["trainer_state.json is not Trainer's"]


def test_a_folder_of_another_name_is_inspected_by_its_content_alone(checkpoint):
    inspected = inspect(checkpoint.rename(checkpoint.with_name("best7")))
    assert inspected.valid and inspected.step == 4


# --- Without a manifest ---------------------------------------------------------------------------


def test_what_plain_trainer_wrote_is_valid_and_judged_in_part(plain):
    assert faults(plain) == []
    assert notes(plain)[0].startswith("checkpoint-4 has no manifest.json: it was judged in part")
    (plain / "checkpoint-is-incomplete.txt").touch()
    assert faults(plain) == ["marked incomplete"]


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json", *STATES])
def test_a_missing_file_is_a_fault(name, plain):
    (plain / name).unlink()
    assert len(faults(plain)) == 1


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["model.safetensors", "trainer_state.json", *STATES]), kept=st.floats(0, 0.999))
def test_a_file_cut_off_anywhere_is_a_fault(plain, name, kept):
    whole = (plain / name).read_bytes().rstrip(b"\n")  # a JSON file without its last line break is still whole
    (plain / name).write_bytes(whole[: int(len(whole) * kept)])
    try:
        assert inspect(plain).faults
    finally:
        (plain / name).write_bytes(whole)


def test_zeros_in_the_middle_of_a_state_are_a_fault(plain):
    content = bytearray((plain / "optimizer.pt").read_bytes())
    content[len(content) // 2 - 50 : len(content) // 2 + 50] = bytes(100)
    (plain / "optimizer.pt").write_bytes(bytes(content))
    assert faults(plain) == ["optimizer.pt is damaged or cannot be loaded (BadZipFile)"]


def test_weights_alone_are_whole_and_say_what_starts_afresh(plain):
    for name in STATES:
        (plain / name).unlink()
    assert faults(plain) == []
    assert "optimizer, schedule and random state start afresh" in notes(plain)[0]


class Touches:
    """Pickled, it makes whoever loads it create a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_no_pickle_is_run(plain, tmp_path):
    """DeepSpeed pickles classes of its own, which cannot be loaded without running them."""
    (plain / "global_step4").mkdir()
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"a": torch.ones(9), "b": Touches(tmp_path / "ran")}, plain / "global_step4" / name)
    assert faults(plain) == []
    torch.save(Touches(tmp_path / "ran"), plain / "optimizer.pt")
    assert faults(plain) == ["optimizer.pt is damaged or cannot be loaded (UnpicklingError)"]
    assert not (tmp_path / "ran").exists()


def test_shards_of_fsdp_need_no_file_of_weights(plain):
    for name in ("model.safetensors", "optimizer.pt"):
        (plain / name).unlink()
    for name, state in {"pytorch_model_fsdp_0": "model", "optimizer_0": "optimizer"}.items():
        content = {state: {"weight": torch.arange(1000.0)}}
        dcp.save(content, storage_writer=dcp.FileSystemWriter(plain / name), no_dist=True)
    assert faults(plain) == [] and len(notes(plain)) == 1
    (plain / "rng_state.pth").unlink()
    assert faults(plain) == ["rng_state is missing"]


# --- Several --------------------------------------------------------------------------------------


def steps(folder):
    return [int(path.name.rpartition("-")[2]) for path in numbered(folder)]


def test_the_newest_valid_one_is_chosen_over_newer_damaged_ones(checkpoint, tmp_path):
    for step in (9, 10):
        shutil.copytree(checkpoint, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    newest, damaged = newest_valid(tmp_path)
    assert (newest.step, [found.step for found in damaged], steps(tmp_path)) == (4, [10, 9], [10, 9, 4])


def test_a_damaged_one_is_renamed_with_all_its_files(checkpoint):
    before = {file.name for file in checkpoint.iterdir()}
    checkpoint.with_name("damaged-checkpoint-4").mkdir()
    kept = archive_damaged(checkpoint)
    assert kept.name == "damaged-checkpoint-4-2" and {file.name for file in kept.iterdir()} == before


@pytest.mark.parametrize(
    ("there", "newest", "limit", "best", "left"),
    [
        ([2, 4, 6], 6, 2, None, [6, 4]),
        ([2, 4, 6], 6, 1, None, [6]),
        ([2, 4, 6], 6, 1, 2, [6, 2]),
        ([2, 4, 6], 6, 3, 2, [6, 4, 2]),
        ([2, 4, 6], 6, None, None, [6, 4, 2]),
        ([9, 10, 11], 11, 2, None, [11, 10]),
        ([2, 4, 8, 10], 4, 2, None, [4, 2]),  # it resumed from 2, and never came to 8
    ],
)
def test_the_oldest_go_by_their_steps_whatever_their_times(there, newest, limit, best, left, tmp_path):
    (tmp_path / f"_removed-checkpoint-{there[0]}").mkdir()  # as a kill leaves it
    for step in reversed(there):  # the newest has the oldest time
        (tmp_path / f"checkpoint-{step}").mkdir()
    rotate(tmp_path / f"checkpoint-{newest}", limit, str(tmp_path / f"checkpoint-{best}") if best else None)
    assert steps(tmp_path) == left


@pytest.mark.parametrize(("is_own", "left"), [(False, [6, 5, 2]), (True, [6, 5])])
def test_what_is_another_runs_is_never_deleted(is_own, left, tmp_path):
    own, another = manifest.new_run(), manifest.new_run()
    for step, run in ((2, own), (5, own if is_own else another), (6, own)):
        manifest.begin(tmp_path / f"checkpoint-{step}", step, "one process", 1, run)
        manifest.commit(tmp_path / f"checkpoint-{step}", [])
    rotate(tmp_path / "checkpoint-6", 2, None)
    assert steps(tmp_path) == left
