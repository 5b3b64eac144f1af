"""The precision that the banner announces is the one that trains."""

import pytest

from launch.training.banner import precision, written
from tests.support.runs import H100, Run, fsdp, machine, yaml


@pytest.mark.parametrize(
    ("run", "begins"),
    [
        (Run(), "fp32 compute, float32 weights"),
        (Run(hardware=machine(H100)), "bf16 compute, float32 weights"),
        (Run("--recipe memory", yaml="memory.yaml"), "bf16 compute, bf16 weights, fp32 master copy"),
        (Run("--bf16 false", yaml=yaml("NO", "mixed_precision: fp8")), "fp8 compute, float32 weights"),
        (Run("--bf16 --fp16 false", yaml=fsdp()), "bf16 compute, float32 weights"),
    ],
)
def test_precision(run, begins, tmp_path, monkeypatch):
    assert precision(run.resolve(tmp_path, monkeypatch)).startswith(begins)


@pytest.mark.parametrize(
    "weights", ["model.safetensors", "adapter_model.safetensors", "model-00001-of-00002.safetensors"]
)
def test_the_summary_names_what_was_written(weights, tmp_path):
    (tmp_path / "run.json").touch()
    (tmp_path / "training_args.bin").touch()
    assert written(tmp_path) == f"{tmp_path} (run.json)"
    (tmp_path / weights).touch()
    (tmp_path / "checkpoint-2").mkdir()
    assert written(tmp_path) == f"{tmp_path} (model, checkpoints, run.json)"
