"""Facts of a type of model, read from transformers' source, are those of its classes."""

import pytest

from recipes.legal import models

TYPES = ("llama", "gpt2", "bloom", "bert", "mistral", "gpt_oss", "gemma3_text", "opt")


@pytest.mark.parametrize("model_type", TYPES)
def test_a_class_attribute_is_that_of_the_class(model_type):
    import transformers

    name = models.model_class(model_type, "causal_lm")
    for attribute in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn"):
        real = getattr(getattr(transformers, name), attribute)
        assert models.class_attribute(model_type, name, attribute, False) == real


@pytest.mark.parametrize("model_type", TYPES)
def test_layers_are_the_ones_that_a_model_keeps_whole(model_type):
    from transformers import AutoConfig, AutoModelForCausalLM

    small = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=4, vocab_size=99)
    small |= dict(intermediate_size=32, word_embed_proj_dim=32, pad_token_id=0, is_decoder=True)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **small))
    assert set(model._no_split_modules) <= models.layer_classes(model_type)


@pytest.mark.parametrize(("model_type", "field"), [("llama", "max_position_embeddings"), ("gpt2", "hidden_size")])
def test_a_default_is_that_of_the_configuration(model_type, field):
    from transformers import AutoConfig

    name = models.own_name(model_type, field)
    assert models.config_default(model_type, name) == getattr(AutoConfig.for_model(model_type), field)


def test_a_task_that_a_model_has_no_head_for():
    assert models.model_class("llama", "sequence_classification") == "LlamaForSequenceClassification"
    assert models.model_class("mamba", "sequence_classification") is None


def test_a_type_whose_folder_bears_another_name():
    assert models.model_class("gemma3_text", "causal_lm") in models.class_names("gemma3_text")


def test_an_unknown_type_has_nothing():
    assert models.class_names("no-such-model") == frozenset()
    assert models.class_attribute("no-such-model", "X", "_supports_sdpa", "unknown") == "unknown"


@pytest.mark.parametrize(("model_type", "takes"), [("llama", True), ("bloom", False), ("no-such-model", None)])
def test_an_argument_of_forward(model_type, takes):
    assert models.has_argument(model_type, models.model_class(model_type, "causal_lm") or "X", "position_ids") is takes
