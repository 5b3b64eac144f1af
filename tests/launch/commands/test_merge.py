"""`recipes merge`: the merged model is adapter plus base, in plain transformers."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from launch.cli import main
from tests.support.running import train_here

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LORA = "--use_peft --max_steps 3 --learning_rate 1e-2 --save_steps 2".split()


def merge(capsys, *words) -> tuple[int, str]:
    """The exit code, and what was printed."""
    capsys.readouterr()
    code = main(["merge", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out + said.err


def answers(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(40, 60).unsqueeze(0)).logits.float()


@pytest.fixture(scope="module")
def adapter(tiny_model, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    assert train_here(tiny_model, texts, folder, *LORA).code == 0
    return folder


def test_the_merged_model_is_adapter_plus_base_in_plain_transformers(adapter, tiny_model, tmp_path, capsys):
    code, said = merge(capsys, adapter, "--output", tmp_path / "merged")
    assert code == 0 and "logits of 3 inputs differ from adapter plus base by" in said and "at most 0.0001" in said
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    alone = answers(base)
    both = answers(PeftModel.from_pretrained(base, adapter))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(answers(merged), both, rtol=1e-5, atol=1e-5)
    assert (both - alone).abs().max() > 1e-2  # the adapter has learned something


def test_the_tokenizer_and_the_generation_config_come_along(tiny_model, texts, tmp_path, capsys):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    GenerationConfig(temperature=0.3, do_sample=True).save_pretrained(base)
    assert train_here(base, texts, tmp_path / "out", *LORA).code == 0
    assert merge(capsys, tmp_path / "out")[0] == 0
    merged = tmp_path / "out" / "merged"
    assert GenerationConfig.from_pretrained(merged).temperature == 0.3
    assert AutoTokenizer.from_pretrained(merged)("abc") == AutoTokenizer.from_pretrained(base)("abc")


def test_a_base_in_sixteen_bits_stays_in_them(adapter, tiny_model, tmp_path, capsys):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(base)
    code, said = merge(capsys, adapter, "--output", tmp_path / "merged", "--model_name_or_path", base)
    assert code == 0 and "in bfloat16" in said
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


def test_a_classifier_keeps_its_head_and_its_names(tiny_model, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    rows = [{"text": f"number {n}", "label": ("low", "middle", "high")[n % 3]} for n in range(32)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train_here(tiny_model, file, tmp_path / "out", *LORA, "--task", "sequence_classification").code == 0
    assert merge(capsys, tmp_path / "out")[0] == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "merged")
    assert list(merged.config.id2label.values()) == ["high", "low", "middle"]
    assert merged.config.problem_type == "single_label_classification"
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3)
    both = PeftModel.from_pretrained(base, tmp_path / "out")
    torch.testing.assert_close(answers(merged), answers(both), rtol=1e-5, atol=1e-5)


def test_an_adapter_of_qlora_goes_into_the_whole_weights(tiny_model, texts, tmp_path, capsys):
    assert train_here(tiny_model, texts, tmp_path / "out", *LORA, "--load_in_4bit").code == 0
    code, said = merge(capsys, tmp_path / "out")
    assert code == 0 and "it is merged into the unquantised ones" in said
    config = json.loads((tmp_path / "out" / "merged" / "config.json").read_text())
    assert "quantization_config" not in config


@pytest.mark.parametrize("more", [(), ("--load_in_4bit",)], ids=["dora", "qdora"])
def test_an_adapter_of_dora_is_merged_with_its_magnitudes(more, tiny_model, texts, tmp_path, capsys):
    assert train_here(tiny_model, texts, tmp_path / "out", *LORA, "--use_dora", *more).code == 0
    assert merge(capsys, tmp_path / "out")[0] == 0
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    both = answers(PeftModel.from_pretrained(base, tmp_path / "out"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    torch.testing.assert_close(answers(merged), both, rtol=1e-5, atol=1e-5)


def test_the_newest_checkpoint_of_a_run_that_was_killed(adapter, tmp_path, capsys):
    for step in (2, 3):
        shutil.copytree(adapter / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-3" / "optimizer.pt").write_bytes(b"cut off")
    code, said = merge(capsys, tmp_path)
    assert code == 0 and "checkpoint-2, its newest checkpoint, is merged" in said
    assert (tmp_path / "merged" / "model.safetensors").exists()


@pytest.mark.parametrize("base", ["gone/base", "/gone/base"])
def test_a_base_that_has_moved_is_named(base, adapter, tiny_model, tmp_path, capsys):
    folder = shutil.copytree(adapter, tmp_path / "out")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    assert merge(capsys, folder, "--output", tmp_path / "one")[0] == 0  # run.json knows where it was
    (folder / "run.json").unlink()
    code, said = merge(capsys, folder, "--output", tmp_path / "two")
    assert code == 2 and base in said and "Fix: " in said
    assert merge(capsys, folder, "--output", tmp_path / "two", "--model_name_or_path", tiny_model)[0] == 0


def test_a_base_of_the_same_shape_with_other_weights_is_told(adapter, tiny_model, tmp_path, capsys):
    assert "is not what the adapter was trained on" not in merge(capsys, adapter, "--output", tmp_path / "right")[1]
    base = shutil.copytree(tiny_model, tmp_path / "base")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).save_pretrained(base)
    said = merge(capsys, adapter, "--model_name_or_path", base, "--output", tmp_path / "merged")[1]
    assert f"{base} is not what the adapter was trained on" in " ".join(said.split())


def test_weights_that_have_no_place_or_are_not_there(adapter, tiny_model, tmp_path, capsys):
    shorter = LlamaForCausalLM(AutoConfig.from_pretrained(tiny_model, num_hidden_layers=1))
    shorter.save_pretrained(tmp_path / "shorter")
    flags = ["--output", tmp_path / "merged"]
    code, said = merge(capsys, adapter, *flags, "--model_name_or_path", tmp_path / "shorter")
    assert code == 2 and "there is no place for 14 tensors such as base_model.model.model.layers.1." in said
    folder = shutil.copytree(adapter, tmp_path / "out")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"].append("lm_head")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    code, said = merge(capsys, folder, *flags)
    assert code == 2 and "it has no weights for 2 tensors such as base_model.model.lm_head" in said
    assert not (tmp_path / "merged").exists()


# --- What is not merged ---------------------------------------------------------------------------


def test_an_output_that_exists_is_left_alone(adapter, tmp_path, capsys):
    (tmp_path / "kept").write_text("mine")
    code, said = merge(capsys, adapter, "--output", tmp_path)
    assert code == 2 and "is there already" in said and (tmp_path / "kept").read_text() == "mine"


def test_a_folder_without_an_adapter(tiny_model, tmp_path, capsys):
    for folder in (tiny_model, tmp_path / "nowhere"):
        assert f"{folder} holds no adapter" in merge(capsys, folder)[1]


def test_a_base_that_is_stored_quantised(adapter, tiny_model, tmp_path, capsys):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    code, said = merge(capsys, adapter, "--output", tmp_path / "merged", "--model_name_or_path", base)
    assert code == 2 and "is stored quantised" in said


def test_an_output_that_cannot_be_made(adapter, texts, capsys):
    for output in (texts / "merged", "/proc/merged"):
        code, said = merge(capsys, adapter, "--output", output)
        assert code == 2 and f"error  output: {output} cannot be written: " in said


def test_a_model_that_is_not_equal_is_not_written(tiny_model, tmp_path, capsys):
    """LoRA on the input embeddings of a model whose output embeddings are the same weights."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=260, **SMALL, tie_word_embeddings=True)).save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "base")
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens"], init_lora_weights=False)
    get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path / "base"), lora).save_pretrained(tmp_path / "adapter")
    code, said = merge(capsys, tmp_path / "adapter")
    assert code == 1 and "nothing was written" in said and not (tmp_path / "adapter" / "merged").exists()
