"""What is read from a config.json is what transformers' own configuration says."""

from __future__ import annotations

import contextlib
import json

import pytest
from huggingface_hub.errors import StrictDataclassError

from recipes.legal import models
from recipes.run.local_model import config_value, is_classifier, local_config, max_positions, text_config

TASKS = ("causal_lm", "sequence_classification")
TYPES = sorted({kind for task in TASKS for kind in models.model_types(models._TABLES[task])} & models.known_types())


@pytest.fixture(scope="module")
def configurations():
    """Type -> the configuration that transformers makes of it by default, where it makes one."""
    from transformers import CONFIG_MAPPING

    made = {}
    for kind in TYPES:
        with contextlib.suppress(ValueError, StrictDataclassError):  # some need the configurations of their parts
            made[kind] = CONFIG_MAPPING[kind]()
    assert len(made) > 0.95 * len(TYPES)
    return made


def test_every_type_that_transformers_knows_is_known():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    assert models.known_types() == set(CONFIG_MAPPING_NAMES)


@pytest.mark.parametrize("odd", [None, True, 5.5, "x", [None], {"x": None}])
def test_odd_values_are_left_to_the_library(odd):
    assert not is_classifier({"architectures": odd})
    assert max_positions({"model_type": odd, "max_position_embeddings": 64}) == 64
    assert max_positions({"model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": odd}) in (64, 65)


@pytest.mark.slow
def test_a_type_has_a_class_for_a_task_where_the_auto_class_finds_one():
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

    for task, auto in zip(TASKS, (AutoModelForCausalLM, AutoModelForSequenceClassification), strict=True):
        found = {kind for kind in models.known_types() if models.model_class(kind, task)}
        assert found == {kind for kind in models.known_types() if CONFIG_MAPPING[kind] in auto._model_mapping}


@pytest.mark.slow
def test_positions_of_a_written_configuration_are_those_of_the_loaded_one(configurations):
    """As train.py asks a loaded configuration, and check the config.json."""
    from launch.training.model import described

    wrong = {}
    for kind, config in configurations.items():
        written = json.loads(config.to_json_string())
        if max_positions(written) != max_positions(described(config)):
            wrong[kind] = (max_positions(written), max_positions(described(config)))
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("field", ["max_position_embeddings", "is_encoder_decoder"])
def test_a_default_that_a_file_leaves_out_is_the_types_own(field, configurations):
    """Unknown is fine, where the source computes it; another value is not."""
    wrong = {}
    for kind, config in configurations.items():
        default = config_value({"model_type": kind}, field)
        if default is not None and default != getattr(config, field):
            wrong[kind] = (default, getattr(config, field))
    assert not wrong


def test_gpt2_calls_its_positions_by_another_name():
    assert max_positions({"model_type": "gpt2", "n_positions": 512}) == 512
    assert max_positions({"model_type": "gpt2"}) == 1024


def test_the_decoder_of_a_model_with_images_has_a_section():
    assert text_config({"model_type": "gemma3", "text_config": {"model_type": "x"}}) == {"model_type": "x"}


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_what_is_no_configuration_is_unknown(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    assert local_config(str(tmp_path)) is None


def test_a_config_json_may_be_named_itself(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert local_config(str(tmp_path / "config.json")) == local_config(str(tmp_path)) == {"model_type": "llama"}


def test_no_folder_here_is_unknown(tmp_path):
    assert local_config("somebody/model") is local_config(None) is local_config(str(tmp_path / "none")) is None
