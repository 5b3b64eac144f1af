"""Checkpoints of another number of processes: told by their files, and converted if needed."""

import shutil
from collections import namedtuple

import pytest

from launch.host.world import World
from launch.output.other_world import AnyWorld, note, remove_leftovers, shards, writers
from recipes.errors import UserError


@pytest.fixture
def of_three(tmp_path):
    """A checkpoint as three processes of ZeRO-2 leave it, empty but for its names."""
    checkpoint = tmp_path / "checkpoint-8"
    folder = checkpoint / "global_step8"
    folder.mkdir(parents=True)
    (checkpoint / "latest").write_text("global_step8\n")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"1" * 10)
    for rank in range(3):
        (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"1" * 100)
        (checkpoint / f"rng_state_{rank}.pth").touch()
    return checkpoint


def reader(folder, ranks, said=None) -> AnyWorld:
    return AnyWorld(folder, World(), ranks, (said if said is not None else []).append)


def test_who_wrote_it_is_read_from_its_files(of_three, real_checkpoint):
    assert (writers(of_three), shards(of_three)) == (3, 3)
    assert (writers(real_checkpoint), shards(real_checkpoint)) == (1, 0)


def test_a_note_only_if_the_number_of_processes_differs(of_three):
    assert note(of_three, 3) is None
    assert "written by 3 processes, 2 go on" in note(of_three, 2)


@pytest.mark.parametrize("ranks", [3, 1])
def test_nothing_is_converted_that_fits(ranks, of_three, real_checkpoint, tmp_path):
    reader(tmp_path, ranks).prepare(of_three if ranks == 3 else real_checkpoint)
    reader(tmp_path, ranks).prepare(None)
    assert not list(tmp_path.glob("converted-*"))


def test_a_full_disk_is_refused_before_anything_is_written(of_three, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1000, 400, 600))  # 710 are needed
    with pytest.raises(UserError, match="--num_processes 3"):
        reader(tmp_path, 2).prepare(of_three)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]


def test_a_failed_conversion_says_why_and_leaves_nothing(of_three, tmp_path):
    said = []
    with pytest.raises(RuntimeError, match=r"checkpoint-8 could not be converted.*: .*Error"):
        reader(tmp_path, 2, said).prepare(of_three)
    assert "is converted from 3 to 2 data-parallel ranks" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]


def test_what_a_killed_run_has_left_is_removed(of_three, tmp_path):
    (tmp_path / "converted-checkpoint-8" / "global_step8" / "tmp").mkdir(parents=True)
    (tmp_path / ".tmpaOGUwI").touch()  # of the final model, by safetensors
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]
    assert shards(of_three) == 3
