"""A run resumes only from a valid checkpoint, and whatever is wrong with another is named."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.host.world import World
from launch.output import checkpoints, record
from launch.output.checkpoints import inspect, listed, manifest_of, numbered, rotate
from launch.output.other_world import AnyWorld

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


def faults(path):
    return list(inspect(path).faults)


# --- With a manifest ------------------------------------------------------------------------------


def test_manifest_json_names_the_step_engine_processes_and_files_of_a_checkpoint(checkpoint):
    contents = manifest_of(checkpoint)
    assert (contents["step"], contents["engine"], contents["world_size"]) == (4, "one process", 1)
    assert set(FILES) <= set(contents["files"])
    assert (faults(checkpoint), inspect(checkpoint).notes, inspect(checkpoint).step) == ([], (), 4)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_or_missing_checkpoint_file_is_named(name, checkpoint):
    file = checkpoint / name
    whole = file.read_bytes()
    half = len(whole) // 2
    for content in (bytes([whole[0] ^ 1]) + whole[1:], whole[:half] + bytes(len(whole) - half), whole[:-1]):
        file.write_bytes(content)
        assert faults(checkpoint) == [f"{name} has changed since it was written"]
    file.unlink()
    assert faults(checkpoint) == [f"{name} is missing"]


def test_a_damaged_manifest_json_invalidates_the_checkpoint(checkpoint):
    file = checkpoint / "manifest.json"
    whole = file.read_bytes()
    changed = [whole.replace(b'"step": 4', b'"step": 5'), whole.replace(b'"bytes": 1', b'"bytes": 2')]
    for content in (b"", b"[]", whole[:-9], *changed):
        file.write_bytes(content)
        assert faults(checkpoint) == ["manifest.json is damaged"]


def test_every_checkpoint_file_is_flushed_to_disk_before_the_manifest_is_committed(checkpoint, monkeypatch):
    """A machine that crashes loses what was not flushed, and `rotate` deletes after `commit`."""
    flush, seen = checkpoints.flush, []
    monkeypatch.setattr(
        checkpoints, "flush", lambda path: seen.append((path, manifest_of(checkpoint).get("files"))) or flush(path)
    )
    checkpoints.begin(checkpoint, 4, "one process", 1)
    checkpoints.commit(checkpoint, listed(checkpoint))
    before = {path for path, files in seen if files is None}
    assert {checkpoint / name for name in listed(checkpoint)} | {checkpoint, checkpoint.parent} <= before
    path, files = seen[-1]
    assert path == checkpoint and {*files} == {*listed(checkpoint)}


def test_a_checkpoint_named_after_a_wrong_step_is_damaged_but_a_name_that_is_no_step_is_valid(checkpoint):
    moved = checkpoint.rename(checkpoint.with_name("checkpoint-40"))
    assert faults(moved) == ["trainer_state.json belongs to step 4"]
    inspected = inspect(moved.rename(checkpoint.with_name("best7")))
    assert not inspected.faults and inspected.step == 4


# --- Without a manifest ---------------------------------------------------------------------------


def test_a_checkpoint_of_plain_trainer_is_valid_and_only_partly_checked(plain):
    assert faults(plain) == []
    assert inspect(plain).notes[0].startswith("checkpoint-4 has no manifest.json: it was checked only in part")
    weights = (plain / "model.safetensors").rename(plain / "other.safetensors")
    assert faults(plain) == ["its weights are missing"]
    weights.rename(plain / "model.safetensors")
    (plain / "trainer_state.json").write_text('{"a_field_of_old": 1}')
    assert faults(plain) == ["trainer_state.json is not a Trainer state"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["model.safetensors", *STATES]), kept=st.floats(0, 0.999))
def test_a_truncated_file_in_a_checkpoint_without_a_manifest_is_reported_as_damaged(plain, name, kept):
    whole = (plain / name).read_bytes()
    (plain / name).write_bytes(whole[: int(len(whole) * kept)])
    try:
        assert faults(plain) == [f"{name} is damaged or cannot be read"]
    finally:
        (plain / name).write_bytes(whole)


def test_a_checkpoint_without_optimizer_pt_notes_that_optimizer_and_schedule_start_afresh(plain):
    (plain / "optimizer.pt").unlink()
    assert faults(plain) == [] and "optimizer and schedule start afresh" in inspect(plain).notes[0]
    for sharded in ("optimizer_0", "global_step4"):  # of FSDP and DeepSpeed
        (plain / sharded).mkdir()
        (plain / sharded / "shard").touch()
        assert len(inspect(plain).notes) == 1
        shutil.rmtree(plain / sharded)


# --- Several --------------------------------------------------------------------------------------


def steps(folder):
    return [int(path.name.rpartition("-")[2]) for path in numbered(folder)]


def test_only_a_folder_whose_name_ends_in_a_step_is_a_checkpoint(checkpoint, tmp_path):
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert steps(tmp_path) == [4]


def test_a_damaged_checkpoint_is_renamed_with_all_its_files(checkpoint):
    before = {file.name for file in checkpoint.iterdir()}
    checkpoint.with_name("damaged-checkpoint-4").mkdir()
    kept = checkpoints.archive_damaged(checkpoint)
    assert kept.name == "damaged-checkpoint-4-2" and {file.name for file in kept.iterdir()} == before


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [(2, None, [10, 9]), (1, 4, [10, 4]), (3, 4, [10, 9, 4]), (None, None, [10, 9, 4])],
)
def test_rotation_deletes_checkpoints_by_step_and_not_by_mtime(limit, best, left, tmp_path):
    for step in (10, 9, 4):  # the newest has the oldest time
        (tmp_path / f"checkpoint-{step}").mkdir()
    rotate(tmp_path / "checkpoint-10", limit, str(tmp_path / f"checkpoint-{best}") if best else None)
    assert steps(tmp_path) == left


@pytest.mark.parametrize(("is_own", "left"), [(False, [6, 5, 2]), (True, [6, 5])])
def test_rotation_never_deletes_a_checkpoint_of_another_run(is_own, left, tmp_path):
    own, another = record.new_run(), record.new_run()
    for step, run in ((2, own), (5, own if is_own else another), (6, own)):
        checkpoints.begin(tmp_path / f"checkpoint-{step}", step, "one process", 1, run)
        checkpoints.commit(tmp_path / f"checkpoint-{step}", [])
    rotate(tmp_path / "checkpoint-6", 2, None)
    assert steps(tmp_path) == left


# --- Of another number of processes ---------------------------------------------------------------


def test_a_failed_conversion_to_another_number_of_processes_says_why_and_leaves_no_files(tmp_path, capsys):
    """Of a checkpoint as three processes of ZeRO-2 leave it, empty but for its names."""
    of_three = tmp_path / "checkpoint-8"
    folder = of_three / "global_step8"
    folder.mkdir(parents=True)
    (of_three / "latest").write_text("global_step8\n")
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"1" * 10)
    for rank in range(3):
        (folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"1" * 100)
        (of_three / f"rng_state_{rank}.pth").touch()
    with pytest.raises(RuntimeError, match=r"checkpoint-8 could not be converted.*: .*Error"):
        AnyWorld(tmp_path, World(), 2).prepare(of_three)
    assert "is converted from 3 to 2 data-parallel ranks" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]
