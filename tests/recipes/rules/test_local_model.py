"""The values read from a config.json are those of transformers' own configuration."""

import contextlib
import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

from launch.training.model import described
from recipes import legal
from recipes.rules.local_model import local_config, max_positions, text_config

TASKS = ("causal_lm", "sequence_classification")
TYPES = sorted(kind for kind in legal.names("model_types") if any(legal.model_class(kind, task) for task in TASKS))


@pytest.mark.slow
def test_our_model_class_lookup_knows_the_same_model_types_as_transformers_auto_classes():
    for task, auto in zip(TASKS, (AutoModelForCausalLM, AutoModelForSequenceClassification), strict=True):
        found = {kind for kind in legal.names("model_types") if legal.model_class(kind, task)}
        assert found == {kind for kind in legal.names("model_types") if CONFIG_MAPPING[kind] in auto._model_mapping}


@pytest.mark.slow
def test_max_positions_read_from_a_config_json_are_those_of_the_loaded_config():
    """As train.py asks a loaded configuration, and check the config.json."""
    made = {}
    for kind in TYPES:
        with contextlib.suppress(ValueError, StrictDataclassError):  # some need the configurations of their parts
            made[kind] = CONFIG_MAPPING[kind]()
    assert len(made) > 0.95 * len(TYPES)
    written = {kind: max_positions(json.loads(config.to_json_string())) for kind, config in made.items()}
    assert written == {kind: max_positions(described(config)) for kind, config in made.items()}


def test_max_positions_and_text_config_are_read_by_the_field_names_of_the_model_type():
    assert max_positions({"model_type": "gpt2", "n_positions": 512}) == 512
    assert max_positions({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}) == 512
    assert text_config({"model_type": "gemma3", "text_config": {"model_type": "x"}}) == {"model_type": "x"}


def test_a_config_json_is_found_by_its_own_path_or_by_its_folder(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    assert local_config(str(file)) == local_config(str(tmp_path)) == {"model_type": "llama"}
    file.write_text("[]")
    assert local_config(str(tmp_path)) is local_config("somebody/model") is local_config(None) is None
