"""Models: loaded, quantised and given adapters as the run says, or refused in one line."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
)

from launch.data.demo import demo_tokenizer
from launch.training.model import described, load_tokenizer, with_model
from recipes.errors import UserError
from recipes.rules.check import require_legal
from recipes.run import here, resolve
from recipes.run.local_model import max_positions
from tests.support.models import CLASSES, SMALL, load, loss_of, problem, run_with, save, trainable
from tests.support.runs import H100, machine

pytestmark = pytest.mark.usefixtures("no_network")


# --- Loading -------------------------------------------------------------------------------------


def test_saved_weights_are_loaded(llama):
    weights = LlamaForCausalLM.from_pretrained(llama).state_dict()
    loaded = load(run_with(llama)).state_dict()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_type_of_the_run(dtype, tmp_path):
    """Without saying so, a checkpoint in bfloat16 would train without fp32 weights."""
    name = save(LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64)).to(torch.bfloat16), tmp_path)
    assert load(run_with(name, dtype=dtype)).dtype == getattr(torch, dtype)


def test_attention_is_the_asked_one(llama):
    assert load(run_with(llama, attn_implementation="eager")).config._attn_implementation == "eager"


def test_no_cache_in_training(llama):
    assert load(run_with(llama)).config.use_cache is False


def test_tokenizer_without_padding_pads_with_eos(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.pad_token = None
    LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    run = run_with(str(tmp_path))
    assert load_tokenizer(run).pad_token == "<|endoftext|>"


def test_model_knows_the_padding(llama, tokenizer):
    assert load(run_with(llama)).config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
def test_classification_has_a_class_for_each_label(kind, request):
    model = load(run_with(request.getfixturevalue(kind), task="sequence_classification"), CLASSES)
    logits = model(input_ids=torch.arange(1, 9).unsqueeze(0)).logits
    assert logits.shape == (1, 3)


def test_classification_remembers_the_names(bert):
    config = load(run_with(bert, task="sequence_classification"), CLASSES).config
    assert (config.id2label, config.label2id["good"]) == ({0: "bad", 1: "fair", 2: "good"}, 2)


# --- Positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        (LlamaConfig(max_position_embeddings=2048), 2048),
        (GPT2Config(n_positions=512), 512),
        (RobertaConfig(max_position_embeddings=514, pad_token_id=1), 512),
        (BloomConfig(), None),
    ],
    ids=["llama", "gpt2", "roberta", "bloom"],
)
def test_positions_a_model_has(config, positions):
    assert max_positions(described(config)) == positions


def elsewhere(run):
    """The run on another machine: no rule looks into files that are here."""
    return replace(run, place=replace(run.place, packages=frozenset()))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("llama", {"max_length": 2049}, "2049 tokens are more than the 2048 positions"),
        ("bert", {}, "is an encoder"),
    ],
)
def test_a_hub_model_is_refused_once_its_configuration_is_there(kind, settings, message, request, monkeypatch):
    """Before that, check knows nothing of it."""
    run = elsewhere(run_with(request.getfixturevalue(kind), **settings))
    tokenizer = load_tokenizer(run)
    monkeypatch.setattr("recipes.rules.facts.local_config", lambda name: None)
    require_legal(run)
    with pytest.raises(UserError, match=message):
        with_model(run, tokenizer)


def test_advice_about_a_hub_model_is_given_once_its_configuration_is_there(gpt2, monkeypatch):
    """Only what check could not say before: train.py has printed that already."""
    run = run_with(gpt2, save_only_model=True, attn_implementation="flash_attention_4", bf16=True)
    run = elsewhere(replace(run, place=replace(run.place, hardware=machine(H100))))
    tokenizer = load_tokenizer(run)
    monkeypatch.setattr("recipes.rules.facts.local_config", lambda name: None)
    before = require_legal(run)
    _, advice = with_model(run, tokenizer)
    assert [problem.subject for problem in before] == ["save_only_model", "attn_implementation"]
    assert [problem.what.partition(",")[0] for problem in advice] == ["flash_attention_4 has no dropout"]


def test_a_longer_sequence_of_a_recipe_is_lowered_to_what_the_model_takes(tmp_path):
    name = save(LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64, max_position_embeddings=128)), tmp_path)
    run = resolve(["--model_name_or_path", name], here(environment={}))
    limited, _ = with_model(run, load_tokenizer(run))
    assert (limited["max_length"], limited.setting("max_length").source) == (128, "limit")
    assert run["max_length"] > 128


# --- What cannot be loaded -----------------------------------------------------------------------


def test_hub_out_of_reach():
    assert "neither a local folder nor a model" in problem(run_with("somebody/something")).what


def test_head_for_other_classes(tmp_path):
    config = LlamaConfig(**SMALL, intermediate_size=64, num_labels=5)
    name = save(LlamaForSequenceClassification(config), tmp_path)
    assert "without a head for other classes" in problem(run_with(name, task="sequence_classification"), CLASSES).fix


@pytest.mark.parametrize("from_scratch", [True, False])
def test_attention_that_is_not_installed(from_scratch, llama):
    run = run_with(**({} if from_scratch else {"name": llama}), attn_implementation="flash_attention_2")
    with pytest.raises(UserError) as raised:
        load(run)
    assert {problem.subject for problem in raised.value.problems} == {"attn_implementation"}


def test_code_of_the_model_is_not_run_unasked(tmp_path):
    name = save(LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64)), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    assert problem(run_with(name)).subject == "trust_remote_code"


@pytest.fixture
def folder(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads"])
def test_a_configuration_that_makes_no_model_is_one_line_of_its_class(field, folder, monkeypatch):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: 33}))
    found = problem(run_with(str(folder)))
    assert found.subject == "model_name_or_path" and "hf auth login" not in found.fix


def test_a_pickle_is_not_executed(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Code()}, folder / "pytorch_model.bin")
    assert str(folder) in problem(run_with(str(folder))).what
    assert not (tmp_path / "executed").exists()


class Code:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_the_weights_of_another_model_are_not_trained(folder):
    """transformers would start from random values, and only warn."""
    save_file({"encoder.weight": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"{folder} holds none of the 21 weights" in problem(run_with(str(folder))).what


def test_weights_that_are_missing_are_noted_and_a_new_head_is_not(folder, capsys):
    load(run_with(str(folder), task="sequence_classification"), CLASSES)
    assert "lacks" not in capsys.readouterr().out
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load(run_with(str(folder)))
    said = " ".join(capsys.readouterr().out.split())
    assert "lacks model.layers.1.mlp.up_proj.weight: random values to start with" in said


# --- Padding-free --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_free_where_sequences_stay_apart(kind, request):
    assert isinstance(load(run_with(request.getfixturevalue(kind), padding_free=True)), PreTrainedModel)


def test_padding_free_is_refused_where_they_do_not(tmp_path):
    config = OPTConfig(vocab_size=260, hidden_size=32, ffn_dim=64, word_embed_proj_dim=32, num_hidden_layers=2)
    config.num_attention_heads = 2
    name = save(OPTForCausalLM(config), tmp_path)
    assert problem(run_with(name, padding_free=True)).subject == "padding_free"


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
