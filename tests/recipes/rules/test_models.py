"""Rules about the model, and what loading and training it does without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pickle import UnpicklingError

import pytest
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from recipes.legal import models
from recipes.rules.check import check
from recipes.rules.models import the_weights_are_whole
from recipes.run import resolve
from tests.support.real_failures import assert_fires, tiny_llama, train
from tests.support.runs import CLASSIFY, MODEL, Run, model, weights

pytestmark = pytest.mark.usefixtures("fresh_state")

OWN_CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
QLORA = "--load_in_4bit --use_peft"
SCRATCH = "--from_scratch"


def without(*names: str, **config) -> dict:
    return {name: content for name, content in model(**config).items() if name.partition("/")[2] not in names}


INDEX = {"m/model.safetensors.index.json": {"weight_map": {"a": "model-00001-of-00002.safetensors"}}}
Q_PROJ = {"m/model.safetensors": weights("q_proj.weight")}

# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "the_model_is_a_folder": (Run(MODEL), Run(MODEL, files=model())),
    "the_folder_holds_a_model": (Run(MODEL, files=without("model.safetensors")), Run(MODEL, files=model())),
    "the_weights_are_whole": (
        Run(MODEL, files=model() | {"m/model.safetensors": weights()[:-1]}),
        Run(MODEL, files=model()),
    ),
    "the_configuration_has_numbers": (
        Run(MODEL, files=model(num_attention_heads="two")),
        Run(MODEL, files=model(num_attention_heads=2)),
    ),
    "the_configuration_divides_evenly": (
        Run(MODEL, files=model(hidden_size=32, num_attention_heads=5)),
        Run(MODEL, files=model(hidden_size=32, num_attention_heads=4)),
    ),
    "dropout_is_a_probability": (
        Run(MODEL, files=model(attention_dropout=1.5)),
        Run(MODEL, files=model(attention_dropout=1.0)),
    ),
    "lora_adapts_modules_of_the_model": (
        Run(f"{MODEL} --use_peft --lora_target_modules foo", files=model() | Q_PROJ),
        Run(f"{MODEL} --use_peft --lora_target_modules q_proj", files=model() | Q_PROJ),
    ),
    "lora_leaves_mambas_output_alone": (
        Run(f"{MODEL} --use_peft", files=model(model_type="mamba")),
        Run(f"{MODEL} --use_peft --lora_target_modules in_proj", files=model(model_type="mamba")),
    ),
    "the_model_type_is_known": (
        Run(MODEL, files=model(model_type="own", auto_map=OWN_CODE)),
        Run(f"{MODEL} --trust_remote_code", files=model(model_type="own", auto_map=OWN_CODE)),
    ),
    "the_model_can_do_the_task": (
        Run(f"{MODEL} {CLASSIFY}", files=model(model_type="mamba")),
        Run(f"{MODEL} {CLASSIFY}", files=model(model_type="llama")),
    ),
    "a_language_model_is_a_decoder": (
        Run(MODEL, files=model(model_type="bert")),
        Run(f"{MODEL} {CLASSIFY}", files=model(model_type="bert")),
    ),
    "a_language_model_has_its_head": (
        Run(MODEL, files=model(architectures=["LlamaForSequenceClassification"])),
        Run(MODEL, files=model(architectures=["LlamaForCausalLM"])),
    ),
    "sequences_fit_the_model": (
        Run(f"{MODEL} --max_length 129", files=model()),
        Run(f"{MODEL} --max_length 128", files=model()),
    ),
    "separate_examples_need_positions": (
        Run(f"{MODEL} --padding_free", files=model(model_type="bloom")),
        Run(f"{MODEL} --padding_free", files=model(model_type="gpt2")),
    ),
    "from_scratch_is_about_a_model": (
        Run(f"{MODEL} {SCRATCH}", files=model()),
        Run(f"{MODEL} {SCRATCH}", files=without("model.safetensors")),
    ),
    "stored_weights_can_be_trained": (
        Run(MODEL, files=model(quantization_config=NF4)),
        Run(f"{MODEL} --use_peft", files=model(quantization_config=NF4)),
    ),
    "stored_weights_stay_as_they_are": (
        Run(f"{MODEL} {QLORA} --bnb_4bit_quant_type fp4", files=model(quantization_config=NF4)),
        Run(f"{MODEL} {QLORA}", files=model(quantization_config=NF4)),
    ),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("separate_examples_need_positions", Run(f"{MODEL} --packing", files=model(model_type="bloom")), "packing"),
    ("the_model_is_a_folder", Run("--model_name_or_path a/b/c"), "model_name"),
    ("the_model_is_a_folder", Run(f"{MODEL}/config.json", files=model()), "model_name"),
    ("the_folder_holds_a_model", Run(MODEL, files=without("config.json")), "model_name"),
    ("the_folder_holds_a_model", Run(MODEL, files={"m/adapter_config.json": {}}), "model_name"),
    ("the_folder_holds_a_model", Run(MODEL, files=model() | {"m/config.json": "{"}), "model_name"),
    ("the_folder_holds_a_model", Run(MODEL, files=without("tokenizer.json", model_type="bert")), "model_name"),
    (
        "the_folder_holds_a_model",
        Run(MODEL, files=without("tokenizer.json") | {"m/chat_template.jinja": ""}),
        "model_name",
    ),
    (
        "the_folder_holds_a_model",
        Run(MODEL, files=without("model.safetensors") | {"m/model.safetensors/x": ""}),
        "model",
    ),
    ("the_folder_holds_a_model", Run(f"{MODEL} {SCRATCH}", files={"m/config.json": {"model_type": "bert"}}), "model"),
    ("from_scratch_is_about_a_model", Run(SCRATCH), "from_scratch"),
    ("the_weights_are_whole", Run(MODEL, files=model() | {"m/model.safetensors": "version https://"}), "model_name"),
    ("the_weights_are_whole", Run(MODEL, files=without("model.safetensors") | INDEX), "model_name"),
    *(
        ("the_weights_are_whole", Run(MODEL, files=without("model.safetensors") | {name: content}), "model_name")
        for name in ("m/model.safetensors", "m/pytorch_model.bin")
        for content in ("", "text", "<!DOCTYPE html>", "\0" * 99)
    ),
    ("the_model_type_is_known", Run(MODEL, files=model() | {"m/config.json": {}}), "model_name"),
    (
        "lora_leaves_mambas_output_alone",
        Run(f"{MODEL} --use_peft --lora_target_modules in_proj out_proj", files=model(model_type="mamba2")),
        "use_peft",
    ),
    ("the_model_type_is_known", Run(MODEL, files=model(model_type="lama")), "model_name"),
    ("the_model_type_is_known", Run(MODEL, files=model(model_type=None)), "model_name"),
    ("the_model_can_do_the_task", Run(MODEL, files=model(model_type="t5")), "model_name"),
    ("the_model_can_do_the_task", Run(MODEL, files=model(model_type="vit", auto_map=OWN_CODE)), "trust_remote_code"),
    ("sequences_fit_the_model", Run("--max_length 1025"), "max_length"),
    ("sequences_fit_the_model", Run(f"{MODEL} --max_length 600", files=without(model_type="roberta")), "max_length"),
    (
        "stored_weights_can_be_trained",
        Run(f"{MODEL} {QLORA}", files=model(quantization_config={"quant_method": "gptq", "bits": 4})),
        "load_in_4bit",
    ),
    (
        "stored_weights_can_be_trained",
        Run(f"{MODEL} --use_peft", files=model(quantization_config={"quant_method": "higgs"})),
        "model_name",
    ),
    (
        "stored_weights_can_be_trained",
        Run(f"{MODEL} --use_peft", files=model(quantization_config=NF4), missing=("bitsandbytes",)),
        "model_name",
    ),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("the_model_is_a_folder", Run("--model_name_or_path gpt2")),
    ("the_model_is_a_folder", Run("--model_name_or_path somebody/model")),
    ("the_model_is_a_folder", Run("--model_name_or_path /data/model", elsewhere=frozenset())),
    ("the_folder_holds_a_model", Run(MODEL, files=without("model.safetensors"), elsewhere=frozenset())),
    ("the_folder_holds_a_model", Run(MODEL, files=without("tokenizer.json", model_type="canine"))),
    ("the_folder_holds_a_model", Run(MODEL, files=without("tokenizer.json") | {"m/spiece.model": ""})),
    ("the_weights_are_whole", Run(MODEL, files=without("model.safetensors") | {"m/pytorch_model.bin": "PK\3\4"})),
    ("the_configuration_has_numbers", Run(MODEL, files=model(eos_token_id=[1, 2]))),
    (
        "lora_adapts_modules_of_the_model",  # fused as it is loaded
        Run(f"{MODEL} --use_peft --lora_target_modules gate_up_proj", files=model(model_type="mixtral") | Q_PROJ),
    ),
    ("a_language_model_is_a_decoder", Run(MODEL, files=model(model_type="bert", is_decoder=True))),
    ("a_language_model_is_a_decoder", Run(MODEL, files=model(model_type="bart"))),
    ("sequences_fit_the_model", Run(MODEL, files=model())),  # lowered from 1024
    (
        "sequences_fit_the_model",
        Run(f"{MODEL} --max_length 9999", files=model(model_type="bloom", max_position_embeddings=None)),
    ),
    ("stored_weights_can_be_trained", Run(MODEL, files=model(quantization_config={"quant_method": "fp8"}))),
    ("the_folder_holds_a_model", Run(f"{MODEL} {SCRATCH}", files=without("model.safetensors"))),
    ("the_weights_are_whole", Run(f"{MODEL} {SCRATCH}", files=model() | {"m/model.safetensors": "cut off"})),
    ("stored_weights_can_be_trained", Run(f"{MODEL} {SCRATCH}", files=model(quantization_config=NF4))),
    (
        "a_language_model_has_its_head",
        Run(
            f"{MODEL} {SCRATCH}",
            files=model(architectures=["LlamaForSequenceClassification"], tie_word_embeddings=False),
        ),
    ),
]


# --- What the libraries do ------------------------------------------------------------------------


def saved(folder, tokenizer=None, **config) -> str:
    """The folder of a tiny model whose config.json says something else, too."""
    tiny_llama().save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return str(folder)


def test_weights_that_are_cut_off_are_not_loaded(tmp_path):
    name = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    assert not list(the_weights_are_whole(resolve(["--model_name_or_path", name], environment={})))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(SafetensorError, match="file not fully covered"):
        AutoModelForCausalLM.from_pretrained(name)
    assert_fires("the_weights_are_whole", {"model_name_or_path": name})


@pytest.mark.parametrize(
    ("content", "raised"), [(b"", EOFError), (b"<!DOCTYPE html>", UnpicklingError)], ids=["empty", "a web page"]
)
def test_a_file_in_place_of_torchs_is_not_loaded(content, raised, tmp_path):
    name = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(raised):
        AutoModelForCausalLM.from_pretrained(name)
    assert_fires("the_weights_are_whole", {"model_name_or_path": name})


def test_a_configuration_with_text_for_a_number_is_not_loaded(tmp_path):
    name = saved(tmp_path, num_attention_heads="two")
    with pytest.raises(StrictDataclassError, match="expected int, got str"):
        AutoConfig.from_pretrained(name)
    assert_fires("the_configuration_has_numbers", {"model_name_or_path": name})


def test_peft_refuses_mambas_output():
    from peft import LoraConfig, get_peft_model
    from transformers import MambaConfig, MambaForCausalLM

    small = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)
    assert models.refused_by_lora("mamba") == {"out_proj", "conv1d"}
    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba-based models"):
        get_peft_model(MambaForCausalLM(small), LoraConfig(target_modules="all-linear"))
    get_peft_model(MambaForCausalLM(small), LoraConfig(target_modules=["in_proj", "x_proj"]))


def test_an_unknown_type_is_not_loaded(tmp_path):
    name = saved(tmp_path, model_type="lama")
    with pytest.raises(ValueError, match="does not recognize this architecture"):
        AutoConfig.from_pretrained(name)
    assert_fires("the_model_type_is_known", {"model_name_or_path": name})


def test_a_missing_type_is_not_guessed(tmp_path):
    name = saved(tmp_path, model_type=None)
    with pytest.raises(ValueError, match="does not recognize this architecture"):
        AutoConfig.from_pretrained(name)
    assert_fires("the_model_type_is_known", {"model_name_or_path": name})


def test_a_type_without_a_classifier_is_not_loaded():
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForSequenceClassification.from_config(AutoConfig.for_model("mamba"))


def test_a_bert_without_its_tokenizer_knows_no_word(tmp_path):
    from transformers import BertConfig

    BertConfig().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert set(tokenizer("a fine day", add_special_tokens=False)["input_ids"]) == {tokenizer.unk_token_id}
    (tmp_path / "model.safetensors").touch()
    assert_fires("the_folder_holds_a_model", {"model_name_or_path": str(tmp_path)})


def test_another_quantisation_is_not_loaded_in_four_bits(tmp_path):
    from transformers import BitsAndBytesConfig

    name = saved(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="quantized with GPTQConfig but you are passing a BitsAndBytesConfig"):
        AutoModelForCausalLM.from_pretrained(name, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert_fires("stored_weights_can_be_trained", {"model_name_or_path": name, "load_in_4bit": True, "use_peft": True})


def test_stored_four_bits_cannot_be_trained_without_adapters(tmp_path):
    from transformers import BitsAndBytesConfig

    tiny_llama().save_pretrained(tmp_path / "whole")
    quantised = BitsAndBytesConfig(load_in_4bit=True)
    stored = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", quantization_config=quantised, device_map={"": "cpu"}
    )
    stored.save_pretrained(tmp_path / "stored")
    with pytest.raises(ValueError, match="purely quantized"):
        train(tmp_path, model=AutoModelForCausalLM.from_pretrained(tmp_path / "stored"))
    assert_fires("stored_weights_can_be_trained", {"model_name_or_path": str(tmp_path / "stored")})


def test_a_classifiers_language_model_head_is_random(tmp_path):
    import torch
    from transformers import LlamaForSequenceClassification

    config = tiny_llama().config
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    heads = [AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight for _ in range(2)]
    assert not torch.equal(*heads)
    assert_fires("a_language_model_has_its_head", {"model_name_or_path": str(tmp_path)})


# --- One judgement, before the start and after the download ---------------------------------------


def test_a_hub_model_is_judged_by_the_same_rules_once_its_configuration_is_known():
    run = resolve(["--model_name_or_path", "somebody/model", "--max_length", "600"], environment={})
    assert not [problem for problem in check(run) if problem.severity == "error"]
    loaded = replace(run, model={"model_type": "bert", "max_position_embeddings": 512})
    errors = {problem.subject for problem in check(loaded) if problem.severity == "error"}
    assert errors == {"model_name_or_path", "max_length"}


def test_a_script_of_ones_own_loads_its_own_model():
    run = resolve([], settings={"task": "causal_lm", "max_length": 4096}, demonstrate=False, own_script=True)
    assert not check(run)
