"""Models: loaded, quantised and given adapters as the run says, or refused in one line."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from launch.data.demo import demo_tokenizer
from launch.training.model import load_tokenizer, require_batches_for_batch_norm, with_model
from recipes.errors import UserError
from recipes.rules.check import require_legal
from tests.support.models import SMALL, change, load, loss_of, problem, run_with, save
from tests.support.running import train_here
from tests.support.runs import H100, machine, resolved

pytestmark = pytest.mark.usefixtures("no_network")

CLASSES = ["bad", "fair", "good"], "single_label_classification"


# --- Loading -------------------------------------------------------------------------------------


def small_llama(**more):
    return AutoConfig.for_model("llama", **{**SMALL, "intermediate_size": 64, **more})


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_pretrained_weights_are_loaded_and_all_are_trainable_without_peft(llama, tokenizer):
    weights, model = LlamaForCausalLM.from_pretrained(llama).state_dict(), load(run_with(llama))
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert trainable(model) == {name for name, _ in model.named_parameters()}
    assert (model.config.use_cache, model.config.pad_token_id) == (False, tokenizer.pad_token_id)
    assert load(run_with(llama, attn_implementation="eager")).config._attn_implementation == "eager"


def test_a_model_also_stops_at_the_special_token_that_ends_an_answer_in_its_chat_template(llama, tokenizer):
    """The generation config of a base model often has only the token that ends a document."""
    config = load(run_with(llama)).generation_config
    assert tokenizer.convert_ids_to_tokens(config.eos_token_id)[-1] == "<|im_end|>"
    assert config.eos_token_id[:-1] == [LlamaForCausalLM.from_pretrained(llama).generation_config.eos_token_id]


@pytest.mark.parametrize("chosen", [{}, {"use_peft": True}], ids=str)
def test_parts_of_a_multimodal_model_that_text_never_reaches_are_frozen_and_get_no_adapters(chosen, tmp_path):
    """DDP waits for the gradient of every trained parameter, and a vision tower never gets one."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {**SMALL, "intermediate_size": 64, "head_dim": 16, "num_key_value_heads": 1, "pad_token_id": 0}
    images = {**vision, "image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=sizes, vision_config=images)
    model = load(run_with(save(AutoModelForCausalLM.from_config(config), tmp_path), **chosen))
    loss_of(model).backward()
    assert trainable(model) == {name for name, weight in model.named_parameters() if weight.grad is not None} != set()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_loaded_in_the_dtype_of_the_run(dtype, tmp_path):
    """Without saying so, a checkpoint in bfloat16 would train without fp32 weights."""
    name = save(LlamaForCausalLM(small_llama()).to(torch.bfloat16), tmp_path)
    assert load(run_with(name, dtype=dtype)).dtype == getattr(torch, dtype)


def test_a_tokenizer_without_a_pad_token_pads_with_eos(tmp_path):
    tokenizer = demo_tokenizer()
    tokenizer.pad_token = None
    LlamaForCausalLM(small_llama()).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(run_with(str(tmp_path))).pad_token == "<|endoftext|>"


def test_the_pad_token_of_the_tokenizer_replaces_that_of_the_model_before_a_classifier_is_evaluated(folder):
    change(folder, pad_token_id=3)
    model = load(run_with(str(folder), task="sequence_classification", use_peft=True), *CLASSES)
    assert model.config.pad_token_id == load_tokenizer(run_with(str(folder))).pad_token_id != 3
    change(folder, pad_token_id=None)  # an embedding that knows the padding token, perhaps EOS, never trains it
    assert load(run_with(str(folder))).get_input_embeddings().padding_idx is None


def test_a_generation_config_with_a_temperature_alone_can_be_saved(folder, tmp_path):
    """transformers refuses to save it, at the end of the training: Vicuna's is one."""
    (folder / "generation_config.json").write_text('{"temperature": 0.9}')
    load(run_with(str(folder))).save_pretrained(tmp_path / "saved")


# --- Its configuration ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [("gpt2", {"max_length": 1025}, "1025 tokens exceed the model's 1024 positions"), ("bert", {}, "is an encoder")],
)
def test_a_hub_model_that_does_not_fit_max_length_or_the_task_is_refused(kind, settings, message, request, monkeypatch):
    run = run_with(request.getfixturevalue(kind), **settings)
    monkeypatch.setattr("recipes.rules.facts.local_config", lambda name: None)
    run = replace(run, place=replace(run.place, packages=frozenset()))  # of another machine, without these files
    require_legal(run)
    with pytest.raises(UserError, match=message):
        with_model(run, load_tokenizer(run))


