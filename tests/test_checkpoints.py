"""A checkpoint is resumed from only if it is whole; damaged ones are named, and nothing is deleted."""

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.checkpoints import checkpoints, faults, newest_valid, set_aside


@pytest.fixture
def checkpoint(real_checkpoint, tmp_path):
    """A copy of a checkpoint that Trainer wrote, to be damaged."""
    return shutil.copytree(real_checkpoint, tmp_path / "checkpoint-4")


def test_what_trainer_wrote_is_valid(checkpoint):
    assert faults(checkpoint, world_size=1) == []


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
def test_a_missing_file_is_named(checkpoint, name):
    (checkpoint / name).unlink()
    assert len(faults(checkpoint, world_size=1)) == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]),
    kept=st.floats(0, 0.999),
)
def test_a_file_cut_off_anywhere_is_noticed(checkpoint, name, kept):
    file = checkpoint / name
    whole = file.read_bytes().rstrip(b"\n")  # a JSON file without its last line break is still whole
    file.write_bytes(whole[: int(len(whole) * kept)])
    try:
        assert faults(checkpoint, world_size=1)
    finally:
        file.write_bytes(whole)


def test_trainers_own_marker_of_an_incomplete_checkpoint_counts(checkpoint):
    (checkpoint / "checkpoint-is-incomplete.txt").touch()
    assert faults(checkpoint, world_size=1) == ["marked incomplete"]


def test_one_rng_state_a_rank_is_needed(checkpoint):
    assert "rng_state_1.pth is missing" in faults(checkpoint, world_size=2)


def test_the_newest_valid_one_is_chosen_over_a_newer_damaged_one(checkpoint):
    newer = shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-10"))
    (newer / "optimizer.pt").unlink()
    assert newest_valid(checkpoints(checkpoint.parent, 1)).step == 4


def test_ten_is_newer_than_nine(checkpoint):
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-10"))
    shutil.copytree(checkpoint, checkpoint.with_name("checkpoint-9"))
    assert [found.step for found in checkpoints(checkpoint.parent, 1)] == [10, 9, 4]


def test_a_damaged_one_is_set_aside_with_all_its_files(checkpoint):
    (checkpoint / "optimizer.pt").unlink()
    before = {file.name for file in checkpoint.iterdir()}
    kept = set_aside(checkpoints(checkpoint.parent, 1)[0])
    assert {file.name for file in kept.iterdir()} == before


def test_folders_that_only_look_like_checkpoints_are_left_alone(tmp_path):
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert checkpoints(tmp_path, 1) == []


def test_a_shard_that_the_index_names_must_be_there(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors is missing" in faults(checkpoint, 1)
