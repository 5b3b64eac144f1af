"""A checkpoint counts once it is complete, and only then does an older one go."""

import errno
import json
import shutil
import tempfile
import threading

import pytest
import torch

from launch.host.processes import free_port
from launch.output import manifest
from launch.output.checkpoints import inspect, numbered, rotate
from tests.support.running import (
    SCRIPT,
    fork,
    launchers_environment,
    losses,
    model_flags,
    read_record,
    train_here,
)
from tests.support.waiting import PATIENCE

SIX_STEPS = "--max_steps 6 --save_steps 2 --save_total_limit 2 --learning_rate 1e-3 --logging_steps 1".split()


KEEPS_ONE = " ".join(SIX_STEPS).replace("limit 2", "limit 1").split()


def steps(folder):
    return [int(path.name.rpartition("-")[2]) for path in numbered(folder)]


@pytest.fixture(scope="module")
def whole_run(tiny_model, texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole")
    return train_here(tiny_model, texts, output, *SIX_STEPS), output


@pytest.fixture
def stopped(whole_run, tmp_path):
    """The folder as it was when the run had been killed after its last checkpoint."""
    folder = shutil.copytree(whole_run[1], tmp_path / "stopped")
    (folder / "model.safetensors").unlink()
    (folder / "run.json").write_text(json.dumps({**read_record(folder), "status": "running"}))
    return folder


def test_the_two_newest_are_kept_and_complete(whole_run):
    assert steps(whole_run[1]) == [6, 4]
    assert all(inspect(path).valid and not inspect(path).notes for path in numbered(whole_run[1]))


def test_the_arguments_that_trainer_saves_are_those_of_the_run(whole_run):
    args = torch.load(whole_run[1] / "checkpoint-6" / "training_args.bin", weights_only=False)
    assert args.save_total_limit == 2


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "manifest.json"])
def test_whatever_is_damaged_the_one_before_is_taken(damage, whole_run, stopped, tiny_model, texts):
    file = stopped / "checkpoint-6" / damage
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    resumed = train_here(tiny_model, texts, stopped, *SIX_STEPS)
    assert "checkpoint-6 is damaged" in resumed.output and "checkpoint-4, step 4" in resumed.output
    assert losses(resumed) == losses(whole_run[0])
    assert (stopped / "damaged-checkpoint-6").is_dir()


def test_a_save_that_was_cut_short_loses_only_itself(whole_run, stopped, tiny_model, texts):
    manifest.begin(stopped / "checkpoint-6", 6, "one process", 1)
    resumed = train_here(tiny_model, texts, stopped, *SIX_STEPS)
    assert "checkpoint-6 is incomplete (its save was not completed)" in resumed.output
    assert losses(resumed) == losses(whole_run[0])


@pytest.mark.parametrize("content", [None, '{"status": "run'])
def test_without_a_record_the_run_says_what_it_cannot_tell(content, stopped, tiny_model, texts):
    (stopped / "run.json").write_text(content) if content else (stopped / "run.json").unlink()
    resumed = train_here(tiny_model, texts, stopped, *SIX_STEPS)
    assert "run.json is missing or damaged" in " ".join(resumed.output.split())


def test_a_wrong_bit_in_the_record_costs_no_checkpoint(whole_run, stopped, tiny_model, texts):
    text = (stopped / "run.json").read_text()
    (stopped / "run.json").write_text(text.replace('"value": 0.001,', '"value": 0.003,', 1))
    resumed = train_here(tiny_model, texts, stopped, *SIX_STEPS)
    assert "run.json is missing or damaged" in " ".join(resumed.output.split())
    assert losses(resumed) == losses(whole_run[0])


def test_the_record_says_what_a_resume_kept(whole_run, stopped, tiny_model, texts):
    (stopped / "checkpoint-6").rename(stopped / "six")
    faster = ["5e-3" if word == "1e-3" else word for word in SIX_STEPS]
    for _ in range(2):  # the second start has the first one's record
        shutil.rmtree(stopped / "checkpoint-6", ignore_errors=True)
        resumed = train_here(tiny_model, texts, stopped, *faster)
        (stopped / "run.json").write_text(json.dumps({**resumed.record, "status": "running"}))
        assert "learning_rate 0.005 is ignored by a resume: 0.001 is kept" in " ".join(resumed.output.split())
        assert resumed.record["settings"]["learning_rate"]["value"] == 0.001
        assert losses(resumed) == losses(whole_run[0])


