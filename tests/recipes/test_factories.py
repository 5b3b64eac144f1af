"""`from recipes import fast`: real TrainingArguments, or any subclass, for a script of your own."""

from dataclasses import dataclass

import pytest
from transformers import Seq2SeqTrainingArguments, TrainingArguments

import recipes
from recipes.catalog import RECIPES
from recipes.errors import UserError


@dataclass
class WithPacking(TrainingArguments):
    """Like TRL's SFTConfig: fields of its own, some under names that we use too."""

    packing: bool = False
    max_length: int | None = 1024
    loss_type: str = "nll"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_with_the_installed_transformers(name, tmp_path):
    args = getattr(recipes, name)(str(tmp_path), num_processes=2)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 2 == 16


def test_keywords_override_the_recipe(tmp_path):
    assert recipes.fast(str(tmp_path), logging_steps=3).logging_steps == 3


def test_any_subclass_can_be_asked_for(tmp_path):
    args = recipes.standard(str(tmp_path), args_class=Seq2SeqTrainingArguments, predict_with_generate=True)
    assert isinstance(args, Seq2SeqTrainingArguments) and args.predict_with_generate


def test_what_the_subclass_shares_with_us_is_passed_on(tmp_path):
    args = recipes.fast(str(tmp_path), args_class=WithPacking, max_length=512, loss_type="dft")
    assert (args.packing, args.max_length, args.loss_type) == (True, 512, "dft")


def test_what_the_recipe_does_not_choose_keeps_the_subclasss_default(tmp_path):
    assert recipes.standard(str(tmp_path), args_class=WithPacking).max_length == 1024


def test_no_demonstration_hides_in_a_library_call(tmp_path):
    assert recipes.fast(str(tmp_path)).max_steps == -1


def test_the_world_is_the_launched_one(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)  # or it would wait for three others
    monkeypatch.setattr(TrainingArguments, "n_gpu", 1)
    args = recipes.fast(str(tmp_path))
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 1)


def test_a_misspelt_keyword_gets_the_nearest_name(tmp_path):
    with pytest.raises(UserError, match="learning_rate"):
        recipes.fast(str(tmp_path), lerning_rate=1e-4)


def test_what_cannot_work_together_is_refused(tmp_path):
    with pytest.raises(UserError, match="offload"):
        recipes.memory(str(tmp_path), optim="adamw_bnb_8bit")


def test_a_lone_process_never_spreads_over_several_gpus(tmp_path):
    assert recipes.standard(str(tmp_path)).n_gpu <= 1


@pytest.mark.parametrize("setting", [{"use_peft": True}, {"packing": False}, {"recipe": "fast"}, {"config": "a.yaml"}])
def test_what_training_arguments_cannot_hold_is_refused(setting, tmp_path):
    with pytest.raises(UserError, match="has no such field"):
        recipes.standard(str(tmp_path), **setting)


def test_another_class_than_training_arguments_is_refused(tmp_path):
    with pytest.raises(UserError, match="a subclass of TrainingArguments"):
        recipes.standard(str(tmp_path), args_class=dict)
