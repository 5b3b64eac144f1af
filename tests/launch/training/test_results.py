"""MFU, and the size of a checkpoint, against numbers worked out by hand."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from launch.training.model import parameter_count, saved_bytes
from launch.training.timing import utilisation
from tests.support.runs import H100, machine, resolved

SHAPE = dict(vocab_size=10, hidden_size=4, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
# Attention, MLP and norms of two layers, the last norm, and the head.
COMPUTED = 2 * (4 * 4 * 4 + 3 * 4 * 8 + 2 * 4) + 4 + 40
PACKED = {"packing": True, "max_length": 16}


def mfu(tied=True, **settings):
    """MFU at the speed that is the peak of two H100s, of a model of COMPUTED parameters."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    trainer = SimpleNamespace(model=model, num_parameters=parameter_count(model), train_dataset=[])
    per_token = 6 * COMPUTED + 6 * 2 * 4 * 16
    return utilisation(resolved("", 2, settings, hardware=machine(H100)), trainer, 2 * 989e12 / per_token)


@pytest.mark.parametrize("tied", [True, False])
def test_mfu_is_relative_to_the_peak_of_all_gpus_and_ignores_an_untied_input_embedding(tied):
    assert mfu(tied, **PACKED) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("settings", [{"packing": False}, {**PACKED, "use_peft": True}])
def test_mfu_is_none_without_packing_or_with_use_peft(settings):
    assert mfu(**settings) is None


@pytest.mark.parametrize(("optim", "bytes_each"), [("adamw_torch", 8), ("sgd", 0), ("lion_32bit", 4)])
def test_the_disk_estimate_adds_final_weights_and_a_checkpoint_with_optimizer_state(optim, bytes_each):
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    assert saved_bytes(model, resolved("", 2, {"optim": optim})) == (4 + 4 + bytes_each) * COMPUTED


@pytest.mark.parametrize("storage", ["uint8", "bfloat16"])
def test_the_parameter_count_counts_every_4_bit_weight_in_any_storage_type(storage):
    linear = pytest.importorskip("bitsandbytes.nn").Linear4bit
    layer = linear(64, 128, bias=False, quant_storage=getattr(torch, storage)).to("cpu")
    assert parameter_count(layer) == 64 * 128
