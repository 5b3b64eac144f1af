"""The card of an adapter says what it is; a whole model gets none."""

from tests.support.running import train_here

LORA = "--use_peft --max_steps 2 --dataset_train_split train[:80%] --dataset_test_split train[80%:]".split()


def test_an_adapter_has_a_card_with_base_data_recipe_and_results(tiny_model, texts, tmp_path):
    done = train_here(tiny_model, texts, tmp_path / "chats", *LORA, "--eval_strategy", "epoch")
    card = (tmp_path / "chats" / "README.md").read_text()
    assert f"base_model: {tiny_model}\n" in card and f"the {texts} dataset" in card and "recipe `standard`" in card
    assert f"- Loss: {done.record['eval_loss']:.4f}" in card and "[More Information Needed]" not in card
    assert "recipes generate" in done.output and "recipes merge" in done.output


def test_a_whole_model_has_none(tiny_model, texts, tmp_path):
    train_here(tiny_model, texts, tmp_path / "out", "--max_steps", "2")
    assert not (tmp_path / "out" / "README.md").exists()
