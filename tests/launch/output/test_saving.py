"""A checkpoint counts once it is complete, and only then does an older one go."""

import errno
import tempfile
import threading
import time

import pytest
import torch

from launch.host.processes import free_port
from launch.output import checkpoints
from launch.output.checkpoints import inspect, numbered
from recipes.run.files import shipped
from tests.launch.output.test_checkpoints import steps
from tests.support.running import SCRIPT, fork, launched, model_flags, train_here
from tests.support.waiting import PATIENCE

SIX_STEPS = "--max_steps 6 --save_steps 2 --save_total_limit 2 --learning_rate 1e-3 --logging_steps 1".split()
KEEPS_ONE = " ".join(SIX_STEPS).replace("limit 2", "limit 1").split()


def test_save_total_limit_2_keeps_the_two_newest_checkpoints_and_none_holds_the_hub_token(tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path, *SIX_STEPS, "--hub_token", "hf_verysecret")
    assert steps(tmp_path) == [6, 4] and "verysecret" not in outcome.output
    assert not any(inspect(path).faults or inspect(path).notes for path in numbered(tmp_path))
    args = torch.load(tmp_path / "checkpoint-6" / "training_args.bin", weights_only=False)
    assert (args.hub_token, args.max_steps) == (None, 6)
    assert not any(b"verysecret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_schedule_free_optimizer_saves_its_averaged_weights_also_without_an_evaluation(tiny_model, texts, tmp_path):
    """Its steps train other weights (Defazio et al. 2024). Trainer averages only to evaluate."""
    flags = [*SIX_STEPS, *"--optim schedule_free_adamw --lr_scheduler_type constant".split()]
    splits = "--dataset_train_split train[:50] --dataset_test_split train[50:60]".split()
    evaluates = [(), ("--eval_strategy", "steps", "--eval_steps", "2")]
    plain, evaluated = (tmp_path / name for name in ("plain", "evaluated"))
    for folder, more in zip((plain, evaluated), evaluates, strict=True):
        assert train_here(tiny_model, texts, folder, *flags, *splits, *more).code == 0
    for name in ("model.safetensors", "checkpoint-4/model.safetensors"):
        assert (plain / name).read_bytes() == (evaluated / name).read_bytes()


def test_the_older_checkpoint_is_kept_until_the_new_checkpoint_is_complete(tiny_model, texts, tmp_path, monkeypatch):
    """The disk takes nothing more while checkpoint-4 is completed in the background."""
    commit, seen = checkpoints.commit, []

    def fail_at_four(folder, names):
        seen.append((folder.name, threading.current_thread() is not threading.main_thread(), steps(folder.parent)))
        if folder.name == "checkpoint-4":
            raise OSError(errno.ENOSPC, "No space left on device")
        return commit(folder, names)

    monkeypatch.setattr(checkpoints, "commit", fail_at_four)
    failed = train_here(tiny_model, texts, tmp_path, *KEEPS_ONE)
    assert failed.code == 1 and "No space left on device" in failed.output
    assert seen == [("checkpoint-2", True, [2]), ("checkpoint-4", True, [4, 2])]
    assert steps(tmp_path) == [4, 2] and not inspect(tmp_path / "checkpoint-2").faults

    monkeypatch.undo()
    resumed = train_here(tiny_model, texts, tmp_path, *KEEPS_ONE)
    assert resumed.code == 0 and "checkpoint-2, step 2" in resumed.output


def test_a_reporter_that_uploads_checkpoints_gets_complete_ones(tiny_model, texts, tmp_path, monkeypatch):
    def on_save(self, args, state, control, **_):
        uploaded.append(inspect(tmp_path / f"checkpoint-{state.global_step}").faults)

    uploaded, commit = [], checkpoints.commit
    monkeypatch.setattr(checkpoints, "commit", lambda *args: time.sleep(0.3) or commit(*args))
    monkeypatch.setattr("transformers.trainer_callback.DefaultFlowCallback.on_save", on_save)
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "1")
    assert train_here(tiny_model, texts, tmp_path, *SIX_STEPS).code == 0 and uploaded == [()] * 3


def test_load_best_model_at_end_does_not_load_a_damaged_checkpoint(tiny_model, texts, tmp_path, monkeypatch):
    commit = checkpoints.commit

    def damage_two(folder, names):
        whole = commit(folder, names)
        if folder.name == "checkpoint-2":
            (folder / "model.safetensors").write_bytes(bytes((folder / "model.safetensors").stat().st_size))
        return whole

    monkeypatch.setattr(checkpoints, "commit", damage_two)
    evaluate = "--eval_strategy steps --eval_steps 2 --dataset_train_split train[:90%] --dataset_test_split train[90%:]"
    best = "--load_best_model_at_end --metric_for_best_model loss --greater_is_better true"  # the first is the best
    outcome = train_here(tiny_model, texts, tmp_path, *KEEPS_ONE, *evaluate.split(), *best.split())
    assert "the best model, checkpoint-2, is not loaded: model.safetensors has changed" in outcome.output
    assert (outcome.record["best_step"], outcome.record["model_step"]) == (2, 6)
    assert steps(tmp_path) == [6, 2]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["a disk for both", "a disk each"])
def test_the_checkpoint_of_two_nodes_is_valid_on_a_shared_and_on_separate_disks(shared, tiny_model, texts, tmp_path):
    """On a disk that both see, the manifest names the files of both."""
    outputs = [tmp_path / "first", tmp_path / ("first" if shared else "second")]
    world = {**launched(shipped("standard.yaml")), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
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
    names = checkpoints.manifest_of(outputs[0] / "checkpoint-6")["files"]
    states = {name for name in names if name.startswith("rng_state")}
    assert states == ({"rng_state_0.pth", "rng_state_1.pth"} if shared else {"rng_state_0.pth"})
    drawn = [torch.load(file, weights_only=False)["cpu"] for file in tmp_path.rglob("checkpoint-6/rng_state_*.pth")]
    assert len(drawn) == 2 and not torch.equal(*drawn)  # else all ranks drop the same units
    assert steps(outputs[0]) == [6, 4] and not inspect(outputs[0] / "checkpoint-6").faults
