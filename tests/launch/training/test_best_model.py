"""The best model: every evaluated one is saved, the summary says which was loaded, and run.json
holds the metrics of exactly the saved weights.
"""

import pytest

from tests.support.running import eval_losses, train_here

SPLIT = "--dataset_train_split train[:90%] --dataset_test_split train[90%:]"
EVERY_SECOND = f"--eval_strategy steps --eval_steps 2 {SPLIT} --learning_rate 1e-3".split()
# The loss falls, so that with greater_is_better the first evaluation stays the best.
FIRST_IS_BEST = "--load_best_model_at_end --metric_for_best_model loss --greater_is_better true".split()


def weights(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_load_best_model_at_end_saves_the_best_weights_and_metrics_and_prints_their_step(tiny_model, texts, tmp_path):
    flags = [*EVERY_SECOND, *FIRST_IS_BEST, "--max_steps", "5", "--save_total_limit", "9"]
    outcome = train_here(tiny_model, texts, tmp_path, *flags)
    assert (outcome.record["model_step"], outcome.record["global_step"]) == (2, 5)
    assert "of step 2, the best by eval_loss" in outcome.output
    assert weights(tmp_path) == weights(tmp_path / "checkpoint-2") != weights(tmp_path / "checkpoint-5")
    steps, found = zip(*eval_losses(outcome), strict=True)
    assert steps == (2, 4, 5) and outcome.record["eval_loss"] == found[0] > found[2]  # none twice


def test_a_last_step_that_was_not_evaluated_is_evaluated_at_the_end(tiny_model, texts, tmp_path):
    outcome = train_here(tiny_model, texts, tmp_path, *EVERY_SECOND, *"--max_steps 2 --eval_delay 3".split())
    assert eval_losses(outcome) == [(2, outcome.record["eval_loss"])]


def test_a_resumed_run_keeps_the_best_checkpoint_even_if_output_dir_has_moved(tiny_model, texts, tmp_path):
    """With one checkpoint to keep, the best and the newest stay."""
    flags, folder = [*EVERY_SECOND, *FIRST_IS_BEST], tmp_path / "one"
    first = train_here(tiny_model, texts, folder, *flags, *"--max_steps 4 --save_total_limit 2".split())
    resumed = train_here(tiny_model, texts, folder, *flags, *"--max_steps 5 --save_total_limit 1".split())
    assert "resuming from" in resumed.output and "step 4" in resumed.output
    assert resumed.record["model_step"] == 2
    assert resumed.record["eval_loss"] == pytest.approx(dict(eval_losses(first))[2])
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-5"}
    assert weights(folder) == weights(folder / "checkpoint-2")
    (folder / "run.json").unlink()  # it was stopped after its last step
    again = train_here(tiny_model, texts, folder.rename(tmp_path / "two"), *flags, "--max_steps", "5")
    assert again.record["model_step"] == 2


def test_a_best_step_without_a_checkpoint_is_warned_of_and_the_last_model_is_saved(tiny_model, texts, tmp_path):
    flags = f"--eval_strategy steps --eval_steps 1 --save_steps 2 --max_steps 2 {SPLIT} --learning_rate 1e-3".split()
    outcome = train_here(tiny_model, texts, tmp_path, *flags, *FIRST_IS_BEST)
    assert "is 2: fewer models are saved than evaluated" in outcome.output
    assert "of step 2: the checkpoint of the best step (1) was not loaded" in outcome.output
    assert outcome.record["eval_loss"] == dict(eval_losses(outcome))[2]
    assert weights(tmp_path) == weights(tmp_path / "checkpoint-2")