@pytest.mark.parametrize(
    ("kind", "changed", "chosen"),
    [
        ("llama", {}, "flex_attention"),
        ("llama", {"attention_dropout": 0.1}, None),  # transformers: flex attention does not support dropout
        ("llama", {"head_dim": 256}, None),
        ("gpt2", {}, None),
    ],
)
def test_recipe_fast_uses_flex_attention_only_for_models_that_can_train_with_it(kind, changed, chosen, tmp_path):
    AutoConfig.for_model(kind, **{**SMALL, "max_position_embeddings": 64, **changed}).save_pretrained(tmp_path)
    demo_tokenizer().save_pretrained(tmp_path)
    named = {"recipe": "fast", "model_name_or_path": str(tmp_path), "dataset_name": "somebody/texts"}
    run = resolved(world_size=1, settings=named, hardware=machine(H100))
    assert run["attn_implementation"] == "flex_attention"
    assert with_model(run, load_tokenizer(run))[0]["attn_implementation"] == chosen


# --- What cannot be loaded -----------------------------------------------------------------------


@pytest.fixture
def folder(llama, tmp_path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


NAME = "model_name_or_path"
UNLOADABLE = {
    "weights of another shape": (lambda folder: change(folder, intermediate_size=96), {}, NAME, "of shape (32, 64)"),
    "its own code": (lambda folder: change(folder, model_type="own", auto_map={"AutoConfig": "own.Own"}), {},
                     "trust_remote_code", "comes with Python code"),
    "a width that no head divides": (lambda folder: change(folder, hidden_size=33), {}, NAME, "for this --task"),
    "other weights": (  # transformers would start from random values, and only warn
        lambda folder: save_file({"encoder.weight": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"}),
        {}, NAME, "holds none of the 21 weights",
    ),
    "an attention that is not installed": (lambda folder: None, {"attn_implementation": "flash_attention_2"},
                                           "attn_implementation", ""),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "settings", "subject", "says"), UNLOADABLE.values(), ids=UNLOADABLE)
def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(damage, settings, subject, says, folder):
    damage(folder)
    with pytest.raises(UserError) as raised:
        load(run_with(str(folder), **settings))
    assert {problem.subject for problem in raised.value.problems} == {subject}
    assert says in str(raised.value) and "\n" not in str(raised.value.problems[0])


def test_a_hub_model_out_of_reach_is_refused_with_the_login_command():
    assert "`hf auth login`" in problem(run_with("somebody/something")).fix


def test_weights_missing_in_a_checkpoint_are_noted_but_a_new_classification_head_is_not(folder, capsys):
    load(run_with(str(folder), task="sequence_classification"), *CLASSES)
    assert "lacks" not in capsys.readouterr().out
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load(run_with(str(folder)))
    said = " ".join(capsys.readouterr().out.split())
    assert "lacks 1 weight, such as model.layers.1.mlp.up_proj.weight: they begin with random values" in said


def test_a_classifier_of_other_classes_gets_a_new_head_and_keeps_its_other_weights(folder, capsys):
    old = LlamaForSequenceClassification(small_llama(num_labels=5))
    model = load(run_with(save(old, folder), task="sequence_classification"), *CLASSES)
    assert "has 5 outputs, and these data need 3: its head is replaced by a new one" in capsys.readouterr().out
    assert model.score.weight.shape == (3, 32) and torch.equal(model.model.norm.weight, old.model.norm.weight)
    assert torch.equal(model.model.embed_tokens.weight, old.model.embed_tokens.weight)
    change(folder, intermediate_size=96)  # beside the new head, weights of another shape
    assert "of shape (32, 64)" in problem(run_with(str(folder), task="sequence_classification"), *CLASSES).what


# --- BatchNorm ------------------------------------------------------------------------------------

NORMED = torch.nn.Sequential(torch.nn.Embedding(260, 8), torch.nn.BatchNorm1d(8))


def test_a_micro_batch_of_1_is_refused_for_a_model_with_batch_norm():
    def judged(model, micro):
        settings = {"task": "sequence_classification", "per_device_train_batch_size": micro}
        require_batches_for_batch_norm(run_with(**settings), model)

    judged(NORMED, 2)
    for other in (torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(8)):
        judged(other, 1)
    with pytest.raises(UserError, match="per_device_train_batch_size: is 1"):
        judged(NORMED, 1)


# --- Adapters ------------------------------------------------------------------------------------


def test_adapters_are_put_on_lora_target_modules_and_an_unknown_module_is_refused(llama):
    model = load(run_with(llama, use_peft=True, lora_target_modules=["q_proj", "v_proj"]))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trainable(model)} == {"q_proj", "v_proj"}
    found = problem(run_with(llama, use_peft=True, lora_target_modules=["q_proj", "qkv"]))
    assert found.what == "the model has no module qkv" and "q_proj" in found.fix


def test_a_lora_setting_that_peft_refuses_is_reported_as_an_error_of_use_peft_with_a_fix(tmp_path):
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "num_key_value_heads": 2}
    name = save(AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SMALL, **experts)), tmp_path)
    found = problem(run_with(name, use_peft=True, lora_dropout=0.1))
    assert found.subject == "use_peft" and "--lora_dropout 0" in found.fix


