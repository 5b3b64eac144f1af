"""A training on a stream: stopped and resumed it sees the same examples, bit for bit."""

import json

import pytest
from safetensors.torch import load_file

from tests.support.rows import jsonl, texts
from tests.support.running import launch_quickly, losses, model_flags, train_here

STREAM = "--dataset_streaming --save_steps 3 --logging_steps 1 --learning_rate 1e-3 --use_cpu".split()
EIGHT_STEPS = [*STREAM, "--max_steps", "8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Four small files: eight steps pass the end of the third round."""
    folder = tmp_path_factory.mktemp("parts")
    for part in range(4):
        jsonl(folder, texts(*(f"{part}.{row} " + "abc " * (row % 9) for row in range(10))), f"{part}.jsonl")
    return folder


@pytest.fixture
def watched(monkeypatch):
    """The examples of each step, in order; the training ends before step `stop`, as if killed."""
    from launch.training.trainer import RecipeTrainer

    seen, take = {"stop": None, "examples": []}, RecipeTrainer.get_batch_samples

    def get_batch_samples(trainer, *args):
        if trainer.state.global_step == seen["stop"]:
            raise KeyboardInterrupt
        samples, items = take(trainer, *args)
        seen["examples"].append([batch["input_ids"].tolist() for batch in samples])
        return samples, items

    monkeypatch.setattr(RecipeTrainer, "get_batch_samples", get_batch_samples)
    return seen


@pytest.mark.parametrize("flags", ["", "--packing --dataloader_num_workers 3"])
def test_a_resumed_stream_continues_at_the_next_example_with_identical_losses(flags, gpt2, data, tmp_path, watched):
    """And with the same masks of dropout, which this model has."""

    def train(folder, stop=None):
        watched["examples"], watched["stop"] = [], stop
        outcome = train_here(gpt2, data, tmp_path / folder, *EIGHT_STEPS, *flags.split())
        assert outcome.code == (0 if stop is None else 130), outcome.output
        return outcome, watched["examples"]

    whole, examples = train("whole")
    for stop in (4, 7):
        train(f"{stop}", stop)
        resumed, seen = train(f"{stop}")
        assert seen == examples[stop // 3 * 3 :]
        assert losses(resumed) == losses(whole)
        epochs = [entry["epoch"] for entry in resumed.record["log_history"] if "loss" in entry]
        assert epochs == [step / 8 for step in range(1, 9)]
        weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", f"{stop}")]
        assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_a_stream_resumed_with_other_dataloader_num_workers_starts_a_new_round(tiny_model, data, tmp_path, watched):
    train_here(tiny_model, data, tmp_path / "out", *STREAM, "--max_steps", "3")
    outcome = train_here(tiny_model, data, tmp_path / "out", *EIGHT_STEPS, "--dataloader_num_workers", "2")
    text = " ".join(outcome.output.split())
    assert "was written by another number of processes or workers" in text
    places = json.loads((tmp_path / "out" / "checkpoint-8" / "places_0.json").read_text())
    assert (places["workers"], places["round"]) == (2, 2)  # three steps were in the second round


def test_a_stream_stopped_by_a_malformed_row_resumes_once_the_row_is_fixed(tiny_model, tmp_path, watched):
    data = tmp_path / "data"
    data.mkdir()
    rows = [json.dumps({"text": f"row {row}", "source": "b" * 9_000}) for row in range(1_300)]  # read 10 MB at once
    (data / "a.jsonl").write_text("\n".join([*rows, '{"text": oops}', *rows]))
    batch = ["--global_batch_size", "250", "--per_device_train_batch_size", "125"]
    flags = [*STREAM, *batch, "--max_steps", "9", "--train_sampling_strategy", "sequential"]
    broken = train_here(tiny_model, data, tmp_path / "out", *flags)
    assert broken.code == 1
    text = " ".join(broken.output.split())
    assert "cannot be read: line " in text and "checkpoint-3" in text and "run the same command again" in text
    (data / "a.jsonl").write_text("\n".join([*rows, '{"text": "oops"}', *rows]))
    watched["examples"].clear()
    mended = train_here(tiny_model, data, tmp_path / "out", *flags)
    assert mended.code == 0, mended.output
    assert "since the checkpoint: the stream skips as many rows as were trained on" in " ".join(mended.output.split())
    assert len(watched["examples"]) == 6


@pytest.mark.slow
def test_two_ranks_resume_a_stream_with_the_losses_of_an_uninterrupted_run(tiny_model, data, tmp_path):
    more = "--dataloader_num_workers 2 --lr_scheduler_type constant"
    flags = [*model_flags(tiny_model, data), *STREAM, *more.split()]
    whole = launch_quickly(*flags, "--max_steps", "8", output=tmp_path / "whole")
    assert whole.code == 0, whole.output
    launch_quickly(*flags, "--max_steps", "6", output=tmp_path / "two")
    resumed = launch_quickly(*flags, "--max_steps", "8", output=tmp_path / "two")
    assert losses(resumed) == losses(whole)
    places = [json.loads((tmp_path / f"two/checkpoint-8/places_{rank}.json").read_text()) for rank in (0, 1)]
    assert [place["ranks"] for place in places] == [2, 2]
