"""`recipes evaluate` and `recipes generate`: the model of a run, as the run trained it."""

import shutil

import pytest
from peft import AutoPeftModelForCausalLM
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from launch.cli import main
from tests.support.models import save
from tests.support.rows import jsonl
from tests.support.running import read_record, rewrite, train_here

HELD_OUT = "--dataset_train_split train[:80%] --dataset_test_split train[80%:] --eval_strategy epoch".split()
SHORT = "--max_steps 4 --learning_rate 1e-2".split()


@pytest.fixture(scope="module")
def adapter(tiny_model, texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("adapter")
    done = train_here(tiny_model, texts, output, *HELD_OUT, *SHORT, "--use_peft", "--dataloader_drop_last")
    assert done.code == 0 and "recipes generate" in done.output and "recipes merge" in done.output
    return output


def answered(capsys, *words) -> tuple[int, str]:
    """The exit code, and what was printed."""
    capsys.readouterr()
    code = main([*map(str, words)])
    said = capsys.readouterr()
    return code, said.out + said.err


def evaluated(capsys, *words) -> float:
    code, said = answered(capsys, "evaluate", *words)
    assert code == 0 and "importing the libraries ..." in said and ", split train" in said, said
    return float(said.split("eval_loss")[1].split()[0])


def test_recipes_evaluate_repeats_the_eval_loss_in_run_json(adapter, capsys):
    assert evaluated(capsys, adapter) == pytest.approx(read_record(adapter)["eval_loss"], abs=1e-4)


def test_recipes_evaluate_says_that_the_data_has_changed_since_the_run(adapter, texts, tmp_path, capsys):
    run = shutil.copytree(adapter, tmp_path / "run")
    rewrite(run, data="sha256-of-other-rows")
    assert f"{texts} has changed since the run" in answered(capsys, "evaluate", run)[1]


def test_recipes_evaluate_uses_all_of_another_dataset_unless_a_test_split_is_given(adapter, texts, tmp_path, capsys):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(texts.read_text().splitlines(keepends=True)[:3]))
    whole = evaluated(capsys, adapter, "--dataset_name", few)
    named = evaluated(capsys, adapter, "--dataset_name", texts, "--dataset_test_split", "train[:3]")
    assert whole == pytest.approx(named, abs=1e-4)


def test_recipes_evaluate_counts_evaluated_rows_that_the_run_trained_on(adapter, texts, tmp_path, capsys):
    copy = shutil.copy(texts, tmp_path / "copy.jsonl")
    said = answered(capsys, "evaluate", adapter, "--dataset_name", copy)[1]
    assert ", 205 of the rows are also trained on" in said
    few = jsonl(tmp_path, [{"text": "something else"}])
    assert "also trained on" not in answered(capsys, "evaluate", adapter, "--dataset_name", few)[1]


def test_recipes_evaluate_uses_the_datas_own_test_split_if_the_run_did(tiny_model, texts, tmp_path, capsys):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(texts.read_text())
    run = train_here(tiny_model, tmp_path, tmp_path / "out", *SHORT, "--eval_strategy", "epoch")
    code, said = answered(capsys, "evaluate", tmp_path / "out")
    assert code == 0 and f"{run.record['eval_loss']:.4f}" in said


def test_recipes_evaluate_evaluates_a_run_of_recipe_memory_in_one_process(tiny_model, texts, tmp_path, capsys):
    assert train_here(tiny_model, texts, tmp_path / "out", *SHORT, "--recipe", "memory").code == 0
    assert 0 < evaluated(capsys, tmp_path / "out", "--dataset_name", texts) < 6


def test_recipes_evaluate_asks_for_dataset_name_if_the_run_has_no_held_out_data(tiny_model, texts, tmp_path, capsys):
    assert train_here(tiny_model, texts, tmp_path / "out", *SHORT).code == 0
    code, said = answered(capsys, "evaluate", tmp_path / "out")
    assert code == 2 and "has no held-out data" in said and "Fix: add --dataset_name" in said
    assert not (tmp_path / "out" / "README.md").exists()  # only an adapter has a card


