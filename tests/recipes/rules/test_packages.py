"""Rules about packages, and what happens without them."""

from __future__ import annotations

import pytest

from recipes.run.hardware import Hardware
from tests.support.real_failures import arguments, assert_fires, tiny_llama
from tests.support.runs import A100, CLASSIFY, EVAL, Run, machine

pytestmark = pytest.mark.usefixtures("fresh_state")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "deepspeed_is_installed": (
        Run("--recipe memory", yaml="memory.yaml", missing=("deepspeed",)),
        Run("--recipe memory", yaml="memory.yaml"),
    ),
    "liger_is_installed": (
        Run("--use_liger_kernel", hardware=machine(A100, liger=False)),
        Run("--use_liger_kernel", hardware=machine(A100, liger=True)),
    ),
    "quantised_loading_is_installed": (Run("--use_peft", missing=("peft",)), Run("--use_peft")),
    "metrics_are_installed": (
        Run(f"{CLASSIFY} {EVAL}", missing=("sklearn",)),
        Run(CLASSIFY, missing=("sklearn",)),
    ),
    "optimizer_is_installed": (
        Run("--optim adamw_bnb_8bit", missing=("bitsandbytes",)),
        Run("--optim adamw_bnb_8bit"),
    ),
    "reports_go_somewhere": (Run("--report_to wandb", missing=("wandb",)), Run("--report_to wandb")),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("deepspeed_is_installed", Run(yaml="memory.yaml", hardware=Hardware(platform="win32")), "recipe"),
    ("reports_go_somewhere", Run("--report_to tensorbord"), "report_to"),
]


def test_four_bits_need_bitsandbytes(tiny_model, hide):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantised = BitsAndBytesConfig(load_in_4bit=True)
    hide("bitsandbytes")
    with pytest.raises(ImportError, match="4-bit quantization requires bitsandbytes"):
        AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=quantised, device_map={"": "cpu"})
    assert_fires("quantised_loading_is_installed", {"load_in_4bit": True, "use_peft": True})


def test_adapters_need_peft(hide):
    hide("peft")
    with pytest.raises(ValueError, match="PEFT is not installed"):
        tiny_llama().add_adapter({})
    assert_fires("quantised_loading_is_installed", {"use_peft": True})


def test_deepspeed_that_is_not_installed_is_missed_in_the_workers(hide, one_rank, tmp_path, monkeypatch):
    hide("deepspeed")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ImportError, match="DeepSpeed is not available"):
        arguments(tmp_path, use_cpu=False)
    assert_fires("deepspeed_is_installed", {"recipe": "memory"})
