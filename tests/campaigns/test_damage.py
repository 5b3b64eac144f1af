"""Faults are what they are called, what becomes of them is told apart, and none loses a run."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.campaigns.damage import faults
from tests.campaigns.damage.judge import DIFFERENT, MANUAL, MENDED, STARTED_OVER, TRACEBACK, UNNAMED, judge
from tests.campaigns.legality.tried import Outcome
from tests.campaigns.runs import Final
from tests.support.campaigns import campaign

CONTENT = bytes(range(1, 129)) * 192  # six pages
OTHERS = b"another run's"


def damaged(folder, kind: str) -> bytes | None:
    file, others = folder / "file", folder / "others"
    file.write_bytes(CONTENT)
    others.write_bytes(OTHERS)
    assert faults.do(kind, file, others, Random(0))
    return file.read_bytes() if file.exists() else None


def test_each_fault_is_what_it_is_called(tmp_path):
    found = {kind: damaged(tmp_path, kind) for kind in faults.FAULTS}
    assert CONTENT.startswith(found["truncated"]) and 0 < len(found["truncated"]) < len(CONTENT)
    assert found["emptied"] == b""
    assert found["half zeroed"] == CONTENT[:12288] + bytes(12288)
    assert found["one page zeroed"].count(0) == faults.PAGE and len(found["one page zeroed"]) == len(CONTENT)
    flipped = np.frombuffer(found["one bit flipped"], np.uint8) ^ np.frombuffer(CONTENT, np.uint8)
    assert np.bitwise_count(flipped).sum() == 1
    assert found["removed"] is None
    assert found["replaced by another run's"] == OTHERS


def test_a_file_that_another_run_has_too_is_not_damaged_by_it(tmp_path):
    for name in ("file", "others"):
        (tmp_path / name).write_bytes(CONTENT)
    assert not faults.do("replaced by another run's", tmp_path / "file", tmp_path / "others", Random(0))


def test_a_whole_checkpoint_is_replaced(tmp_path):
    for name in ("own", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of-{name}").touch()
    assert faults.do(faults.REPLACED, tmp_path / "own", tmp_path / "others", Random(0))
    assert [file.name for file in (tmp_path / "own").iterdir()] == ["of-others"]


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A finished run in the current folder, and what it is when nothing was damaged."""
    from safetensors.numpy import save_file

    weights = {"weight": np.ones(2)}
    (tmp_path / "out").mkdir()
    save_file(weights, tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "run.json").write_text('{"log_history": [{"step": 1, "loss": 2.5, "eval_runtime": 7}]}')
    monkeypatch.chdir(tmp_path)
    return Final(weights, [{"step": 1, "loss": 2.5}])


RESUMED = (
    "note  checkpoint-5 is damaged (model.safetensors is cut off): skipped\nresuming from out/checkpoint-4, step 4"
)


@pytest.mark.parametrize(
    ("code", "output", "kind"),
    [
        (0, RESUMED, MENDED),
        (0, RESUMED.replace("model.safe", "model.\nsafe"), MENDED),
        (0, "resuming from out/checkpoint-4, step 4", UNNAMED),
        (0, "no valid checkpoint: training starts over", STARTED_OVER),
        (2, "error  output_dir: out/checkpoint-5 does not fit this model", MANUAL),
        (1, "Traceback (most recent call last):\nValueError: no", TRACEBACK),
    ],
)
def test_what_becomes_of_a_fault_is_told_apart(code, output, kind, finished):
    assert judge(Outcome(code, output), "checkpoint-5/model.safetensors", {4: finished}).kind == kind


@pytest.mark.parametrize("other", [{"weights": {"weight": np.ones(2) + 1e-7}}, {"log": [{"step": 1, "loss": 2.4}]}])
def test_another_weight_or_loss_is_another_training(other, finished):
    expected = Final(**{**vars(finished), **other})
    assert judge(Outcome(0, RESUMED), "checkpoint-5/model.safetensors", {4: expected}).kind == DIFFERENT


@pytest.mark.slow
def test_no_fault_loses_a_run():
    assert "0 lost" in campaign("damage", "--seed", "slow tier", "--count", "16", "--engine", "single", "ddp")
