"""A run that fails is explained as it trained, and what follows a finished one cannot fail it."""

import pytest
import torch

from launch.cli import main as show
from launch.host.world import World
from launch.train import main
from launch.training.failure import report
from tests.support.rows import jsonl
from tests.support.running import model_flags, train_here


def test_an_error_in_writing_the_summary_or_timings_leaves_a_run_finished(monkeypatch, tiny_model, texts, tmp_path):
    def fail(*_):
        raise RuntimeError("something broke\nin many lines")

    for broken in ("launch.training.banner._summary", "launch.training.timing.add_timings_row"):
        monkeypatch.setattr(broken, fail)
    measured = ["--max_steps", "4", "--measure", str(tmp_path / "timings.jsonl")]
    outcome = train_here(tiny_model, texts, tmp_path / "out", *measured)
    assert (outcome.code, outcome.record["status"]) == (0, "finished"), outcome.output
    note = "note  the run is finished, but its report is incomplete: RuntimeError: something broke in many lines"
    assert outcome.output.count(note) == 2


def test_a_training_whose_loss_has_risen_is_told_to_use_a_lower_learning_rate(tiny_model, texts, tmp_path, capsys):
    for rate, rises in (("1e-3", False), ("1", True)):
        outcome = train_here(tiny_model, texts, tmp_path / rate, "--max_steps", "4", "--learning_rate", rate)
        assert outcome.code == 0 and ("at the end: it has risen" in outcome.output) == rises
        assert ("recipes generate" in outcome.output, "a lower --learning_rate" in outcome.output) == (not rises, rises)
        assert show(["show", str(tmp_path / rate)]) == 0
        assert ("the loss has risen" in capsys.readouterr().out) == rises


def test_an_error_about_max_length_names_the_models_limit_as_the_source_of_the_value(tiny_model, tmp_path, capsys):
    data = jsonl(tmp_path, [{"text": "abc"}])
    words = [word for word in model_flags(tiny_model, data) if word not in ("--max_length", "64")]
    assert main([*words, "--output_dir", str(tmp_path), "--packing", "--packing_strategy", "wrapped"]) == 2
    assert "too few for one packed sequence of 256 (limit)" in capsys.readouterr().err


def test_parameters_without_a_gradient_under_ddp_are_reported_with_a_fix(capsys):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Identity())
    model[1].unused = torch.nn.Parameter(torch.ones(1))
    ranks = torch.nn.parallel.DistributedDataParallel(model)
    ranks(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        ranks(torch.ones(1, 1))
    torch.distributed.destroy_process_group()
    assert report(caught.value, World()) == 1
    assert "Add --ddp_find_unused_parameters true, then run the same" in capsys.readouterr().err


def test_train_py_raises_an_unexpected_exception_again_instead_of_reporting_a_failed_run():
    with pytest.raises(AssertionError, match="no tokens"):
        report(AssertionError("no tokens"), World())
