"""Rules about attention kernels, and what happens without them."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

from recipes.legal import attention
from recipes.rules.attention import attention_kernels_need_a_gpu
from tests.support.real_failures import assert_fires, tiny_llama, train
from tests.support.runs import A100, H100, T4, Run, machine, resolved

pytestmark = pytest.mark.usefixtures("fresh_state")

FLASH, FLASH_4 = "--attn_implementation flash_attention_2", "--attn_implementation flash_attention_4"
FLEX, SDPA = "--attn_implementation flex_attention", "--attn_implementation sdpa"
KERNEL = "--attn_implementation kernels-community/flash-attn2"
NO_FLASH = ("flash_attn", "kernels")
LOCAL = "--model_name_or_path model"
ON_A100, ON_H100 = {"hardware": machine(A100)}, {"hardware": machine(H100)}


def model(model_type: str, **values) -> dict:
    return {"model/config.json": {"model_type": model_type, **values}}


# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "attention_is_known": (Run("--attn_implementation nonsense"), Run(SDPA)),
    "pages_are_for_generation": (Run("--attn_implementation paged|sdpa"), Run(SDPA)),
    "attention_is_supported_by_the_model": (
        Run(f"{SDPA} {LOCAL}", files=model("bloom")),
        Run(f"{SDPA} {LOCAL}", files=model("llama")),
    ),
    "flash_attention_is_the_models_own": (
        Run(f"{FLASH} {LOCAL}", files=model("gpt_oss"), **ON_H100),
        Run(f"{FLASH} {LOCAL}", files=model("llama"), **ON_H100),
    ),
    "attention_kernels_have_no_dropout": (
        Run(f"{FLEX} {LOCAL}", files=model("opt", attention_dropout=0.1), **ON_A100),
        Run(f"{FLEX} {LOCAL}", files=model("opt", attention_dropout=0.0), **ON_A100),
    ),
    "attention_heads_fit_the_kernel": (
        Run(f"{FLEX} {LOCAL}", files=model("llama", hidden_size=32, num_attention_heads=4), **ON_A100),
        Run(f"{FLEX} {LOCAL}", files=model("llama", hidden_size=64, num_attention_heads=4), **ON_A100),
    ),
    "attention_kernels_need_a_gpu": (Run(FLEX), Run(FLEX, **ON_A100)),
    "flash_attention_needs_sm80": (Run(FLASH, hardware=machine(T4)), Run(FLASH, **ON_A100)),
    "flash_attention_computes_in_16_bits": (
        Run(f"{FLASH} --recipe baseline", **ON_A100),
        Run(f"{FLASH} --recipe baseline --bf16", **ON_A100),
    ),
    "attention_kernels_are_installed": (
        Run(FLASH, **ON_A100, missing=("flash_attn", "kernels")),
        Run(FLASH, **ON_A100, missing=("flash_attn",)),
    ),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    (rule, run, "attn_implementation")
    for rule, run in (
        ("attention_is_known", Run("--attn_implementation SDPA")),
        ("attention_is_known", Run("--attn_implementation paged|eager")),
        ("attention_is_known", Run("--attn_implementation flash_attention_9")),
        ("attention_is_supported_by_the_model", Run(f"{FLASH} {LOCAL}", files=model("bloom"))),
        ("attention_is_supported_by_the_model", Run(f"{FLEX} {LOCAL}", files=model("gpt2"))),
        ("attention_is_supported_by_the_model", Run(f"{SDPA} {LOCAL}", files=model("gpt_oss"))),
        (
            "attention_kernels_have_no_dropout",
            Run(f"{FLASH_4} {LOCAL}", files=model("llama", attention_dropout=0.1), **ON_H100),
        ),
        ("attention_heads_fit_the_kernel", Run(f"{FLASH} {LOCAL}", files=model("llama", head_dim=512), **ON_A100)),
        ("attention_kernels_need_a_gpu", Run(FLASH)),
        ("attention_kernels_need_a_gpu", Run(LOCAL, files=model("llama", attn_implementation="flash_attention_2"))),
        ("attention_kernels_need_a_gpu", Run(LOCAL, files=model("llama", _attn_implementation="flash_attention_2"))),
        (
            "attention_kernels_are_installed",
            Run(LOCAL, files=model("llama", attn_implementation="flash_attention_2"), **ON_A100, missing=NO_FLASH),
        ),
        ("attention_kernels_need_a_gpu", Run(KERNEL)),
        ("attention_kernels_need_a_gpu", Run(f"{FLASH} --use_cpu", **ON_A100)),
        ("attention_kernels_need_a_gpu", Run("--attn_implementation kernels-community/metal-flash-sdpa", **ON_A100)),
        ("flash_attention_needs_sm80", Run(FLASH_4, **ON_A100)),
        ("attention_kernels_are_installed", Run(KERNEL, **ON_A100, missing=("kernels",))),
        ("attention_kernels_are_installed", Run("--attn_implementation org/kernel", missing=("kernels",))),
        (
            "attention_kernels_are_installed",
            Run(f"{FLASH} {LOCAL}", files=model("gpt_oss"), **ON_H100, missing=("kernels",)),
        ),
    )
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("attention_is_known", Run("--attn_implementation eager")),
    ("attention_is_known", Run("--attn_implementation org/kernel@main:forward")),
    ("attention_is_supported_by_the_model", Run(f"{SDPA} {LOCAL}", files=model("gpt-sw3"))),  # GPT-2's class
    ("attention_is_supported_by_the_model", Run(f"{SDPA} {LOCAL}", files=model("own", auto_map={}))),
    ("attention_heads_fit_the_kernel", Run(f"{FLASH} {LOCAL}", files=model("gemma", head_dim=256), **ON_A100)),
    ("flash_attention_computes_in_16_bits", Run(f"{FLASH} --recipe baseline --dtype bfloat16", **ON_A100)),
    ("attention_kernels_are_installed", Run(FLASH, **ON_A100, missing=("kernels",))),
]


@pytest.mark.parametrize(
    ("rule", "name", "error", "message"),
    [
        ("attention_is_known", "nonsense", ValueError, "is not supported. The only possible arguments"),
        ("attention_kernels_need_a_gpu", "flash_attention_2", ImportError, "doesn't seem to be installed"),
        ("attention_kernels_need_a_gpu", "kernels-community/flash-attn2", ImportError, "`kernels` is either not"),
    ],
)
def test_a_model_is_not_made_with_it(rule, name, error, message):
    with pytest.raises(error, match=message):
        tiny_llama(attn_implementation=name)
    assert_fires(rule, {"attn_implementation": name})


@pytest.mark.parametrize(
    ("rule", "name", "error", "message"),
    [
        ("attention_is_known", "paged|eager", ValueError, "without a paged attention cache"),
        ("attention_kernels_need_a_gpu", "flex_attention", NotImplementedError, "does not support backward on CPU"),
    ],
)
def test_the_first_step_fails(rule, name, error, message, tmp_path):
    with pytest.raises(error, match=message):
        train(tmp_path, model=tiny_llama(attn_implementation=name))
    assert_fires(rule, {"attn_implementation": name})


def test_pages_are_dropped(tmp_path):
    with pytest.warns(FutureWarning, match="paged"):
        loaded = tiny_llama(attn_implementation="paged|sdpa")
    assert loaded.config._attn_implementation == "sdpa"
    assert_fires("pages_are_for_generation", {"attn_implementation": "paged|sdpa"})


def test_flex_attention_has_no_dropout(tmp_path):
    dropping = tiny_llama(attn_implementation="flex_attention", attention_dropout=0.1)
    with pytest.raises(ValueError, match="does not support `dropout`"):
        train(tmp_path, model=dropping)
    dropping.config.save_pretrained(tmp_path)
    settings = {"attn_implementation": "flex_attention", "model_name_or_path": str(tmp_path)}
    assert_fires("attention_kernels_have_no_dropout", settings, gpu=(8, 0))


SMALL = dict(vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize(("model_type", "name"), [("bloom", "sdpa"), ("gpt2", "flex_attention"), ("gemma2", "sdpa")])
def test_a_model_that_does_not_support_it(model_type, name, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **SMALL)
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        AutoModelForCausalLM.from_config(config, attn_implementation=name)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    settings = {"attn_implementation": name, "model_name_or_path": str(tmp_path)}
    assert_fires("attention_is_supported_by_the_model", settings)


def test_what_is_read_from_the_source_is_what_transformers_has():
    from transformers import modeling_flash_attention_utils as flash
    from transformers.integrations.hub_kernels import is_kernel
    from transformers.modeling_utils import AttentionInterface

    assert set(attention.implementations()) == {"eager", *AttentionInterface._global_mapping}
    assert attention.flash_versions() == {
        version: entry.get("cuda_min_major_version", 0)
        for version, entry in flash.FLASH_ATTENTION_COMPATIBILITY_MATRIX.items()
    }
    assert attention.kernel_devices() == flash.FLASH_ATTN_KERNEL_DEVICES
    for name in ("org/kernel", "org/kernel@v1:name", "sdpa", "a/b/c", ""):
        assert attention.is_kernel(name) == is_kernel(name)


def test_a_config_json_asks_for_a_kernel_and_the_argument_wins(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    file, name = tmp_path / "config.json", str(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text()), "attn_implementation": "flash_attention_2"}))
    with pytest.raises(ImportError, match="FlashAttention2 has been toggled on"):
        AutoModelForCausalLM.from_pretrained(name)
    (found,) = attention_kernels_need_a_gpu(resolved(f"--model_name_or_path {name}"))
    assert found.source.startswith("config.json") and found.fix.startswith("--attn_implementation sdpa")
    assert not list(attention_kernels_need_a_gpu(resolved(f"--model_name_or_path {name} {SDPA}")))
    assert AutoModelForCausalLM.from_pretrained(name, attn_implementation="sdpa").config._attn_implementation == "sdpa"
