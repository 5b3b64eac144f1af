"""Plans: the largest micro-batch that fits, the recommended recipe, what to try if nothing fits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, LlamaConfig

from launch.cli import main
from recipes import plan_memory
from recipes.errors import UserError
from recipes.planner.estimate import read_config
from recipes.planner.fits import Usable, largest_that_fits
from recipes.planner.plan import plan_run
from tests.recipes.planner.small import LARGE, SMALL, SMALL_CARD, TINY, planned, run_of


@settings(max_examples=50, deadline=None)
@given(micro=st.integers(1, 64), accumulation=st.integers(1, 64), world=st.integers(1, 16), usable=st.integers(1, 40))
def test_the_global_batch_never_changes(micro, accumulation, world, usable):
    run = run_of(
        "standard", "--global_batch_size", str(micro * accumulation * world), "--max_length", "64", world=world
    )
    entry = largest_that_fits(run, TINY, Usable(usable << 28))
    assert entry.micro_batch * entry.accumulation * world == run.batch.total


@pytest.mark.parametrize("memory", [3, 80])
def test_what_is_recommended_fits_and_is_legal(memory, capsys):
    plan = planned(gpu_memory=memory, config=LlamaConfig(hidden_size=512, num_hidden_layers=2, intermediate_size=1024))
    best = next(entry for entry in plan.recipes if entry.name == plan.recommended)
    assert best.fits and best.margin_bytes > 0
    assert main(["check", "--recipe", best.name, "--per_device_train_batch_size", str(best.micro_batch)]) == 0


def test_eight_billion_in_sixteen_bits_on_48_gb_need_offload():
    """DDP with 8-bit Adam does not fit, nor safely with checkpointing; offload does."""
    config, card = read_config("8.36B"), round(47.4 * 2**30)
    adam = ("--dtype", "bfloat16", "--optim", "adamw_bnb_8bit", "--max_length", "2048")
    tries = {
        "adam": run_of("standard", *adam, world=2),
        "checkpointed": run_of("standard", *adam, "--gradient_checkpointing", "true", world=2),
        "offload": run_of("memory", "--max_length", "2048", world=2),
    }
    assert {name: plan_run(run, config, card).fits for name, run in tries.items()} == {
        "adam": False,
        "checkpointed": False,
        "offload": True,
    }


def test_a_classifier_is_planned():
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
    assert planned("--task", "sequence_classification", config=config).recommended == "fast"


@pytest.mark.parametrize(
    "sizes",
    [{"gpu_memory": -5}, {"gpu_memory": 8, "num_processes": 0}, {"gpu_memory": 8, "mfu": float("nan")}, {}],
    ids=str,
)
def test_sizes_that_are_not_positive_are_refused_in_python_too(sizes):
    with pytest.raises(UserError):
        plan_memory(SMALL["llama"], **sizes)


# --- If nothing fits ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def too_large():
    return planned("--max_length", "256", config=LARGE, gpu_memory=SMALL_CARD)


def test_if_nothing_fits_there_are_steps_in_the_order_to_try_them(too_large):
    assert too_large.recommended is None
    order = [
        "gradient_checkpointing",
        "adamw_bnb_8bit",
        "memory",
        "use_peft",
        "load_in_4bit",
        " on ",
    ]
    places = [next(i for i, step in enumerate(too_large.next_steps) if word in step.words) for word in order]
    assert places == sorted(places)


def test_each_step_says_what_it_saves_and_costs(too_large):
    before = next(entry for entry in too_large.recipes if entry.name == "standard")
    for step in too_large.next_steps:
        assert step.saves_bytes == before.total_bytes - step.total_bytes and step.slowdown


def test_a_step_that_fits_is_a_legal_run_that_fits(too_large, capsys):
    step = next(step for step in too_large.next_steps if step.fits and "peft" in step.words)
    recipe, *flags = step.words.removeprefix("--recipe ").split()
    again = planned("--max_length", "256", *flags, config=LARGE, recipe=recipe, gpu_memory=SMALL_CARD)
    assert again.recommended == recipe
    assert main(["check", *step.words.split(), "--per_device_train_batch_size", "1", "--model_name_or_path", "m"]) == 0


def test_a_recipe_that_needs_more_ram_than_a_node_has_does_not_fit():
    run = run_of("memory", "--max_length", "64")
    enough, too_little = (largest_that_fits(run, TINY, Usable(8 << 30, host)) for host in (1 << 30, 1 << 10))
    assert enough.fits and too_little.fits_gpu and not too_little.fits


def test_a_recipe_that_is_not_legal_says_why_and_its_step_leaves_the_flag_out():
    plan = planned("--optim", "adamw_bnb_8bit", "--max_length", "256", config=LARGE, gpu_memory=SMALL_CARD)
    assert {entry.name for entry in plan.recipes} == {"fast", "standard"}
    assert "replaced by DeepSpeedCPUAdam" in plan.refused["memory"]
    assert any(step.words == "--recipe memory, without --optim" for step in plan.next_steps)
