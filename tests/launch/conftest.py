"""What the tests of data and models share."""

import datasets
import pytest
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.support.models import SMALL, chat_tokenizer, save


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def no_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def own_cache(no_network, tmp_path, monkeypatch):
    """No network, and a data cache that belongs to this test alone."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    config = LlamaConfig(**SMALL, intermediate_size=64, max_position_embeddings=2048)
    return save(LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    config = GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256)
    return save(GPT2LMHeadModel(config), tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    config = BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=1024)
    return save(BertForMaskedLM(config), tmp_path_factory.mktemp("bert"))
