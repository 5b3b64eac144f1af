"""FLOPs, parameters and MFU, against numbers worked out by hand."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from launch.training.model import parameter_count, saved_bytes
from launch.training.timing import flops_per_token, utilisation
from recipes.run import here, resolve
from recipes.run.hardware import Gpu, Hardware

CPU = Hardware(cores=2)
H100 = Hardware((Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30),), cores=16)
SHAPE = dict(vocab_size=10, hidden_size=4, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1)
# Attention, MLP and norms of two layers, and the last norm.
BODY = 2 * (4 * 4 * 4 + 3 * 4 * 8 + 2 * 4) + 4


def llama(tied):
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_count_once_and_an_untied_input_embedding_costs_no_flops(tied):
    assert parameter_count(llama(tied)) == BODY + (40 if tied else 80)
    assert flops_per_token(llama(tied), length=16) == 6 * (BODY + 40) + 6 * 2 * 4 * 16


@pytest.mark.parametrize(("optim", "bytes_each"), [("adamw_torch", 8), ("sgd", 0), ("lion_32bit", 4)])
def test_a_checkpoint_holds_what_is_trained_and_what_its_optimizer_keeps(optim, bytes_each):
    run, model = resolve(place=here(hardware=CPU, environment={}), settings={"optim": optim}), llama(tied=True)
    assert saved_bytes(model, run) == (4 + 4 + bytes_each) * (BODY + 40)
    model.requires_grad_(False).model.norm.weight.requires_grad_(True)
    assert saved_bytes(model, run) == (4 + 4 + bytes_each) * 4


def test_mfu_is_the_share_of_the_peak_of_all_gpus():
    run = resolve(place=here(2, hardware=H100, environment={}), settings={"packing": True, "max_length": 16})
    model = llama(tied=True)
    speed = 989e12 * 2 / flops_per_token(model, 16)
    assert utilisation(run, model, speed, attended=16) == pytest.approx(1.0)


@pytest.mark.parametrize("settings", [{"packing": False}, {"packing": True, "use_peft": True}])
def test_mfu_is_not_claimed_where_the_formula_does_not_hold(settings):
    run = resolve(place=here(hardware=H100, environment={}), settings=settings)
    assert utilisation(run, llama(tied=True), 1e6, attended=16) is None
