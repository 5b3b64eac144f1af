"""A run resumes only from a valid checkpoint. Damaged ones are named and never deleted.

These have no manifest: plain Trainer has written them, or an older version of this program.
"""

import json
import os
import pathlib
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.output.checkpoints import archive_damaged, faults, inspect, newest_valid, notes, numbered


@pytest.fixture
def checkpoint(real_checkpoint, tmp_path):
    """A copy of a checkpoint, as plain Trainer writes it, to be damaged."""
    return shutil.copytree(real_checkpoint, tmp_path / "checkpoint-4", ignore=shutil.ignore_patterns("manifest.json"))


def test_what_trainer_wrote_is_valid(checkpoint):
    assert faults(checkpoint) == []


def test_it_is_said_that_it_was_judged_in_part(checkpoint, real_checkpoint):
    (note,) = notes(checkpoint)
    assert note.startswith("checkpoint-4 has no manifest.json: it was judged in part")
    assert notes(real_checkpoint) == []


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
def test_a_missing_file_is_named(checkpoint, name):
    (checkpoint / name).unlink()
    assert len(faults(checkpoint)) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]),
    kept=st.floats(0, 0.999),
)
def test_a_file_cut_off_anywhere_is_a_fault(checkpoint, name, kept):
    file = checkpoint / name
    # A JSON file without its last line break is still whole.
    whole = file.read_bytes().rstrip(b"\n")
    file.write_bytes(whole[: int(len(whole) * kept)])
    try:
        assert faults(checkpoint)
    finally:
        file.write_bytes(whole)


def test_trainers_own_marker_of_an_incomplete_checkpoint_counts(checkpoint):
    (checkpoint / "checkpoint-is-incomplete.txt").touch()
    assert faults(checkpoint) == ["marked incomplete"]


def test_the_ranks_that_wrote_it_are_known_from_its_own_files(checkpoint):
    for rank in range(2):
        shutil.copy(checkpoint / "rng_state.pth", checkpoint / f"rng_state_{rank}.pth")
    (checkpoint / "rng_state.pth").unlink()
    assert faults(checkpoint) == []


def test_a_gap_between_the_ranks_is_a_fault(checkpoint):
    for rank in (0, 2):
        shutil.copy(checkpoint / "rng_state.pth", checkpoint / f"rng_state_{rank}.pth")
    assert faults(checkpoint) == ["rng_state_1.pth is missing"]


STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.fixture
def weights_alone(checkpoint):
    for name in STATES:
        (checkpoint / name).unlink()
    return checkpoint


def test_weights_alone_are_whole_and_say_what_starts_afresh(weights_alone):
    assert faults(weights_alone) == []
    assert "optimizer, schedule and random state start afresh" in notes(weights_alone)[0]


@pytest.mark.parametrize("left", STATES)
def test_some_states_without_the_others_are_a_fault(left, checkpoint):
    for name in set(STATES) - {left}:
        (checkpoint / name).unlink()
    assert sorted(faults(checkpoint)) == sorted(f"{name} is missing" for name in STATES if name != left)


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth"])
def test_zeros_in_the_middle_are_a_fault(checkpoint, name):
    content = bytearray((checkpoint / name).read_bytes())
    middle = len(content) // 2
    content[middle - 50 : middle + 50] = bytes(100)
    (checkpoint / name).write_bytes(bytes(content))
    assert faults(checkpoint) == [f"{name} is cut off or damaged"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["model.safetensors", "trainer_state.json", "model.safetensors.index.json"]),
    content=st.binary(max_size=60),
)
def test_no_bytes_make_the_inspection_itself_fail(checkpoint, name, content):
    file = checkpoint / name
    before = file.read_bytes() if file.exists() else None
    file.write_bytes(content)
    try:
        assert inspect(checkpoint).faults
    finally:
        file.unlink() if before is None else file.write_bytes(before)


def test_a_file_that_a_resume_would_not_load_is_a_fault_and_is_not_run(checkpoint, tmp_path):
    class Touches:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "ran",)

    torch.save(Touches(), checkpoint / "optimizer.pt")
    assert faults(checkpoint) == ["optimizer.pt cannot be loaded (UnpicklingError)"]
    assert not (tmp_path / "ran").exists()


def test_a_state_with_fields_of_another_version_is_a_fault(checkpoint):
    file = checkpoint / "trainer_state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "a_field_of_old": 1}))
    assert faults(checkpoint) == ["trainer_state.json is not Trainer's"]


@pytest.mark.parametrize("step", [0, 5, 40])
@pytest.mark.parametrize("whole", [True, False], ids=["with a manifest", "without one"])
def test_a_number_that_is_not_its_step_is_a_fault(whole, step, checkpoint, real_checkpoint):
    shutil.copytree(real_checkpoint, checkpoint, dirs_exist_ok=True) if whole else None
    assert "that of step 4" in faults(checkpoint.rename(checkpoint.with_name(f"checkpoint-{step}")))[0]


@pytest.mark.parametrize("name", ["trainer_state.json", "config.json", "model.safetensors", "optimizer.pt", "latest"])
def test_a_pipe_in_place_of_a_file_is_a_fault(name, checkpoint):
    """Whoever opens it waits for somebody to write into it."""
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    assert faults(checkpoint) == [f"{name} is not a file"]


def test_the_newest_valid_one_is_chosen_over_a_newer_damaged_one(checkpoint):
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-10"))
    (checkpoint.with_name("checkpoint-10") / "optimizer.pt").unlink()
    newest, damaged = newest_valid(checkpoint.parent)
    assert (newest.step, [found.step for found in damaged]) == (4, [10])


def test_ten_is_newer_than_nine(checkpoint):
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-10"))
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-9"))
    assert [path.name for path in numbered(checkpoint.parent)] == ["checkpoint-10", "checkpoint-9", "checkpoint-4"]


def test_a_damaged_one_is_renamed_with_all_its_files(checkpoint):
    (checkpoint / "optimizer.pt").unlink()
    before = {file.name for file in checkpoint.iterdir()}
    kept = archive_damaged(checkpoint)
    assert {file.name for file in kept.iterdir()} == before


def test_folders_that_only_look_like_checkpoints_are_left_alone(tmp_path):
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert numbered(tmp_path) == []


def test_a_shard_that_the_index_names_must_be_there(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors is missing" in faults(checkpoint)


def test_a_folder_of_another_name_is_inspected_by_its_content_alone(checkpoint):
    inspected = inspect(checkpoint.rename(checkpoint.with_name("best7")))
    assert inspected.valid and inspected.step == 4
