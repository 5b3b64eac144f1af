"""Rules about adapters, and what happens without them."""

from __future__ import annotations

import pytest

from tests.support.real_failures import assert_fires, train
from tests.support.runs import CLASSIFY, Run, deepspeed

pytestmark = pytest.mark.usefixtures("fresh_state")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "four_bits_need_adapters": (Run("--load_in_4bit"), Run("--load_in_4bit --use_peft")),
    "qlora_loads_whole_weights": (
        Run("--load_in_4bit --use_peft", yaml="memory_zero3.yaml"),
        Run("--load_in_4bit --use_peft", yaml="memory.yaml"),
    ),
    "classifier_adapters_have_one_type": (
        Run(f"--recipe memory_zero3 --use_peft {CLASSIFY}", yaml="memory_zero3.yaml"),
        Run(f"--recipe memory --use_peft {CLASSIFY}", yaml="memory.yaml"),
    ),
    "adapter_settings_need_adapters": (Run("--lora_r 8"), Run("--lora_r 8 --use_peft")),
}

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("classifier_adapters_have_one_type", Run("--recipe memory_zero3 --use_peft", yaml="memory_zero3.yaml")),
    (
        "classifier_adapters_have_one_type",
        Run(f"--recipe memory_zero3 --bf16 false --use_peft {CLASSIFY}", yaml=deepspeed("zero_stage: 3")),
    ),
]


def test_weights_in_four_bits_cannot_be_trained_without_adapters(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantised = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=quantised, device_map={"": "cpu"})
    with pytest.raises(ValueError, match="purely quantized"):
        train(tmp_path, model=model)
    assert_fires("four_bits_need_adapters", {"load_in_4bit": True})
