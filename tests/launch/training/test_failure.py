"""A run that fails is explained as it trained, and what follows a finished one cannot fail it."""

import json

import pytest

from launch.train import main
from tests.support.running import model_flags, train_here

POSITIONS = 256  # of the tiny model, which no recipe's max_length may exceed


def fail(*_):
    raise RuntimeError("something broke\nin many lines")


@pytest.mark.parametrize(
    ("broken", "doing"),
    [
        ("launch.training.banner._summary", "printing its summary"),
        ("launch.training.timing.add_timings_row", "adding a row to"),
    ],
)
def test_what_fails_after_the_training_is_one_note(broken, doing, monkeypatch, tiny_model, texts, tmp_path):
    monkeypatch.setattr(broken, fail)
    measured = ["--max_steps", "4", "--measure", str(tmp_path / "timings.jsonl")]
    outcome = train_here(tiny_model, texts, tmp_path / "out", *measured)
    assert (outcome.code, outcome.record["status"]) == (0, "finished"), outcome.output
    (note,) = [line for line in outcome.output.splitlines() if line.startswith("note")]
    assert f"the run is finished, but {doing}" in note
    assert note.endswith("failed: RuntimeError: something broke in many lines")


def unlimited(model, data, output):
    """Flags that leave max_length to the recipe."""
    words = [word for word in model_flags(model, data) if word not in ("--max_length", "64")]
    return [*words, "--max_steps", "1", "--output_dir", str(output)]


def test_a_mistake_names_the_limit_as_the_source_of_the_length(tiny_model, tmp_path, capsys):
    data = tmp_path / "short.jsonl"
    data.write_text(json.dumps({"text": "abc"}) + "\n")
    assert main([*unlimited(tiny_model, data, tmp_path / "out"), "--packing", "--packing_strategy", "wrapped"]) == 2
    assert f"too few for one packed sequence of {POSITIONS} (limit)" in capsys.readouterr().err


def test_a_model_that_only_deepspeed_knows_it_cannot_divide_is_one_line(monkeypatch, tiny_model, texts, tmp_path):
    error = AssertionError("AutoTP not supported for model. Please provide policy.")
    monkeypatch.setattr("transformers.Trainer.train", raises(error))
    outcome = train_here(tiny_model, texts, tmp_path, "--max_steps", "1")
    assert outcome.code == 2 and "tensor_parallel: AutoTP not supported" in outcome.output


@pytest.mark.parametrize("error", [AssertionError("no tokens"), OSError("no network")])
def test_another_error_of_a_resume_is_not_blamed_on_the_checkpoint(error, monkeypatch, tiny_model, texts, tmp_path):
    train_here(tiny_model, texts, tmp_path, "--max_steps", "1")
    monkeypatch.setattr("transformers.Trainer.train", raises(error))
    with pytest.raises(type(error)):
        train_here(tiny_model, texts, tmp_path, "--max_steps", "2")


def raises(error):
    def train(*_, **__):
        raise error

    return train
