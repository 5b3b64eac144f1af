"""What is read from transformers' source of models is what its classes say."""

import pytest

from recipes.legal import models

TYPES = ("llama", "gpt2", "bloom", "bert", "mistral", "gpt_oss", "gemma3_text", "opt")
SUPPORTS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("attribute", SUPPORTS)
def test_the_source_says_what_the_class_says(model_type, attribute):
    import transformers

    name = models.model_class(model_type, "causal_lm")
    assert models.class_attribute(model_type, name, attribute, False) == getattr(getattr(transformers, name), attribute)


@pytest.mark.parametrize("model_type", TYPES)
def test_layers_are_the_ones_that_a_model_keeps_whole(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    small = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, vocab_size=99)
    small |= dict(intermediate_size=32, word_embed_proj_dim=32, pad_token_id=0, is_decoder=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **small))
    assert set(model._no_split_modules) <= models.layer_classes(model_type)


def test_a_task_that_a_model_has_no_head_for():
    assert models.model_class("llama", "sequence_classification") == "LlamaForSequenceClassification"
    assert models.model_class("mamba", "sequence_classification") is None


def test_a_type_whose_folder_bears_another_name():
    assert models.model_class("gemma3_text", "causal_lm") in models.class_names("gemma3_text")


def test_an_unknown_type_has_nothing():
    assert models.class_names("no-such-model") == frozenset()
    assert models.class_attribute("no-such-model", "X", "_supports_sdpa", "unknown") == "unknown"


@pytest.mark.parametrize(
    ("method", "adapters", "expected"),
    [
        ("bitsandbytes_4bit", True, True),
        ("bitsandbytes_4bit", False, False),
        ("gptq", True, True),
        ("higgs", True, False),
        ("mxfp4", True, None),  # the loader restores the weights where it has no kernels
        ("awq", True, None),  # depends on a package
        ("no-such-method", True, None),
    ],
)
def test_weights_that_can_be_trained_as_they_are_stored(method, adapters, expected):
    assert models.trains_quantised(method, adapters) is expected


@pytest.mark.parametrize(("model_type", "takes"), [("llama", True), ("bloom", False), ("no-such-model", None)])
def test_what_a_forward_takes(model_type, takes):
    assert models.has_argument(model_type, models.model_class(model_type, "causal_lm") or "X", "position_ids") is takes


@pytest.mark.parametrize(("model_type", "needs"), [("llama", True), ("bert", True), ("canine", False), ("byt5", False)])
def test_a_tokenizer_without_a_vocabulary_needs_no_file(model_type, needs):
    assert models.tokenizer_needs_files(model_type) is needs
