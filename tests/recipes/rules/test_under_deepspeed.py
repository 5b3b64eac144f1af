"""Evaluations in bf16 under DeepSpeed, on a CPU: it trains in the type that it evaluates in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.real_failures import assert_fires, report_of_deepspeed, train

pytestmark = pytest.mark.slow

AUTO = dict.fromkeys(["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"], "auto")
ENABLED = {"enabled": "auto"}


def report(folder: Path) -> dict[str, str]:
    """The type of the trained weights, with bf16 in the JSON and without."""
    return {f"{stage} {bool(bf16)}": trained_in(folder, stage, bf16) for stage in (2, 3) for bf16 in (ENABLED, None)}


def trained_in(folder: Path, stage: int, bf16: dict | None) -> str:
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations import unset_hf_deepspeed_config

    config = {**AUTO, "zero_optimization": {"stage": stage}, **({"bf16": bf16} if bf16 else {})}
    evaluates = {"bf16_full_eval": True, "eval_strategy": "steps", "eval_steps": 1}
    trainer = train(folder, evaluates=True, deepspeed=config, **evaluates)
    unset_hf_deepspeed_config()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return str(trainer.model_wrapped.get_data_types()[0])


def test_a_type_of_evaluations_becomes_the_type_of_the_training(tmp_path):
    pytest.importorskip("deepspeed")
    ends = report_of_deepspeed(report, tmp_path)
    for stage in (2, 3):
        assert (ends[f"{stage} False"], ends[f"{stage} True"]) == ("torch.float32", "torch.bfloat16")
        config = {"zero_optimization": {"stage": stage}, "bf16": ENABLED}
        assert_fires("deepspeed_evaluates_as_it_trains", {"deepspeed": config, "bf16_full_eval": True})
