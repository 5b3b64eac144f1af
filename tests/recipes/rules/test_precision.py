"""Rules about precision, and what happens without them."""

from __future__ import annotations

import pytest

from tests.support.real_failures import assert_fires, launched, train
from tests.support.runs import A100, T4, TWO_GPUS, Run, machine, yaml

pytestmark = pytest.mark.usefixtures("fresh_state")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "one_precision": (Run("--fp16 --bf16", hardware=TWO_GPUS), Run("--fp16 --bf16 false", hardware=TWO_GPUS)),
    "bf16_needs_sm80": (Run("--bf16 --fp16 false", hardware=machine(T4)), Run("--bf16", hardware=machine(A100))),
    "fp16_needs_a_gpu": (Run("--fp16"), Run("--fp16", hardware=machine(T4))),
    "tf32_needs_sm80": (Run("--tf32 true", hardware=machine(T4)), Run("--tf32 true", hardware=machine(A100))),
    "yaml_precision_agrees_with_arguments": (
        Run("--bf16 false", yaml=yaml("MULTI_GPU", "mixed_precision: bf16")),
        Run("--bf16 true", yaml=yaml("MULTI_GPU", "mixed_precision: bf16")),
    ),
    "fp16_weights_cannot_be_unscaled": (
        Run("--dtype float16", hardware=machine(T4)),
        Run("--dtype float16 --use_peft", hardware=machine(T4)),
    ),
    "sixteen_bit_weights_lose_small_updates": (Run("--dtype bfloat16"), Run("--dtype bfloat16 --use_peft")),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    (
        "yaml_precision_agrees_with_arguments",
        Run("--bf16", yaml=yaml("'NO'", "mixed_precision: fp8")),
        "mixed_precision",
    ),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("bf16_needs_sm80", Run("--bf16")),  # a CPU
    ("bf16_needs_sm80", Run("--bf16 --use_cpu", hardware=machine(T4))),
    ("yaml_precision_agrees_with_arguments", Run("--bf16 false", yaml=yaml("'NO'", "mixed_precision: fp8"))),
]


def test_fp16_gradients_cannot_be_unscaled():
    import torch

    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([weight], 0.1), torch.amp.GradScaler("cpu")
    scaler.scale((weight * 2).sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    assert_fires("fp16_weights_cannot_be_unscaled", {"dtype": "float16", "fp16": True}, gpu=(7, 5))


def test_small_updates_of_bf16_weights_are_lost():
    import torch

    kept = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.ones(1, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.0)
        for _ in range(10):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        kept[dtype] = weight.item() != 1.0
    assert kept == {torch.float32: True, torch.bfloat16: False}
    assert_fires("sixteen_bit_weights_lose_small_updates", {"dtype": "bfloat16"})


def test_fp16_on_a_cpu_trains_in_fp32(tmp_path):
    losses = [train(tmp_path, fp16=fp16).state.log_history[-1]["train_loss"] for fp16 in (False, True)]
    assert losses[0] == losses[1]
    assert_fires("fp16_needs_a_gpu", {"fp16": True})


def test_mixed_precision_in_the_yaml_turns_bf16_on_behind_the_arguments(write_yaml, tmp_path, monkeypatch):
    file = write_yaml("'NO'", "mixed_precision: bf16", processes=1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched(file)["ACCELERATE_MIXED_PRECISION"])
    trainer = train(tmp_path)
    assert (trainer.args.bf16, trainer.accelerator.mixed_precision) == (False, "bf16")
    assert_fires("yaml_precision_agrees_with_arguments", {"bf16": False}, config=file)
