"""The batch and the precision that the banner announces are those that train."""

import pytest

from launch.training.banner import batch, precision
from tests.support.runs import H100, Run, fsdp, machine, resolved, yaml


def test_the_batch_line_names_micro_batch_accumulation_processes_and_global_batch():
    assert batch(resolved("--global_batch_size 8")) == "micro 4 x accumulation 2 x world 1 = global 8"


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