def test_intervals_and_callbacks_that_an_earlier_start_lacked_are_those_of_this_one(tiny_model, texts, tmp_path):
    """Trainer divides by an interval of 0, and looks up the state of each callback."""
    data = "--learning_rate 1e-3 --dataset_train_split train[:90%] --dataset_test_split train[90%:]".split()
    none = "--logging_strategy no --logging_steps 0 --eval_strategy no --eval_steps 0".split()
    train_here(tiny_model, texts, tmp_path, *data, *none, "--save_steps", "2", "--max_steps", "2")
    some = "--logging_steps 1 --eval_strategy steps --eval_steps 2 --save_steps 2 --early_stopping_patience 9".split()
    best = "--load_best_model_at_end --metric_for_best_model loss --max_steps 4".split()
    longer = train_here(tiny_model, texts, tmp_path, *data, *some, *best)
    assert longer.code == 0 and "checkpoint-2, step 2" in longer.output
    assert {3, 4} <= {entry["step"] for entry in longer.record["log_history"] if "loss" in entry}
    assert longer.record["best_step"] == 4
    assert "is ignored by a resume" not in " ".join(longer.output.split())


@pytest.mark.parametrize("steps", [None, "x", [], {}])
def test_a_finished_run_whose_steps_cannot_be_told_goes_on(steps, whole_run, tiny_model, texts, tmp_path):
    folder = shutil.copytree(whole_run[1], tmp_path / "finished")
    (folder / "run.json").write_text(json.dumps({**read_record(folder), "global_step": steps}))
    longer = train_here(tiny_model, texts, folder, *["8" if word == "6" else word for word in SIX_STEPS])
    assert longer.code == 0 and longer.record["global_step"] == 8


def test_a_finished_run_whose_model_is_gone_says_what_is_left(whole_run, tiny_model, texts, tmp_path):
    folder = shutil.copytree(whole_run[1], tmp_path / "finished")
    (folder / "model.safetensors").unlink()
    again = train_here(tiny_model, texts, folder, *SIX_STEPS)
    said = " ".join(again.output.split())
    assert again.code == 0 and "the model of the run is gone; left are checkpoint-6, checkpoint-4" in said
    assert "copy model.safetensors from checkpoint-6, which holds the same" in said


@pytest.mark.parametrize("checkpoint_too", [False, True])
def test_a_finished_run_whose_model_is_damaged_says_where_else_it_is(
    checkpoint_too, whole_run, tiny_model, texts, tmp_path
):
    folder = shutil.copytree(whole_run[1], tmp_path / "finished")
    for file in [folder / "model.safetensors", *([folder / "checkpoint-6/model.safetensors"] * checkpoint_too)]:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    said = " ".join(train_here(tiny_model, texts, folder, *SIX_STEPS).output.split())
    remedy = "--fresh trains it again" if checkpoint_too else "copy model.safetensors from checkpoint-6"
    assert f"model.safetensors has changed since it was written: {remedy}" in said


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_file_beside_the_weights_of_a_finished_run_is_told(name, whole_run, tiny_model, texts, tmp_path):
    for damage in (lambda file: file.unlink(), lambda file: file.write_bytes(bytes(file.stat().st_size))):
        folder = shutil.copytree(whole_run[1], tmp_path / "finished", dirs_exist_ok=True)
        damage(folder / name)
        said = " ".join(train_here(tiny_model, texts, folder, *SIX_STEPS).output.split())
        assert f": copy {name} from checkpoint-6, which holds the same" in said


def test_a_finished_run_whose_model_is_whole_says_nothing(whole_run, tiny_model, texts):
    assert "note" not in train_here(tiny_model, texts, whole_run[1], *SIX_STEPS).output


