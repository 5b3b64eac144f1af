"""Rules about data, models, adapters and attention, and what happens without them."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BertConfig

from recipes.rules.check import check
from recipes.rules.data_and_model import attention_fits_the_machine, refused_by_class
from tests.support.real_failures import assert_fires, tiny_llama
from tests.support.runs import A100, CLASSIFY, EVAL, H100, MODEL, T4, Gpu, Run, fsdp, machine, model, resolved

ROW = '{"text": "a"}\n'
STREAM = "--dataset_streaming --max_steps 9"
LFS = "version https://git-lfs.github.com/spec/v1\n"
OWN_CODE = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
SCRATCH = "--from_scratch"
FLASH = "--attn_implementation flash_attention_2"
FLEX, SDPA = "--attn_implementation flex_attention", "--attn_implementation sdpa"
ON_A100 = {"hardware": machine(A100)}
B200 = Gpu("NVIDIA B200", (10, 0), 180 << 30)
NO_FLASH = ("flash_attn", "flash_attn_interface", "kernels")
SMOOTHED = "--use_liger_kernel --label_smoothing_factor 0.1"
ON_HEAD = "--use_peft --lora_target_modules q_proj lm_head"
LIGER = f"{ON_HEAD} --use_liger_kernel"

HELD_OUT = f"--dataset_name d {EVAL} --dataset_test_split train[80%:]"


def without(*names: str, **config) -> dict:
    return {name: content for name, content in model(**config).items() if name.partition("/")[2] not in names}


def data(flags: str, **files: str) -> Run:
    return Run(f"--dataset_name {flags}", files={name.replace("__", "."): content for name, content in files.items()})


# rule -> a run in which it fires, and the nearest one in which it does not
CASES = {
    "the_data_exists": (Run("--dataset_name d.csv"), data("d.csv", d__csv="text\na\n")),
    "a_data_file_can_be_read": (data("d.xlsx", d__xlsx="a"), data("d.jsonl", d__jsonl=ROW)),
    "the_splits_can_be_read": (
        data(f"d.jsonl {EVAL}", d__jsonl=ROW),
        data(
            f"d.jsonl {EVAL} --dataset_test_split train[95%:] --dataset_train_split train[:10]+train[20:95%]",
            d__jsonl=ROW,
        ),
    ),
    "evaluation_rows_are_not_trained": (
        Run(f"{HELD_OUT} --dataset_train_split train[:90%]"),
        Run(f"{HELD_OUT} --dataset_train_split train[:80%]"),
    ),
    "the_model_is_a_folder": (Run(MODEL), Run(MODEL, files=model())),
    "the_folder_holds_a_model": (Run(MODEL, files=without("model.safetensors")), Run(MODEL, files=model())),
    "the_model_can_do_the_task": (
        Run(f"{MODEL} {CLASSIFY}", files=model(model_type="mamba")),
        Run(f"{MODEL} {CLASSIFY}", files=model(model_type="llama")),
    ),
    "a_language_model_is_a_decoder": (
        Run(MODEL, files=model(model_type="bert")),
        Run(f"{MODEL} {CLASSIFY}", files=model(model_type="bert")),
    ),
    "sequences_fit_the_model": (
        Run(f"{MODEL} --max_length 129", files=model()),
        Run(f"{MODEL} --max_length 128", files=model()),
    ),
    "lora_on_tied_weights_cannot_be_merged": (
        Run(f"{MODEL} {ON_HEAD}", files=model(tie_word_embeddings=True)),
        Run(f"{MODEL} {ON_HEAD}", files=model()),
    ),
    "the_routers_loss_counts_once_in_a_step": (
        Run(MODEL, files=model(output_router_logits=True)),
        Run(f"{MODEL} --global_batch_size 4", files=model(output_router_logits=True)),
    ),
    "lora_on_the_head_gets_gradients": (
        Run(f"{MODEL} {LIGER}", files=model(), **ON_A100),
        Run(f'{MODEL} {LIGER} --liger_kernel_config {{"fused_linear_cross_entropy":false}}', files=model(), **ON_A100),
    ),
    "liger_evaluates_plain_labels": (
        Run(f"{SMOOTHED} {EVAL} {MODEL}", files=model(), **ON_A100),
        Run(f"{SMOOTHED} {EVAL} {MODEL}", files=model(model_type="gpt2"), **ON_A100),  # no fused loss
    ),
    "attention_is_known": (Run("--attn_implementation SDPA"), Run(SDPA)),
    "attention_fits_the_model": (
        Run(f"{FLASH} {MODEL}", files=model(head_dim=512)),
        Run(f"{FLASH} {MODEL}", files=model(head_dim=256)),
    ),
    "attention_fits_the_machine": (Run(FLEX), Run(FLEX, **ON_A100)),
}

# rule, another run in which it fires, a part of the subject
ALSO_FIRES = [
    ("the_data_exists", Run("--dataset_name ./no"), "dataset_name"),
    ("the_data_exists", data("d/*.jsonl", **{"d/a.csv": ""}), "dataset_name"),
    ("a_data_file_can_be_read", data("d/*", **{"d/a.csv": "a", "d/b.jsonl": ROW}), "dataset_name"),
    ("a_data_file_can_be_read", data("d.jsonl", d__jsonl=""), "dataset_name"),
    ("the_splits_can_be_read", CASES["the_splits_can_be_read"][0], "'train[90%:]' --dataset_train_split 'train[:90%]'"),
    ("the_splits_can_be_read", data("d.jsonl --dataset_train_split validation", d__jsonl=ROW), "train_split"),
    ("the_splits_can_be_read", data("d.jsonl --dataset_train_split train[:80%", d__jsonl=ROW), "train_split"),
    ("the_splits_can_be_read", data("d.jsonl --dataset_train_split train[:101%]", d__jsonl=ROW), "train_split"),
    ("the_splits_can_be_read", data(f"d.jsonl e.jsonl {EVAL}", d__jsonl=ROW, e__jsonl=ROW), "test_split"),
    ("the_splits_can_be_read", Run(f"--dataset_name d {STREAM} --dataset_train_split train[:95%]"), "train_split"),
    ("the_splits_can_be_read", Run(f"{STREAM} {EVAL} --dataset_test_split test+dev"), "test_split"),
    ("evaluation_rows_are_not_trained", Run(HELD_OUT), "dataset_test_split"),  # all of train
    ("the_model_is_a_folder", Run("--model_name_or_path m/bsae", files={"m/base/config.json": {}}), "model_name"),
    ("the_model_is_a_folder", Run("--model_name_or_path nosuch/"), "model_name"),
    ("the_model_is_a_folder", Run(f"{MODEL}/config.json", files=model()), "model_name"),
    ("the_folder_holds_a_model", Run(MODEL, files={"m/adapter_config.json": {}}), "model_name"),
    ("the_folder_holds_a_model", Run(MODEL, files=model() | {"m/model.safetensors": LFS}), "model_name"),
    ("the_folder_holds_a_model", Run(MODEL, files=without("tokenizer.json", model_type="bert")), "model_name"),
    ("the_model_can_do_the_task", Run(MODEL, files=model(model_type="lama")), "model_name"),
    ("the_model_can_do_the_task", Run(MODEL, files=model(model_type=None)), "model_name"),
    ("the_model_can_do_the_task", Run(MODEL, files=model(model_type="own", auto_map=OWN_CODE)), "trust_remote_code"),
    ("the_model_can_do_the_task", Run(MODEL, files=model(model_type="vit", auto_map=OWN_CODE)), "trust_remote_code"),
    ("sequences_fit_the_model", Run(f"{MODEL} --max_length 600", files=without(model_type="roberta")), "max_length"),
    *(
        ("attention_fits_the_machine", run, "attn_implementation")
        for run in (
            Run(FLASH),
            Run("--attn_implementation kernels-community/flash-attn2"),
            Run(f"{FLASH} --use_cpu", **ON_A100),
            Run(FLASH, hardware=machine(T4)),
            Run(f"{FLASH} --recipe baseline", **ON_A100),  # in fp32
            Run(FLASH, **ON_A100, missing=NO_FLASH),
            Run("--attn_implementation org/kernel", missing=NO_FLASH, **ON_A100),
        )
    ),
]

# rule, another run that is legal
LEGAL_AFTER_ALL = [
    ("the_data_exists", Run("--dataset_name somebody/reviews")),
    ("the_data_exists", Run("--dataset_name ./nothing", elsewhere=frozenset())),
    ("a_data_file_can_be_read", data("d/*", **{"d/a.csv": "a", "d/b.csv.gz": "b"})),
    ("the_splits_can_be_read", data("d.jsonl --dataset_test_split test", d__jsonl=ROW)),  # nothing evaluates
    ("the_splits_can_be_read", data(f"d {EVAL}", **{"d/a.jsonl": ROW})),
    ("the_splits_can_be_read", Run(f"--dataset_name d {STREAM} --dataset_train_split en")),
    ("the_model_is_a_folder", Run("--model_name_or_path somebody/model")),
    ("evaluation_rows_are_not_trained", Run(f"{HELD_OUT} --dataset_train_split train[:64]")),  # who knows
    ("evaluation_rows_are_not_trained", Run(f"--dataset_name d {EVAL} --dataset_test_split test")),
    ("the_model_is_a_folder", Run("--model_name_or_path /data/model", elsewhere=frozenset())),
    ("the_folder_holds_a_model", Run(f"{MODEL} {SCRATCH}", files=without("model.safetensors"))),
    ("the_model_can_do_the_task",
     Run(f"{MODEL} --trust_remote_code", files=model(model_type="own", auto_map=OWN_CODE))),
    ("a_language_model_is_a_decoder", Run(MODEL, files=model(model_type="bert", is_decoder=True))),
    ("a_language_model_is_a_decoder", Run(MODEL, files=model(model_type="bart", is_encoder_decoder=True))),
    ("sequences_fit_the_model", Run(MODEL, files=model())),  # lowered from 1024
    ("lora_on_the_head_gets_gradients", Run(f"{MODEL} {LIGER}", files=model(model_type="gpt2"), **ON_A100)),
    ("attention_is_known", Run("--attn_implementation org/kernel@main:forward")),
    ("attention_fits_the_machine", Run(f"{FLASH} --recipe baseline --dtype bfloat16", **ON_A100)),
    ("attention_fits_the_machine", Run(FLASH, **ON_A100, missing=("flash_attn",))),  # the package kernels has it
]  # fmt: skip


# --- Models as the libraries load them ------------------------------------------------------------


def test_bert_without_tokenizer_files_encodes_every_word_as_unk(tmp_path):
    BertConfig().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert set(tokenizer("a fine day", add_special_tokens=False)["input_ids"]) == {tokenizer.unk_token_id}
    (tmp_path / "model.safetensors").touch()
    assert_fires("the_folder_holds_a_model", {"model_name_or_path": str(tmp_path)})


@pytest.mark.parametrize(("kind", "severity"), [("rotary", "advice"), ("absolute", "error")])
def test_only_a_rotary_model_may_train_beyond_its_position_limit(kind, severity, tmp_path, monkeypatch):
    files = model(rope_theta=1e4, position_embedding_type=kind)  # ESM has both keys
    run = Run(f"{MODEL} --max_length 129", files=files).resolve(tmp_path, monkeypatch)
    found = [problem for problem in check(run) if problem.subject == "max_length"]
    assert [(one.severity, "rope_parameters" in one.fix) for one in found] == [(severity, kind == "rotary")]


def test_bert_is_refused_as_a_language_model_because_it_sees_the_tokens_that_it_has_to_predict(tmp_path):
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=32)
    model = AutoModelForCausalLM.from_config(BertConfig(**sizes)).eval()
    first = [model(input_ids=torch.tensor([[1, token]])).logits[0, 0] for token in (2, 3)]
    assert not torch.equal(*first)
    model.save_pretrained(tmp_path)
    assert_fires("a_language_model_is_a_decoder", {"model_name_or_path": str(tmp_path)})


def test_lora_on_lm_head_gets_no_gradient_if_the_loss_reads_lm_head_weight():
    """Liger's fused loss multiplies the hidden states by `lm_head.weight`, as this test does."""
    adapted = get_peft_model(tiny_llama(), LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    inner = adapted.get_base_model()
    hidden = inner.model(torch.arange(8).view(1, -1)).last_hidden_state
    (hidden @ inner.lm_head.weight.T).sum().backward()
    trained = {name: weight.grad is not None for name, weight in adapted.named_parameters() if "lora_" in name}
    assert {name.split(".lora_")[0].split(".")[-1]: seen for name, seen in trained.items()} == {
        "lm_head": False,
        "q_proj": True,
    }


# --- Attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma4"])
def test_flash_attention_2_is_refused_for_gemma_4_with_its_head_dim_of_512(kind, tmp_path):
    config = AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    layers = config.get_text_config().to_dict()["per_layer_config"]
    assert {layer["head_dim"] for layer in layers.values()} == {512}
    settings = {"attn_implementation": "flash_attention_2", "model_name_or_path": str(tmp_path)}
    assert_fires("attention_fits_the_model", settings, gpu=(8, 0))


@pytest.mark.parametrize(
    ("version", "card", "missing", "severity", "fix"),
    [
        (3, H100, (), [], ""),
        (3, A100, (), ["advice"], "flash_attention_2"),  # somebody has built it for this card
        (3, A100, NO_FLASH, ["error"], "flash_attention_2"),
        (3, B200, (), ["error"], "flash_attention_2 or flash_attention_4"),
        (4, B200, (), [], ""),
        (4, A100, NO_FLASH, ["error"], "flash_attention_2"),
    ],
)
def test_flash_attention_3_and_4_need_a_supported_card(version, card, missing, severity, fix, tmp_path, monkeypatch):
    asked = f"--attn_implementation flash_attention_{version} --bf16"
    run = Run(asked, hardware=machine(card), missing=missing).resolve(tmp_path, monkeypatch)
    found = list(attention_fits_the_machine(run))
    assert ([problem.severity for problem in found], "".join(problem.fix for problem in found)) == (severity, fix)


def test_a_script_with_its_own_model_passes_the_check_without_model_name_or_path():
    run = resolved(settings={"task": "causal_lm", "max_length": 4096}, trained_by="script")
    assert not check(run)


# --- What only the model's class tells ------------------------------------------------------------


def of_class(flags: str, cls: str, tmp_path, monkeypatch, **place) -> list[tuple[str, str]]:
    run = Run(flags, **place).resolve(tmp_path, monkeypatch)
    return [(found.subject, found.fix) for found in refused_by_class(run, getattr(transformers, cls))]


def test_sdpa_is_refused_for_a_model_class_that_does_not_support_it(tmp_path, monkeypatch):
    assert [name for name, _ in of_class(SDPA, "BloomForCausalLM", tmp_path, monkeypatch)] == ["attn_implementation"]
    assert not of_class(SDPA, "GPT2LMHeadModel", tmp_path, monkeypatch)


def test_an_fsdp_layer_class_that_the_model_lacks_is_refused_with_the_models_layer_class(tmp_path, monkeypatch):
    written = fsdp("fsdp_version: 2", "fsdp_transformer_layer_cls_to_wrap: GPT2Block")
    place = {"yaml": written, "hardware": machine(A100, 2)}
    assert of_class("", "LlamaForCausalLM", tmp_path, monkeypatch, **place) == [("fsdp_config", "LlamaDecoderLayer")]
    assert of_class("", "BertForSequenceClassification", tmp_path, monkeypatch, **place)
    assert not of_class("", "GPT2LMHeadModel", tmp_path, monkeypatch, **place)
