"""The card of an adapter says what it is; a whole model gets none."""

from huggingface_hub import ModelCard

from tests.support.running import train_here

LORA = "--use_peft --max_steps 2 --dataset_train_split train[:80%] --dataset_test_split train[80%:]".split()


def test_an_adapter_has_a_card_with_base_data_recipe_and_results(tiny_model, texts, tmp_path):
    done = train_here(tiny_model, texts, tmp_path / "chats", *LORA, "--eval_strategy", "epoch")
    card = ModelCard.load(tmp_path / "chats" / "README.md")
    assert card.data.base_model == str(tiny_model) and card.data.model_name == "chats"
    assert card.data.eval_results[0].metric_value == done.record["eval_loss"]
    assert "`standard`" in card.text and str(texts) in card.text and "| steps | 2 |" in card.text
    assert "More Information Needed" not in card.text
    assert "recipes generate" in done.output and "recipes merge" in done.output


def test_a_whole_model_has_none(tiny_model, texts, tmp_path):
    train_here(tiny_model, texts, tmp_path / "out", "--max_steps", "2")
    assert not (tmp_path / "out" / "README.md").exists()
