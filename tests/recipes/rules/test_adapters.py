"""Rules about adapters, and what happens without them."""

from __future__ import annotations

import pytest

from tests.support.real_failures import assert_fires, train
from tests.support.runs import Run

pytestmark = pytest.mark.usefixtures("fresh_state")

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "four_bits_need_adapters": (Run("--load_in_4bit"), Run("--load_in_4bit --use_peft")),
    "qlora_loads_whole_weights": (
        Run("--load_in_4bit --use_peft", yaml="memory_zero3.yaml"),
        Run("--load_in_4bit --use_peft", yaml="memory.yaml"),
    ),
    "adapter_settings_need_adapters": (Run("--lora_r 8"), Run("--lora_r 8 --use_peft")),
}


def test_weights_in_four_bits_cannot_be_trained_without_adapters(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantised = BitsAndBytesConfig(load_in_4bit=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=quantised, device_map={"": "cpu"})
    with pytest.raises(ValueError, match="purely quantized"):
        train(tmp_path, model=model)
    assert_fires("four_bits_need_adapters", {"load_in_4bit": True})
