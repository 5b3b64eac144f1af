"""Adapters and 4-bit weights: what is trained, what is frozen, and what is refused."""

import importlib.util

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.models import CLASSES, SMALL, load, loss_of, problem, run_with, save, trainable

pytestmark = pytest.mark.usefixtures("no_network")


# --- Adapters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_only_adapters_are_trained(kind, request):
    model = load(run_with(request.getfixturevalue(kind), use_peft=True))
    assert trainable(model) and all("lora_" in name for name in trainable(model))


def test_adapters_where_asked(llama):
    model = load(run_with(llama, use_peft=True, lora_target_modules=["q_proj", "v_proj"]))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trainable(model)} == {"q_proj", "v_proj"}


def test_adapters_that_peft_refuses_are_one_line(tmp_path):
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "num_key_value_heads": 2}
    name = save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **experts)), tmp_path)
    found = problem(run_with(name, use_peft=True, lora_dropout=0.1))
    assert found.subject == "use_peft" and "--lora_dropout 0" in found.fix


def test_adapters_have_the_size_of_the_run(llama):
    model = load(run_with(llama, use_peft=True, lora_r=3))
    assert {p.shape[0] for name, p in model.named_parameters() if "lora_A" in name} == {3}


def test_adapters_learn_with_checkpointing(llama):
    model = load(run_with(llama, use_peft=True, gradient_checkpointing=True))
    # The variant that needs inputs with gradients.
    model.gradient_checkpointing_enable({"use_reentrant": True})
    loss_of(model.train()).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_classifier_head_is_trained_beside_its_adapters(bert):
    model = load(run_with(bert, task="sequence_classification", use_peft=True), CLASSES)
    assert any("classifier" in name for name in trainable(model))


def test_unknown_target_modules_name_some_there_are(llama):
    found = problem(run_with(llama, use_peft=True, lora_target_modules=["q_proj", "qkv"]))
    assert found.what == "the model has no module qkv" and "q_proj" in found.fix


def test_whole_model_is_trained_without_peft(llama):
    model = load(run_with(llama))
    assert isinstance(model, PreTrainedModel) and len(trainable(model)) == len(list(model.parameters()))


# --- 4 bits --------------------------------------------------------------------------------------


needs_bitsandbytes = pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="needs bitsandbytes")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    config = LlamaConfig(**SMALL | {"hidden_size": 64}, intermediate_size=128)
    return save(LlamaForCausalLM(config), tmp_path_factory.mktemp("wide"))


@needs_bitsandbytes
@pytest.mark.parametrize("double", [False, True])
def test_frozen_weights_are_quantised(double, wide):
    model = load(run_with(wide, use_peft=True, load_in_4bit=True, use_bnb_nested_quant=double))
    weight = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    assert (weight.dtype, weight.quant_state.quant_type, weight.quant_state.nested) == (torch.uint8, "nf4", double)


@needs_bitsandbytes
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_learn_on_quantised_weights(checkpointing, wide):
    run = run_with(wide, use_peft=True, load_in_4bit=True, gradient_checkpointing=checkpointing)
    model = load(run).train()
    loss_of(model).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@needs_bitsandbytes
@pytest.mark.parametrize(("mixed", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), (None, torch.float32)])
def test_quantised_weights_compute_in_the_type_of_the_run(mixed, dtype, wide):
    model = load(run_with(wide, use_peft=True, load_in_4bit=True, **({mixed: True} if mixed else {})))
    assert model.base_model.model.model.layers[0].mlp.up_proj.base_layer.compute_dtype == dtype


def test_nothing_to_quantise_in_a_model_from_scratch():
    assert problem(run_with(use_peft=True, load_in_4bit=True, max_length=256)).subject == "load_in_4bit"


def test_no_adapters_on_a_model_from_scratch():
    assert problem(run_with(use_peft=True, max_length=256)).subject == "use_peft"
