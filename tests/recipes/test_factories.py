"""`from recipes import fast`: real TrainingArguments, or any subclass, for a script of your own."""

import warnings
from dataclasses import dataclass

import pytest
from transformers import TrainingArguments

import recipes
from recipes.catalog import RECIPES
from recipes.errors import UserError


@dataclass
class LikeTrl(TrainingArguments):
    """Fields of its own, some under names that we use too, as in TRL's SFTConfig."""

    packing: bool = False
    padding_free: bool = False
    max_length: int | None = 777
    loss_type: str = "nll"

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type == "none":
            raise ValueError("there is no such loss")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_function_returns_training_arguments_with_a_global_batch_of_16(name, tmp_path):
    args = getattr(recipes, name)(str(tmp_path), num_processes=2)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 2 == 16


def test_args_class_gets_the_recipes_values_of_its_fields_and_keeps_its_own_defaults(tmp_path):
    args = recipes.fast(str(tmp_path), args_class=LikeTrl, loss_type="dft")
    assert isinstance(args, LikeTrl)
    assert (args.packing, args.max_length, args.loss_type) == (True, 777, "dft")


def test_a_recipe_function_passes_on_unchanged_all_values_for_a_subclass_of_training_arguments(tmp_path):
    """TRL packs without padding, and cuts nothing off where `max_length` is None."""
    args = recipes.standard(str(tmp_path), args_class=LikeTrl, packing=True, padding_free=True, max_length=None)
    assert (args.packing, args.padding_free, args.max_length) == (True, True, None)


def test_a_recipe_function_without_data_does_not_set_the_demonstrations_max_steps(tmp_path):
    assert recipes.fast(str(tmp_path)).max_steps == -1


def test_training_arguments_have_n_gpu_1_in_one_process_that_sees_two_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)  # as in a process that sees two GPUs
    assert recipes.standard(str(tmp_path))._n_gpu == 1


REFUSED = [
    (dict(lerning_rate=1e-4), "learning_rate"),
    (dict(use_peft=True), "has no such field"),
    (dict(load_best_model_at_end=True), r"find the best model .*Fix: --eval_strategy epoch\.$"),
    (dict(args_class=LikeTrl, loss_type="none"), "there is no such loss"),  # only the subclass knows
]


@pytest.mark.parametrize(("keywords", "said"), REFUSED)
def test_a_recipe_function_refuses_wrong_keyword_arguments(keywords, said, tmp_path):
    with pytest.raises(UserError, match=said):
        recipes.standard(str(tmp_path), **keywords)


OWN_METRIC = dict(metric_for_best_model="f1", eval_strategy="steps", eval_steps=5)
OWN = [
    dict(OWN_METRIC, load_best_model_at_end=True),
    dict(OWN_METRIC, save_strategy="best"),
    dict(eval_on_start=True),
    dict(label_names=["rewards"]),
    dict(do_train=False),
    dict(batch_eval_metrics=True, eval_strategy="epoch"),
]


@pytest.mark.parametrize("settings", OWN, ids=str)
def test_a_recipe_function_accepts_settings_for_the_metrics_and_evaluation_of_a_users_script(settings, tmp_path):
    args = recipes.standard(str(tmp_path), **settings)
    assert all(getattr(args, name) == value for name, value in settings.items())


# --- The engine -----------------------------------------------------------------------------------

ZERO_2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1"}
OWN_JSON = {"deepspeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}}


def started_with(monkeypatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)  # or it would set up the engine
    monkeypatch.setattr(TrainingArguments, "n_gpu", 1)


def test_the_global_batch_is_split_over_the_launched_processes(tmp_path, monkeypatch):
    started_with(monkeypatch, {"WORLD_SIZE": "4"})
    args = recipes.fast(str(tmp_path))
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 1)


@pytest.mark.parametrize(
    ("recipe", "variables", "instead"),
    [("memory", {}, "one process"), ("sharded", TORCHRUN, "DDP"), ("memory_zero3", ZERO_2, "DeepSpeed ZeRO-2")],
)
def test_a_script_started_without_the_recipes_engine_is_told_the_accelerate_launch_command(
    recipe, variables, instead, tmp_path, monkeypatch
):
    started_with(monkeypatch, variables)
    monkeypatch.setattr("sys.argv", ["my.py", "--data", "two words"])
    command = f"accelerate launch .*{recipe}.yaml --num_processes 1 my.py --data 'two words'"
    with pytest.warns(UserWarning, match=f"trains with {instead} instead. Fix: {command}"):
        getattr(recipes, recipe)(str(tmp_path))


@pytest.mark.parametrize(
    ("recipe", "variables", "settings"),
    [
        ("memory", ZERO_2, {}),
        ("sharded", {"ACCELERATE_USE_FSDP": "true"}, {}),
        ("memory", TORCHRUN, OWN_JSON),
        ("memory", TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2"}, {}),  # rank 0 says it
        ("standard", {}, {}),
    ],
)
def test_no_warning_on_rank_1_or_if_the_engine_is_the_recipes_own(recipe, variables, settings, tmp_path, monkeypatch):
    started_with(monkeypatch, variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        getattr(recipes, recipe)(str(tmp_path), **settings)
