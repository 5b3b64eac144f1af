"""`recipes merge`: the merged model is adapter plus base, in plain transformers."""

import os
import shutil

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import AutoModelForSequenceClassification as Classifier

from launch.cli import main
from launch.commands.use import INPUTS, _logits
from tests.launch.commands.test_use import answered
from tests.support.models import SMALL, write_llama
from tests.support.rows import jsonl
from tests.support.running import train_here

LORA = "--use_peft --max_steps 3 --learning_rate 1e-2 --save_steps 2".split()


def merge(capsys, *words) -> tuple[int, str]:
    """The exit code, and what was printed, in one line."""
    code, said = answered(capsys, "merge", *words)
    return code, " ".join(said.split())


def answers(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(40, 60).unsqueeze(0)).logits.float()


def assert_is_adapter_plus_base(merged, adapter, base):
    alone = answers(base)
    both = answers(PeftModel.from_pretrained(base, adapter))
    torch.testing.assert_close(answers(merged), both, rtol=1e-5, atol=1e-5)
    assert (both - alone).abs().max() > 1e-3  # the adapter has learned something


@pytest.fixture(scope="module")
def adapter(tiny_model, texts, tmp_path_factory):
    """A run's folder, and `base` beside it, which has a generation config of its own."""
    folder = tmp_path_factory.mktemp("run")
    base = shutil.copytree(tiny_model, folder / "base")
    (base / "generation_config.json").write_text('{"temperature": 0.3, "do_sample": true}')
    assert train_here(base, texts, folder / "out", *LORA).code == 0
    return folder / "out"


def test_the_merged_model_has_the_logits_of_adapter_plus_base_in_plain_transformers(adapter, tmp_path, capsys):
    merged, base = tmp_path / "merged", adapter.parent / "base"
    code, said = merge(capsys, adapter, "--output", merged)
    assert code == 0 and "those of adapter plus base differ by" in said and "float32: 0.0001" in said
    assert "is not the model that the adapter was trained on" not in said
    loaded = AutoModelForCausalLM.from_pretrained(merged)
    assert_is_adapter_plus_base(loaded, adapter, AutoModelForCausalLM.from_pretrained(base))
    assert loaded.generation_config.temperature == 0.3
    assert AutoTokenizer.from_pretrained(merged)("abc") == AutoTokenizer.from_pretrained(base)("abc")


def test_saved_weights_have_the_file_mode_that_the_umask_gives_and_not_600(adapter, tmp_path, capsys):
    merge(capsys, adapter, "--output", tmp_path / "merged")
    weights = [*adapter.rglob("adapter_model.safetensors"), tmp_path / "merged" / "model.safetensors"]
    assert {file.stat().st_mode for file in weights} == {(adapter / "run.json").stat().st_mode} and len(weights) > 2


def test_merge_with_a_bfloat16_base_model_stays_in_bfloat16(adapter, tiny_model, tmp_path, capsys):
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(base)
    code, said = merge(capsys, adapter, "--output", tmp_path / "merged", "--model_name_or_path", base)
    assert code == 0 and "in bfloat16" in said and f"{base} is not the model that the adapter was trained on" in said
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


def test_merge_compares_logits_of_a_bart_classifier_which_needs_an_eos_in_its_input():
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    model = Classifier.from_config(AutoConfig.for_model("bart", vocab_size=260, d_model=32, **sizes, num_labels=2))
    assert _logits(model, eos=model.config.eos_token_id).shape == (INPUTS, 2)


def test_a_merged_classifier_keeps_its_head_and_its_class_names(tiny_model, tmp_path, capsys):
    rows = [{"text": f"number {n}", "label": ("low", "middle", "high")[n % 3]} for n in range(32)]
    file = jsonl(tmp_path, rows)
    assert train_here(tiny_model, file, tmp_path / "out", *LORA, "--task", "sequence_classification").code == 0
    assert merge(capsys, tmp_path / "out")[0] == 0
    merged = Classifier.from_pretrained(tmp_path / "out" / "merged")
    assert list(merged.config.id2label.values()) == ["high", "low", "middle"]
    assert merged.config.problem_type == "single_label_classification"
    base = Classifier.from_pretrained(tiny_model, num_labels=3)
    assert_is_adapter_plus_base(merged, tmp_path / "out", base)


