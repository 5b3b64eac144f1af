"""Rules about adapters, and what happens without them."""

from __future__ import annotations

import contextlib

import pytest

from recipes.legal.models import refuses_dora, targets_in_experts
from tests.support.real_failures import assert_fires, train
from tests.support.runs import CLASSIFY, H100, MODEL, Run, deepspeed, machine, model

pytestmark = pytest.mark.usefixtures("fresh_state")

EXPERTS = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "four_bits_need_adapters": (Run("--load_in_4bit"), Run("--load_in_4bit --use_peft")),
    "adapters_need_trained_weights": (Run("--use_peft"), Run(f"--use_peft {MODEL}", files=model())),
    "qlora_loads_whole_weights": (
        Run("--load_in_4bit --use_peft", yaml="memory_zero3.yaml"),
        Run("--load_in_4bit --use_peft", yaml="memory.yaml"),
    ),
    "classifier_adapters_have_one_type": (
        Run(f"--recipe memory_zero3 --use_peft {CLASSIFY}", yaml="memory_zero3.yaml"),
        Run(f"--recipe memory --use_peft {CLASSIFY}", yaml="memory.yaml"),
    ),
    "dora_keeps_its_weights": (
        Run("--recipe memory_zero3 --use_peft --use_dora --load_in_4bit", yaml="memory_zero3.yaml"),
        Run("--recipe memory --use_peft --use_dora --load_in_4bit", yaml="memory.yaml"),
    ),
    "dora_unpacks_its_weights": (
        Run(f"--use_peft --use_dora {MODEL}", files=model(quantization_config={"quant_method": "gptq", "bits": 4})),
        Run(f"--use_peft --use_dora {MODEL}", files=model(quantization_config={"quant_method": "hqq"})),
    ),
    "experts_take_plain_adapters": (
        Run(f"--use_peft {MODEL}", files=model(**EXPERTS)),
        Run(f"--use_peft --lora_dropout 0 {MODEL}", files=model(**EXPERTS)),
    ),
    "dora_with_dropout_computes_twice": (
        Run("--use_peft --use_dora --model_name_or_path gpt2"),
        Run("--use_peft --use_dora --model_name_or_path gpt2 --lora_dropout 0"),
    ),
    "adapter_settings_need_adapters": (Run("--lora_r 8"), Run("--lora_r 8 --use_peft")),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("adapter_settings_need_adapters", Run("--use_dora"), "use_dora"),
    (
        "dora_keeps_its_weights",
        Run(
            f"--recipe memory_zero3 --use_peft --use_dora {MODEL}",
            yaml="memory_zero3.yaml",
            files=model(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ),
        "use_dora",
    ),
    (
        "experts_take_plain_adapters",
        Run(f"--use_peft --use_dora --lora_dropout 0 {MODEL}", files=model(**EXPERTS)),
        "use_dora",
    ),
    (
        "experts_take_plain_adapters",
        Run(f"--use_peft --lora_target_modules q_proj down_proj {MODEL}", files=model(**EXPERTS)),
        "lora_dropout",
    ),
    ("adapters_need_trained_weights", Run("--load_in_4bit --use_peft"), "load_in_4bit"),
    ("adapters_need_trained_weights", Run(f"--use_peft --from_scratch {MODEL}", files=model()), "use_peft"),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("dora_keeps_its_weights", Run("--recipe memory_zero3 --use_peft --use_dora", yaml="memory_zero3.yaml")),
    (
        "dora_keeps_its_weights",
        Run(
            "--recipe memory_zero3 --use_peft --use_dora --load_in_4bit",
            yaml="memory_zero3.yaml",
            hardware=machine(H100),
        ),
    ),
    ("experts_take_plain_adapters", Run(f"--use_peft --lora_target_modules q_proj {MODEL}", files=model(**EXPERTS))),
    ("experts_take_plain_adapters", Run(f"--use_peft {MODEL}", files=model(**{**EXPERTS, "num_experts": 0}))),
    ("experts_take_plain_adapters", Run(f"--use_peft {MODEL}", files=model(**EXPERTS, mlp_only_layers=[0, 1]))),
    ("experts_take_plain_adapters", Run(f"--use_peft {MODEL}", files=model(**{**EXPERTS, "model_type": "gpt_oss"}))),
    ("dora_unpacks_its_weights", Run(f"--use_peft --use_dora {MODEL} --load_in_4bit", files=model())),
    ("dora_with_dropout_computes_twice", Run("--use_peft --model_name_or_path gpt2")),
    ("adapters_need_trained_weights", Run("--use_peft --model_name_or_path gpt2")),
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


def test_on_a_cpu_dora_puts_another_weight_in_the_place_of_one_in_4_bits(tiny_model):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantised = BitsAndBytesConfig(load_in_4bit=True)
    for dora in (False, True):
        model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=quantised, device_map={"": "cpu"})
        model = get_peft_model(model, LoraConfig(use_dora=dora, target_modules=["q_proj"]))
        layer = next(module for name, module in model.named_modules() if name.endswith("q_proj.base_layer"))
        layer.weight.ds_status = "as DeepSpeed marks it"
        model.train()(input_ids=torch.ones(1, 4, dtype=torch.long))
        assert hasattr(layer.weight, "ds_status") is not dora


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("Qwen3Moe", {"lora_dropout": 0.1}),
        ("Qwen3Moe", {"use_dora": True}),
        ("Qwen3Moe", {"lora_dropout": 0.1, "target_modules": ["down_proj"]}),
        ("Qwen3Moe", {}),
        ("Qwen3Moe", {"lora_dropout": 0.1, "target_modules": ["q_proj"]}),
        ("Qwen2Moe", {"lora_dropout": 0.1}),
        ("Mixtral", {"lora_dropout": 0.1}),
    ],
)
def test_peft_refuses_dropout_and_dora_for_the_experts_that_its_tables_name(name, how):
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    config = getattr(transformers, f"{name}Config")(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=100
    )
    targets = set(how.get("target_modules") or targets_in_experts(config.model_type))
    refuses = bool(targets & targets_in_experts(config.model_type)) and len(how) > ("target_modules" in how)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    lora = LoraConfig(**{"target_modules": "all-linear", **how})
    with pytest.raises(ValueError, match="does not work with") if refuses else contextlib.nullcontext():
        get_peft_model(model, lora)


def test_peft_refuses_dora_for_the_methods_whose_source_says_so():
    from peft import LoraConfig
    from peft.tuners.lora.gptq import GPTQLoraLinear
    from torch.nn import Linear

    assert [refuses_dora(method) for method in ("gptq", "awq", "hqq", "bitsandbytes_4bit", "nothing")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    with pytest.raises(ValueError, match="does not support DoRA yet"):
        GPTQLoraLinear(Linear(4, 4), "default", LoraConfig(use_dora=True), r=2)
