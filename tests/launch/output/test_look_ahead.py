"""What can be told of the output folder is told before the data is tokenized."""

import fcntl
import json
import os
import shutil

import datasets
import pytest

from tests.support.running import launch_quickly, model_flags, read_record, train_here

pytestmark = pytest.mark.usefixtures("own_cache")
TWO_STEPS = ["--max_steps", "2", "--save_steps", "1"]


@pytest.fixture
def finished(real_checkpoint, tmp_path):
    """A run of four steps."""
    return shutil.copytree(real_checkpoint.parent, tmp_path / "finished")


def tokens():
    return list(datasets.config.HF_DATASETS_CACHE.rglob("*.arrow"))


def refused(tiny_model, texts, folder, *flags):
    """What is said of it, before any token was made."""
    outcome = train_here(tiny_model, texts, folder, *TWO_STEPS, *flags)
    assert outcome.code == 2 and not tokens(), outcome.output
    return outcome.output


@pytest.mark.parametrize("inside", ["", "deeper", "deeper/still"])
def test_a_file_in_the_way(inside, tiny_model, texts, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "cannot be written: Not a directory" in refused(tiny_model, texts, tmp_path / "file" / inside)


def test_another_run_is_writing_there(tiny_model, texts, tmp_path):
    (tmp_path / "out").mkdir()
    handle = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as a run holds it
    try:
        assert "another run is writing" in refused(tiny_model, texts, tmp_path / "out")
    finally:
        os.close(handle)


def test_a_model_that_was_not_trained_there(tiny_model, texts, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    assert "would be overwritten" in refused(tiny_model, texts, model)


def test_another_training_whether_it_is_finished_or_not(finished, tiny_model, texts):
    for status in ("finished", "running"):
        (finished / "run.json").write_text(json.dumps({**read_record(finished), "status": status, "checksum": None}))
        assert "with packing False, not True" in refused(tiny_model, texts, finished, "--packing")
    assert (finished / "checkpoint-4").is_dir()


def test_a_named_checkpoint_of_another_training(finished, tiny_model, texts, tmp_path):
    named = ["--resume_from_checkpoint", str(finished / "checkpoint-4")]
    assert "with packing False, not True" in refused(tiny_model, texts, tmp_path / "out", "--packing", *named)
    assert not (tmp_path / "out").exists()


def test_damaged_checkpoints_are_not_moved_for_a_run_that_is_refused(finished, tiny_model, texts):
    (finished / "run.json").write_text(json.dumps({**read_record(finished), "status": "running", "checksum": None}))
    (finished / "checkpoint-4" / "model.safetensors").write_bytes(b"cut off")
    before = sorted(finished.rglob("*"))
    refused(tiny_model, texts, finished, "--packing")
    assert sorted(finished.rglob("*")) == before


def test_a_finished_run_needs_no_tokens(finished, tiny_model, texts):
    outcome = train_here(tiny_model, texts, finished, "--max_steps", "4")
    assert outcome.code == 0 and "nothing to train" in outcome.output and not tokens()


def test_two_ranks_say_it_once(finished, tiny_model, texts):
    flags = [*model_flags(tiny_model, texts), "--max_steps", "4"]
    outcome = launch_quickly(*flags, output=finished)
    assert outcome.code == 0 and outcome.output.count("nothing to train") == 1, outcome.output
    outcome = launch_quickly(*flags, "--packing", output=finished)
    assert outcome.code == 1 and outcome.output.count("with packing False, not True") == 1, outcome.output


def test_a_folder_that_is_not_there_is_not_made_for_data_with_a_mistake(tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path / "out", "--dataset_text_field", "nowhere")
    assert outcome.code == 2 and not (tmp_path / "out").exists()