def test_adapters_get_gradients_under_gradient_checkpointing(llama):
    model = load(run_with(llama, use_peft=True, gradient_checkpointing=True))
    model.gradient_checkpointing_enable({"use_reentrant": True})  # the variant that needs inputs with gradients
    loss_of(model.train()).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


OF_BART = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
# A model without a head, or a classifier of other classes, whose head has an unusual name.
# And its new layers: not in the checkpoint, or of another shape.
HEADS = {
    "bert": (AutoModelForMaskedLM, {**SMALL, "intermediate_size": 64}, {"classifier", "bert.pooler.dense"}),
    "distilbert": (AutoModel, dict(dim=32, hidden_dim=64, n_layers=2, n_heads=2), {"classifier", "pre_classifier"}),
    "bart": (AutoModelForSequenceClassification, {**OF_BART, "num_labels": 5}, {"classification_head.out_proj"}),
    "xlm": (
        AutoModelForSequenceClassification, dict(emb_dim=32, n_layers=1, n_heads=2, num_labels=5),
        {"sequence_summary.summary"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("four_bits", [False, True])
@pytest.mark.parametrize("kind", HEADS)
def test_use_peft_fully_trains_every_new_layer_of_a_classification_head(kind, four_bits, tmp_path):
    auto, sizes, new = HEADS[kind]
    name = save(auto.from_config(AutoConfig.for_model(kind, **{"vocab_size": 260, **sizes})), tmp_path)
    settings = dict(task="sequence_classification", use_peft=True, load_in_4bit=four_bits)
    model = load(run_with(name, **settings), *CLASSES)
    whole = {name for name in trainable(model) if "lora" not in name}
    assert {name.removeprefix("base_model.model.").partition(".modules_to_save")[0] for name in whole} == new


def test_use_peft_keeps_frozen_weights_in_bfloat16_and_trainable_weights_in_float32(bert):
    settings = dict(task="sequence_classification", use_peft=True, dtype="bfloat16", bf16=True)
    model = load(run_with(bert, **settings), *CLASSES)
    types = {(one.requires_grad, one.dtype) for name, one in model.named_parameters() if "original_module" not in name}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}


# --- 4 bits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mixed", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), (None, torch.float32)])
def test_qlora_layers_compute_in_the_precision_of_the_run_and_each_adapter_gets_a_gradient(mixed, dtype, tmp_path):
    name = save(LlamaForCausalLM(small_llama(hidden_size=64, intermediate_size=128)), tmp_path)
    precision = {"lora_dropout": 0.0, **({mixed: True} if mixed else {})}
    model = load(run_with(name, use_peft=True, load_in_4bit=True, gradient_checkpointing=mixed == "bf16", **precision))
    assert model.get_input_embeddings().weight.dtype == torch.float32  # as asked: the default
    assert model.base_model.model.model.layers[0].mlp.up_proj.base_layer.compute_dtype == dtype
    gradients = gradients_of(model.train())
    loss_of(model.eval())
    assert all(map(torch.equal, gradients, gradients_of(model.train())))  # bitsandbytes 0.50 packs weights to evaluate


def test_full_training_of_a_model_whose_files_are_in_4_bits_is_refused(llama, texts, tmp_path):
    small = BitsAndBytesConfig(load_in_4bit=True)
    AutoModelForCausalLM.from_pretrained(llama, quantization_config=small).save_pretrained(tmp_path / "small")
    load_tokenizer(run_with(llama)).save_pretrained(tmp_path / "small")
    outcome = train_here(tmp_path / "small", texts, tmp_path / "out", "--max_steps", "1")
    assert outcome.code == 2 and "purely quantized models" in outcome.output and "add --use_peft" in outcome.output


def gradients_of(model):
    model.zero_grad()
    loss_of(model).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
