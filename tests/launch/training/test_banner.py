"""The precision that the banner announces is the one that trains."""

import pytest

from launch.training.banner import precision
from tests.support.runs import H100, Run, fsdp, machine, yaml


@pytest.mark.parametrize(
    ("run", "begins"),
    [
        (Run(), "fp32 compute, float32 weights"),
        (Run("--fp16"), "fp32 compute, float32 weights"),
        (Run(hardware=machine(H100)), "bf16 compute, float32 weights"),
        (Run("--recipe memory", yaml="memory.yaml"), "bf16 compute, bf16 weights, fp32 master copy"),
        (Run("--bf16 false", yaml=yaml("NO", "mixed_precision: fp8")), "fp8 compute, float32 weights"),
        (Run("--bf16 --fp16 false", yaml=fsdp()), "bf16 compute, float32 weights"),
    ],
)
def test_the_precision_line_names_compute_and_weight_types(run, begins, tmp_path, monkeypatch):
    assert precision(run.resolve(tmp_path, monkeypatch)).startswith(begins)
