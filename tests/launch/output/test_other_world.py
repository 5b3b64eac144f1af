"""Checkpoints of another number of processes: told by their files, and converted if needed."""

import pytest

from launch.host.world import World
from launch.output.other_world import AnyWorld


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


def test_a_failed_conversion_to_another_number_of_processes_says_why_and_leaves_no_files(of_three, tmp_path):
    said = []
    with pytest.raises(RuntimeError, match=r"checkpoint-8 could not be converted.*: .*Error"):
        AnyWorld(tmp_path, World(), 2, said.append).prepare(of_three)
    assert "is converted from 3 to 2 data-parallel ranks" in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]