@pytest.mark.parametrize("flags", ["--use_dora", "--use_dora --load_in_4bit"])
def test_dora_and_qdora_adapters_merge_into_the_unquantised_base_weights(flags, tiny_model, texts, tmp_path, capsys):
    assert train_here(tiny_model, texts, tmp_path / "out", *LORA, *flags.split()).code == 0
    code, said = merge(capsys, tmp_path / "out")
    assert (code, "it is merged into the unquantised weights" in said) == (0, "4bit" in flags)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert_is_adapter_plus_base(merged, tmp_path / "out", AutoModelForCausalLM.from_pretrained(tiny_model))
    assert not hasattr(merged.config, "quantization_config")


def test_merge_of_a_killed_run_advises_its_newest_checkpoint_and_accepts_a_checkpoint(adapter, tmp_path, capsys):
    for step in (2, 3):
        shutil.copytree(adapter / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    shutil.copy(adapter / "run.json", tmp_path)
    assert f"Fix: recipes merge {tmp_path / 'checkpoint-3'}" in merge(capsys, tmp_path)[1]
    assert merge(capsys, tmp_path / "checkpoint-2", "--output", tmp_path / "merged")[0] == 0


# --- What is not merged ---------------------------------------------------------------------------


def test_merge_names_a_missing_base_model_and_accepts_model_name_or_path_instead(adapter, tmp_path, capsys):
    folder = shutil.copytree(adapter, tmp_path / "out")
    base = str(adapter.parent / "base")
    (folder / "run.json").write_text((folder / "run.json").read_text().replace(base, "/gone/base"))
    code, said = merge(capsys, folder)
    assert code == 2 and "/gone/base cannot be loaded" in said
    assert merge(capsys, folder, "--model_name_or_path", base)[0] == 0


def test_merge_notes_a_missing_file_in_the_run_folder(adapter, tmp_path, capsys):
    folder = shutil.copytree(adapter, tmp_path / "out")
    (folder / "tokenizer_config.json").unlink()
    code, said = merge(capsys, folder)
    assert code == 0 and "tokenizer_config.json is missing: copy the files from the newest checkpoint" in said


def test_an_adapter_for_layers_that_the_base_lacks_is_refused(adapter, tiny_model, tmp_path, capsys):
    shorter = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model, num_hidden_layers=1))
    shorter.save_pretrained(tmp_path / "shorter")
    code, said = merge(capsys, adapter, "--output", tmp_path / "merged", "--model_name_or_path", tmp_path / "shorter")
    assert code == 2 and "the adapter has 14 unexpected tensors such as base_model.model.model.layers.1." in said
    assert not (tmp_path / "merged").exists()


def test_generate_warns_that_a_merged_model_is_older_than_its_adapter(adapter, tmp_path, capsys):
    run = shutil.copytree(adapter, tmp_path / "run")
    assert merge(capsys, run)[0] == 0
    words = ["generate", str(run / "merged"), "a", "--max_new_tokens", "1"]
    assert main(words) == 0 and "is older than its adapter" not in capsys.readouterr().err
    os.utime(run / "merged", (0, 0))
    assert main(words) == 0 and "is older than its adapter" in capsys.readouterr().err


def test_merge_refuses_folders_without_adapter_and_outputs_that_exist(adapter, tiny_model, texts, tmp_path, capsys):
    assert "exists already" in merge(capsys, adapter, "--output", tiny_model)[1]
    (tmp_path / "older").mkdir()
    os.utime(tmp_path / "older", (0, 0))
    assert "and is older than the adapter" in merge(capsys, adapter, "--output", tmp_path / "older")[1]
    assert f"{tiny_model} holds no adapter" in merge(capsys, tiny_model)[1]
    assert "does not exist" in merge(capsys, tmp_path / "absent")[1]
    (tmp_path / "checkpoint-2").mkdir()  # of a whole model
    assert "other runs need no merge" in merge(capsys, tmp_path)[1]
    output = texts / "merged"
    assert f"error output: {output} cannot be written: " in merge(capsys, adapter, "--output", output)[1]


def test_merge_writes_nothing_if_the_merged_logits_differ_from_adapter_plus_base(texts, tmp_path, capsys):
    """LoRA on the input embeddings of a model whose output embeddings are the same weights."""
    base = write_llama(tmp_path / "base", **SMALL, intermediate_size=32, tie_word_embeddings=True)
    flags = [*LORA, "--lora_target_modules", "embed_tokens"]
    assert train_here(base, texts, tmp_path / "out", *flags).code == 0
    code, said = merge(capsys, tmp_path / "out")
    assert code == 1 and "nothing was written" in said and not (tmp_path / "out" / "merged").exists()
