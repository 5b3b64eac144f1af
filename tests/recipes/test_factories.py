"""`from recipes import fast`: real TrainingArguments, or any subclass, for a script of your own."""

import warnings
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


@dataclass
class LikeTrl(WithPacking):
    padding_free: bool = False


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


# --- What only the script knows -------------------------------------------------------------------

OWN_METRIC = dict(metric_for_best_model="f1", eval_strategy="steps", eval_steps=5)


@pytest.mark.parametrize(
    "settings",
    [
        dict(OWN_METRIC, load_best_model_at_end=True),
        dict(OWN_METRIC, save_strategy="best"),
        dict(eval_on_start=True),
        dict(label_names=["rewards"]),
        dict(do_train=False),
        dict(batch_eval_metrics=True, eval_strategy="epoch"),
    ],
    ids=str,
)
def test_what_the_script_computes_and_evaluates_is_not_judged(settings, tmp_path):
    args = recipes.standard(str(tmp_path), **settings)
    assert {name: getattr(args, name) for name in settings if not name.endswith("strategy")} == {
        name: value for name, value in settings.items() if not name.endswith("strategy")
    }


def test_fields_of_the_subclass_mean_what_the_subclass_says(tmp_path):
    """TRL packs without padding, and cuts nothing off where `max_length` is None."""
    args = recipes.standard(str(tmp_path), args_class=LikeTrl, packing=True, padding_free=True, max_length=None)
    assert (args.packing, args.padding_free, args.max_length) == (True, True, None)


def test_saving_follows_evaluation_in_a_script_too(tmp_path):
    args = recipes.standard(str(tmp_path), **OWN_METRIC, load_best_model_at_end=True)
    assert (args.save_strategy, args.save_steps) == ("steps", 5)


def test_what_trainer_itself_refuses_is_refused(tmp_path):
    with pytest.raises(UserError, match="needs evaluations"):
        recipes.standard(str(tmp_path), load_best_model_at_end=True)


# --- The engine -----------------------------------------------------------------------------------

ZERO_2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1"}
OWN_JSON = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}


def started_with(monkeypatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)  # or it would set up the engine
    monkeypatch.setattr(TrainingArguments, "n_gpu", 1)


@pytest.mark.parametrize(
    ("recipe", "variables", "engine"),
    [
        ("memory", {}, "one process"),
        ("memory_zero3", {}, "one process"),
        ("sharded", {}, "one process"),
        ("sharded", TORCHRUN, "DDP"),
        ("memory", TORCHRUN, "DDP"),
        ("memory_zero3", ZERO_2, "DeepSpeed ZeRO-2"),
    ],
)
def test_a_recipe_without_its_engine_says_how_to_start_it(recipe, variables, engine, tmp_path, monkeypatch):
    started_with(monkeypatch, variables)
    with pytest.warns(UserWarning, match=f"trains on {engine} instead.*accelerate launch .*{recipe}.yaml"):
        getattr(recipes, recipe)(str(tmp_path))


@pytest.mark.parametrize(
    ("recipe", "variables", "settings"),
    [
        ("sharded", {"ACCELERATE_USE_FSDP": "true"}, {}),
        ("memory", ZERO_2, {}),
        ("memory", TORCHRUN, {"deepspeed": OWN_JSON}),
        ("memory", TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"}, {}),  # rank 0 says it
        ("standard", {}, {}),
        ("fast", TORCHRUN, {}),
    ],
)
def test_no_warning_where_the_engine_is_there(recipe, variables, settings, tmp_path, monkeypatch):
    started_with(monkeypatch, variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        getattr(recipes, recipe)(str(tmp_path), **settings)


def test_a_json_of_ones_own_needs_a_launcher_too(tmp_path, monkeypatch):
    started_with(monkeypatch, {})
    with pytest.warns(UserWarning, match="deepspeed needs a launcher.*accelerate launch .*standard.yaml"):
        recipes.standard(str(tmp_path), deepspeed=OWN_JSON)


def test_fsdp_is_refused_in_a_script_that_no_launcher_started(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="needs a distributed launch"):
        recipes.standard(str(tmp_path), fsdp="full_shard")
    started_with(monkeypatch, TORCHRUN)
    recipes.standard(str(tmp_path), fsdp="full_shard")