def test_killed_saves_and_removals_do_not_fill_the_disk(stopped, tiny_model, texts):
    manifest.begin(stopped / "checkpoint-6", 6, "one process", 1)
    (stopped / "checkpoint-2").mkdir()
    (stopped / "checkpoint-2").rename(stopped / "_removed-checkpoint-2")
    resumed = train_here(tiny_model, texts, stopped, *SIX_STEPS)
    assert "its save was not completed): skipped and deleted" in " ".join(resumed.output.split())
    assert sorted(path.name for path in stopped.glob("*checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


def test_an_older_one_stays_until_the_new_one_is_complete(tiny_model, texts, tmp_path, monkeypatch):
    """The disk takes nothing more while checkpoint-4 is completed in the background."""
    commit, seen = manifest.commit, []

    def fail_at_four(folder, names):
        seen.append((folder.name, threading.current_thread() is not threading.main_thread(), steps(folder.parent)))
        if folder.name == "checkpoint-4":
            raise OSError(errno.ENOSPC, "No space left on device")
        return commit(folder, names)

    monkeypatch.setattr(manifest, "commit", fail_at_four)
    failed = train_here(tiny_model, texts, tmp_path, *KEEPS_ONE)
    assert failed.code == 1 and "No space left on device" in failed.output
    assert seen == [("checkpoint-2", True, [2]), ("checkpoint-4", True, [4, 2])]
    assert steps(tmp_path) == [4, 2] and inspect(tmp_path / "checkpoint-2").valid

    monkeypatch.undo()
    resumed = train_here(tiny_model, texts, tmp_path, *KEEPS_ONE)
    assert resumed.code == 0 and "checkpoint-2, step 2" in resumed.output


def test_a_checkpoint_that_somebody_deletes_meanwhile_does_not_end_the_run(tiny_model, texts, tmp_path, monkeypatch):
    commit = manifest.commit

    def delete_first(folder, names):
        if folder.name == "checkpoint-4":
            shutil.rmtree(folder)
        return commit(folder, names)

    monkeypatch.setattr(manifest, "commit", delete_first)
    assert train_here(tiny_model, texts, tmp_path, *SIX_STEPS).code == 0
    assert steps(tmp_path) == [6, 2]


@pytest.mark.parametrize("flags", [SIX_STEPS, KEEPS_ONE], ids=["two are kept", "one is kept"])
def test_a_damaged_best_model_is_not_loaded(flags, tiny_model, texts, tmp_path, monkeypatch):
    commit = manifest.commit

    def damage_two(folder, names):
        whole = commit(folder, names)
        if folder.name == "checkpoint-2":
            (folder / "model.safetensors").write_bytes(bytes((folder / "model.safetensors").stat().st_size))
        return whole

    monkeypatch.setattr(manifest, "commit", damage_two)
    evaluate = "--eval_strategy steps --eval_steps 2 --dataset_train_split train[:90%] --dataset_test_split train[90%:]"
    best = "--load_best_model_at_end --metric_for_best_model loss --greater_is_better true"  # the first is the best
    outcome = train_here(tiny_model, texts, tmp_path, *flags, *evaluate.split(), *best.split())
    assert "checkpoint-2, the best, is damaged (model.safetensors has changed" in outcome.output
    assert (outcome.record["best_step"], outcome.record["model_step"]) == (2, 6)
    assert steps(tmp_path) == [6, 2]


def test_a_token_is_in_no_file(tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path, "--max_steps", "1", "--hub_token", "hf_verysecret")
    assert outcome.code == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in files)
    assert not any(b"verysecret" in path.read_bytes() for path in files)
    args = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert args.hub_token is None and args.max_steps == 1


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["a disk for both", "a disk each"])
def test_two_nodes_leave_one_checkpoint(shared, tiny_model, texts, tmp_path):
    """On a disk that both see, the manifest names the files of both."""
    outputs = [tmp_path / "first", tmp_path / ("first" if shared else "second")]
    world = {**launchers_environment(2, "standard.yaml", []), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    flags = [*model_flags(tiny_model, texts), *SIX_STEPS]
    with tempfile.TemporaryFile() as log:
        ranks = [
            fork({**world, "RANK": str(rank)}, [str(SCRIPT), *flags, "--output_dir", str(output)], log.fileno())
            for rank, output in enumerate(outputs)
        ]
        for process in ranks:
            process.join(PATIENCE)
        log.seek(0)
        assert [process.exitcode for process in ranks] == [0, 0], log.read().decode()
    states = {name for name in manifest.read(outputs[0] / "checkpoint-6")["files"] if name.startswith("rng_state")}
    assert states == ({"rng_state_0.pth", "rng_state_1.pth"} if shared else {"rng_state_0.pth"})
    assert steps(outputs[0]) == [6, 4] and inspect(outputs[0] / "checkpoint-6").valid


# --- Which ones go --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "newest", "limit", "best", "left"),
    [
        ([2, 4, 6], 6, 2, None, [6, 4]),
        ([2, 4, 6], 6, 1, None, [6]),
        ([2, 4, 6], 6, 1, 2, [6, 2]),
        ([2, 4, 6], 6, 2, 2, [6, 2]),
        ([2, 4, 6], 6, 3, 2, [6, 4, 2]),
        ([2, 4, 6], 6, None, None, [6, 4, 2]),
        ([2, 4, 6], 6, 0, None, [6, 4, 2]),
        ([9, 10, 11], 11, 2, None, [11, 10]),
        ([2, 4, 8, 10], 4, 2, None, [4, 2]),  # it resumed from 2, and never came to 8
    ],
)
def test_the_oldest_go_by_their_steps_whatever_their_times(there, newest, limit, best, left, tmp_path):
    for step in reversed(there):  # the newest has the oldest time
        (tmp_path / f"checkpoint-{step}").mkdir()
    rotate(tmp_path / f"checkpoint-{newest}", limit, str(tmp_path / f"checkpoint-{best}") if best else None)
    assert steps(tmp_path) == left


def test_one_that_was_never_completed_goes_first(tmp_path):
    for step in (2, 4, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    manifest.begin(tmp_path / "checkpoint-4", 4, "one process", 1)
    rotate(tmp_path / "checkpoint-6", 2, None)
    assert steps(tmp_path) == [6, 2]


def test_what_a_kill_left_of_a_deletion_is_no_checkpoint_and_goes_next_time(tmp_path):
    (tmp_path / "_removed-checkpoint-2").mkdir()
    (tmp_path / "_removed-checkpoint-2" / "optimizer.pt").touch()
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    rotate(tmp_path / "checkpoint-4", 1, None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