def test_the_model_card_of_an_adapter_names_base_model_data_recipe_and_eval_loss(adapter, tiny_model, texts):
    card, record = (adapter / "README.md").read_text(), read_record(adapter)
    assert f"base_model: {tiny_model}\n" in card and f"the {texts} dataset" in card and "recipe `standard`" in card
    assert f"- Loss: {record['eval_loss']:.4f}" in card and "[More Info" not in card and f"[{tiny_model}](" not in card


def first_tokens(model, inputs, tokenizer) -> str:
    """What plain transformers generates, as text."""
    made = model.generate(**inputs, max_new_tokens=8)[0][inputs["input_ids"].shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True).strip()


def test_recipes_generate_answers_as_plain_peft_for_an_adapter_trained_on_chats(adapter, tmp_path, capsys):
    adapter = shutil.copytree(adapter, tmp_path / "chats")
    rewrite(adapter, chats=True)
    tokenizer, model = AutoTokenizer.from_pretrained(adapter), AutoPeftModelForCausalLM.from_pretrained(adapter)
    chat = [{"role": "user", "content": "Example 3 says"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    code, said = answered(capsys, "generate", adapter, "Example 3 says", "--max_new_tokens", "8")
    assert code == 0 and first_tokens(model, inputs, tokenizer) in said


def test_recipes_generate_continues_the_text_after_a_training_on_plain_text(tiny_model, texts, tmp_path, capsys):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    appends = AutoTokenizer.from_pretrained(base)  # EOS, which a text to continue must not get
    eos = [(appends.eos_token, appends.eos_token_id)]
    appends._tokenizer.post_processor = TemplateProcessing(single=f"$A {appends.eos_token}", special_tokens=eos)
    appends.save_pretrained(base)
    assert train_here(base, texts, tmp_path / "out", *"--max_steps 1 --learning_rate 1e-5".split()).code == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    inputs = tokenizer("Example 3 says", return_tensors="pt", return_token_type_ids=False, add_special_tokens=False)
    code, said = answered(capsys, "generate", tmp_path / "out", "Example 3 says", "--max_new_tokens", "8")
    assert code == 0 and first_tokens(model, inputs, tokenizer) in said
    whole = tokenizer("Example 3 says", return_tensors="pt", return_token_type_ids=False)  # with EOS
    assert first_tokens(model, whole, tokenizer) != first_tokens(model, inputs, tokenizer)


def test_recipes_generate_refuses_more_tokens_than_absolute_positions_and_an_empty_prompt(texts, tmp_path, capsys):
    sizes = {"vocab_size": 260, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 1}
    base = save(GPT2LMHeadModel(GPT2Config(**sizes)), tmp_path / "base")
    assert train_here(base, texts, tmp_path / "out", "--max_steps", "1").code == 0
    code, said = answered(capsys, "generate", tmp_path / "out", "four")
    assert code == 2 and "4 tokens exceed the model's 64 positions" in said and "Fix: --max_new_tokens 60" in said
    assert answered(capsys, "generate", tmp_path / "out", "four", "--max_new_tokens", "60")[0] == 0
    code, said = answered(capsys, "generate", tmp_path / "out", "")
    assert code == 2 and "PROMPT: is empty" in said


def test_recipes_generate_refuses_a_classifier_which_recipes_evaluate_accepts(tiny_model, tmp_path, capsys):
    data = jsonl(tmp_path, [{"text": f"Example {n}", "label": "bg"[n % 2]} for n in range(32)])
    flags = ["--task", "sequence_classification"]
    assert train_here(tiny_model, data, tmp_path / "out", *SHORT, *flags).code == 0
    code, said = answered(capsys, "generate", tmp_path / "out", "a question")
    assert code == 2 and "holds a classifier" in said
    code, said = answered(capsys, "evaluate", tmp_path / "out", "--dataset_name", data)
    assert code == 0 and "eval_accuracy" in said
    jsonl(tmp_path, [{"text": "an example", "label": "a"}, {"text": "another", "label": "g"}])
    assert "the model knows only b, g" in answered(capsys, "evaluate", tmp_path / "out", "--dataset_name", data)[1]
    (tmp_path / "out" / "config.json").unlink()
    assert "its run has not finished. Fix: " in answered(capsys, "evaluate", tmp_path / "out")[1]
