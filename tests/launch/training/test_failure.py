"""A run that fails is explained as it trained, and what follows a finished one cannot fail it."""

import json

import pytest
from datasets import Dataset

from launch.train import main
from tests.support.running import model_flags, read_record, train_here

POSITIONS = 256  # of the tiny model, which no recipe's max_length may exceed


def fail(*_):
    raise RuntimeError("something broke\nin many lines")


@pytest.mark.parametrize(
    ("broken", "doing"),
    [
        ("launch.training.banner._summary", "printing its summary"),
        ("launch.training.timings_row.add_timings_row", "adding a row to"),
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


def test_a_sample_that_cannot_be_read_is_one_note(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("launch.data.demo.saved_sample", fail)
    assert main(["--max_steps", "1", "--output_dir", str(tmp_path)]) == 0
    assert read_record(tmp_path)["status"] == "finished"
    assert "the run is finished, but reading a sample" in capsys.readouterr().err


def unlimited(model, data, output):
    """Flags that leave max_length to the recipe."""
    words = [word for word in model_flags(model, data) if word not in ("--max_length", "64")]
    return [*words, "--max_steps", "1", "--output_dir", str(output)]


def test_the_record_holds_the_length_that_the_model_allows(tiny_model, texts, tmp_path):
    assert main(unlimited(tiny_model, texts, tmp_path)) == 0
    recorded = read_record(tmp_path)["settings"]["max_length"]
    assert (recorded["value"], recorded["source"]) == (POSITIONS, "limit")


def test_a_mistake_names_the_limit_as_the_source_of_the_length(tiny_model, tmp_path, capsys):
    data = tmp_path / "short.jsonl"
    data.write_text(json.dumps({"text": "abc"}) + "\n")
    assert main([*unlimited(tiny_model, data, tmp_path / "out"), "--packing", "--packing_strategy", "wrapped"]) == 2
    assert f"too few for one packed sequence of {POSITIONS} (limit)" in capsys.readouterr().err


def test_a_run_out_of_memory_is_planned_at_the_length_that_the_model_allows(
    monkeypatch, tiny_model, texts, tmp_path, capsys
):
    def run_out(*_):
        raise MemoryError

    monkeypatch.setattr("launch.training.model.load_model", run_out)
    monkeypatch.setattr("launch.training.out_of_memory._planned", lambda run: f"for {run['max_length']} tokens")
    assert main(unlimited(tiny_model, texts, tmp_path)) == 1
    assert f"planned   for {POSITIONS} tokens" in capsys.readouterr().err


def test_a_model_that_cannot_be_debugged_is_said_in_one_line(monkeypatch, tiny_model, texts, tmp_path):
    def cannot(*_, **__):
        raise NotImplementedError("\"abs_cpu\" not implemented for 'Bool'")

    monkeypatch.setattr("launch.training.trainer.RecipeTrainer.train", cannot)
    outcome = train_here(tiny_model, texts, tmp_path / "out", "--max_steps", "1", "--debug", "underflow_overflow")
    assert outcome.code == 1
    assert "--debug underflow_overflow cannot look into this model" in outcome.output


def test_a_model_that_only_deepspeed_knows_it_cannot_divide_is_one_line(monkeypatch, tiny_model, texts, tmp_path):
    error = AssertionError("AutoTP not supported for model. Please provide policy.")
    monkeypatch.setattr("transformers.Trainer.train", raises(error))
    outcome = train_here(tiny_model, texts, tmp_path, "--max_steps", "1")
    assert outcome.code == 2 and "DeepSpeed cannot divide LlamaForCausalLM: AutoTP not supported" in outcome.output


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


def test_data_that_is_gone_is_not_the_output_folder(tiny_model, tmp_path, capsys):
    Dataset.from_list([{"text": "abc"}] * 4).save_to_disk(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    assert main([*unlimited(tiny_model, tmp_path / "saved", tmp_path / "out"), "--max_length", "64"]) == 2
    assert "dataset_name: the folder" in capsys.readouterr().err
