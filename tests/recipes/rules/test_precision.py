"""Rules about precision, and what happens without them."""

from __future__ import annotations

import pytest

from recipes.run import resolve
from recipes.run.hardware import Hardware
from tests.support.real_failures import BY_NAME, arguments, assert_fires, launched, train
from tests.support.runs import A100, DS, H100, T4, TWO_GPUS, Run, deepspeed, ds_json, machine, yaml

pytestmark = pytest.mark.usefixtures("fresh_state")

AUTO = {"enabled": "auto"}
FP8_PACKAGES = ("torchao", "transformer_engine", "msamp")


def fp8(backend: str = "", type_: str = "'NO'", *lines: str) -> str:
    section = ("fp8_config:", f"  backend: {backend}") if backend else ()
    return yaml(type_, "mixed_precision: fp8", *section, *lines)


FSDP = ("FSDP", "fsdp_config:", "  fsdp_version: 2")
ON_ONE_RANK, ON_ALL = "  fsdp_cpu_ram_efficient_loading: true", "  fsdp_cpu_ram_efficient_loading: false"

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "one_precision": (Run("--fp16 --bf16", hardware=TWO_GPUS), Run("--fp16 --bf16 false", hardware=TWO_GPUS)),
    "bf16_needs_sm80": (Run("--bf16 --fp16 false", hardware=machine(T4)), Run("--bf16", hardware=machine(A100))),
    "fp16_needs_a_gpu": (Run("--fp16"), Run("--fp16", hardware=machine(T4))),
    "fp16_under_deepspeed_needs_hardware": (
        Run("--recipe memory --bf16 false --fp16", yaml="memory.yaml"),
        Run("--recipe memory --bf16 false --fp16", yaml="memory.yaml", hardware=Hardware(fp16_on_cpu=True)),
    ),
    "deepspeed_evaluates_as_it_trains": (
        Run("--bf16_full_eval", yaml=deepspeed()),
        Run("--bf16_full_eval --bf16", yaml=deepspeed()),
    ),
    "fp8_has_a_backend": (
        Run(yaml=fp8(), missing=FP8_PACKAGES),
        Run(yaml=fp8(), missing=FP8_PACKAGES[1:]),
    ),
    "fp8_needs_sm89": (
        Run("--bf16 false --fp16 false", yaml=fp8("AO"), hardware=machine(A100)),
        Run("--bf16 false --fp16 false", yaml=fp8("AO"), hardware=machine(H100)),
    ),
    "fp8_fits_the_engine": (
        Run("--bf16 false", yaml=fp8("TE", "DEEPSPEED", "deepspeed_config:", "  zero_stage: 2")),
        Run("--bf16 false", yaml=fp8("TE", "MULTI_GPU")),
    ),
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
    ("fp8_has_a_backend", Run(yaml=fp8("ao")), "fp8_config"),
    ("fp8_has_a_backend", Run(yaml=fp8("TE"), missing=("transformer_engine",)), "mixed_precision"),
    ("fp8_needs_sm89", Run(yaml=fp8("TE")), "fp8_config"),
    ("fp8_fits_the_engine", Run(yaml=fp8("MSAMP", *FSDP)), "fp8_config"),
    ("fp8_fits_the_engine", Run(yaml=fp8("AO", *FSDP)), "fsdp_cpu_ram_efficient_loading"),
    ("fp8_fits_the_engine", Run(yaml=fp8("AO", *FSDP, ON_ONE_RANK)), "fsdp_cpu_ram_efficient_loading"),
    ("deepspeed_evaluates_as_it_trains", Run(f"{DS} --bf16_full_eval", files=ds_json(bf16=AUTO)), "bf16_full_eval"),
    ("deepspeed_evaluates_as_it_trains", Run("--bf16 --fp16_full_eval", yaml=deepspeed()), "fp16_full_eval"),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("fp16_weights_cannot_be_unscaled", Run("--dtype float16 --fp16")),  # which does nothing on a CPU
    ("bf16_needs_sm80", Run("--bf16")),  # a CPU
    ("fp8_needs_sm89", Run(yaml=fp8("AO"))),
    ("fp8_fits_the_engine", Run(yaml=fp8("AO", *FSDP, ON_ALL))),
    ("deepspeed_evaluates_as_it_trains", Run(f"{DS} --bf16_full_eval", files=ds_json())),
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


def test_a_precision_that_the_user_writes_wins_over_the_yaml(tmp_path, write_yaml, monkeypatch):
    file = write_yaml("MULTI_GPU", "mixed_precision: fp16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert arguments(tmp_path, bf16=True).mixed_precision == "bf16"
    run = resolve(["--bf16"], accelerate_config=str(file), hardware=Hardware(), environment={})
    (problem,) = BY_NAME["yaml_precision_agrees_with_arguments"](run)
    assert problem.severity == "advice" and "--bf16 wins" in problem.what


FP8 = ("mixed_precision: fp8", "fp8_config:", "  backend: ao")


def test_the_launcher_finds_no_package_for_fp8(write_yaml):
    with pytest.raises(RuntimeError, match="FP8 is not available on this machine"):
        launched(write_yaml("'NO'", "mixed_precision: fp8", processes=1))


def test_a_backend_of_fp8_is_in_capitals(write_yaml, tmp_path, monkeypatch):
    """Only whether a package is installed is a stand-in."""
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)
    monkeypatch.setattr("accelerate.state.is_fp8_available", lambda: True)
    file = write_yaml("'NO'", *FP8, processes=1)
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_FP8_BACKEND"):
        monkeypatch.setenv(name, launched(file)[name])
    with pytest.raises(ValueError, match="'ao' is not a valid FP8BackendType"):
        train(tmp_path)
    assert_fires("fp8_has_a_backend", {}, config=file)


def test_fp8_becomes_fp16_on_an_older_card(write_yaml, monkeypatch):
    import torch
    from accelerate import Accelerator

    monkeypatch.setattr("accelerate.state.is_fp8_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setenv("PATH", "")  # no nvidia-smi, which accelerate asks first
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    assert Accelerator(cpu=True).mixed_precision == "fp16"
    file = write_yaml("'NO'", *FP8, processes=1)
    assert_fires("fp8_needs_sm89", {"bf16": False, "fp16": False}, config=file, gpu=(8, 0))
