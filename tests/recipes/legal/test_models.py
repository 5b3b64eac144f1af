"""Facts of a type of model, read from transformers' source, are those of its classes."""

import inspect

import pytest

from recipes.legal import models

TYPES = ("llama", "gpt2", "bloom", "bert", "mistral", "gpt_oss", "gemma3_text", "opt")


@pytest.mark.parametrize("model_type", TYPES)
def test_attributes_layers_and_arguments_are_those_of_the_class(model_type):
    import transformers

    name = models.model_class(model_type, "causal_lm")
    real = getattr(transformers, name)
    for attribute in ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn"):
        assert models.class_attribute(model_type, name, attribute, False) == getattr(real, attribute)
    assert name in models.class_names(model_type)
    assert models.layer_classes(model_type) >= set(real._no_split_modules or ())
    takes = "position_ids" in inspect.signature(real.forward).parameters
    assert models.has_argument(model_type, name, "position_ids") is takes


@pytest.mark.parametrize(("model_type", "field"), [("llama", "max_position_embeddings"), ("gpt2", "hidden_size")])
def test_a_default_is_that_of_the_configuration(model_type, field):
    from transformers import AutoConfig

    name = models.own_name(model_type, field)
    assert models.config_default(model_type, name) == getattr(AutoConfig.for_model(model_type), field)


def test_a_task_that_a_model_has_no_head_for():
    assert models.model_class("llama", "sequence_classification") == "LlamaForSequenceClassification"
    assert models.model_class("mamba", "sequence_classification") is None


def test_an_unknown_type_has_nothing():
    assert models.class_names("no-such-model") == frozenset()
    assert models.class_attribute("no-such-model", "X", "_supports_sdpa", "unknown") == "unknown"
    assert models.has_argument("no-such-model", "X", "position_ids") is None
