"""Plans: the largest micro-batch that fits, the recommended recipe, what to try if nothing fits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from launch.cli import main
from recipes import plan_memory
from recipes.planner.fits import Planner
from recipes.planner.models import read_config
from recipes.planner.plan import plan_run
from recipes.run import known_gpus
from tests.recipes.planner.small import LARGE, SMALL, SMALL_CARD, TINY, as_printed, planned, run_of


@settings(max_examples=50, deadline=None)
@given(micro=st.integers(1, 64), accumulation=st.integers(1, 64), world=st.integers(1, 16), usable=st.integers(1, 40))
def test_the_global_batch_never_changes(micro, accumulation, world, usable):
    run = run_of(
        "standard", "--global_batch_size", str(micro * accumulation * world), "--max_length", "64", world=world
    )
    _, entry = Planner(TINY, usable << 28).best(run)
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


def test_every_step_is_a_whole_command_that_needs_what_it_says(too_large):
    for step in too_large.next_steps:
        command = step.words.partition(" # on ")[0]
        assert "--model_name_or_path YOUR_MODEL" in command
        run, entry = as_printed(command)
        assert (entry.total_bytes, run.batch.total) == (step.total_bytes, 16)
        assert entry.fits == (step.fits and " on " not in step.words)


@pytest.mark.parametrize("memory", [3.25, 8])
@pytest.mark.parametrize(
    ("batch", "total"),
    [([], 16), (["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "8"], 8)],
    ids=["default batch", "own batch"],
)
def test_what_is_recommended_is_a_whole_command_that_fits(memory, batch, total):
    plan = planned("--max_length", "128", *batch, config=LARGE, gpu_memory=memory)
    best = next(entry for entry in plan.recipes if entry.name == plan.recommended)
    run, entry = as_printed(plan.command, memory)
    assert entry.fits and (entry.total_bytes, run.batch.total) == (best.total_bytes, total)
    for step in plan.next_steps:
        run, entry = as_printed(step.words, memory)
        assert entry.fits and (entry.total_bytes, run.batch.total) == (step.total_bytes, total)


def test_a_command_leaves_the_model_to_the_user_only_if_nothing_names_it(tmp_path):
    SMALL["llama"].save_pretrained(tmp_path)
    file = tmp_path / "settings.yaml"
    file.write_text("model_name_or_path: mine")
    for model, argv, named in (
        (tmp_path, [], f"--model_name_or_path {tmp_path}"),
        (tmp_path / "config.json", [], "--model_name_or_path YOUR_MODEL"),
        ("50M", [], "--model_name_or_path YOUR_MODEL"),
        ("50M", ["--config", str(file)], f"--config {file}"),
    ):
        plan = plan_memory(model, gpu="L4", recipe="standard", argv=argv)
        assert plan.command.startswith(f"recipes train --num_processes 1 --recipe standard {named} --")
        assert plan.command.count("--model_name_or_path") == named.count("--model_name_or_path")


def test_a_recipe_that_needs_more_ram_than_a_node_has_does_not_fit():
    run = run_of("memory", "--max_length", "64")
    enough, too_little = (Planner(TINY, 8 << 30, host).best(run)[1] for host in (1 << 30, 1 << 10))
    assert enough.fits and too_little.fits_gpu and not too_little.fits


def test_a_recipe_that_is_not_legal_says_why_and_its_step_leaves_the_flag_out():
    plan = planned("--optim", "adamw_bnb_8bit", "--max_length", "256", config=LARGE, gpu_memory=SMALL_CARD)
    assert {entry.name for entry in plan.recipes} == {"fast", "standard"}
    assert "DeepSpeedCPUAdam replaces it" in plan.refused["memory"]
    step = next(step for step in plan.next_steps if " --recipe memory " in step.words)
    assert "--optim" not in step.words and step.slowdown.startswith("without --optim; ")


# --- The fastest that fits ------------------------------------------------------------------------


def test_eight_billion_on_eight_cards_of_80_gb_are_sharded_and_not_offloaded():
    plan = plan_memory("8B", gpu="H100 80GB", num_processes=8, argv=["--max_length", "2048"])
    assert plan.recommended == "sharded"
    assert plan.times["memory"].host > 0 and plan.times["sharded"].host == 0
    assert plan.times["memory"].known > plan.times["sharded"].known


@pytest.mark.parametrize("host_memory", [None, pytest.param(64, marks=pytest.mark.slow)])
def test_eight_billion_on_one_card_of_24_gb_get_a_step_with_adapters(host_memory):
    plan = plan_memory("8B", gpu="L4", host_memory=host_memory, argv=["--max_length", "2048"])
    assert plan.recommended in (None, "memory_zero3")
    step = next(step for step in plan.next_steps if step.fits and "--use_peft true" in step.words)
    assert step.seconds and (host_memory or step.seconds < plan.times["memory_zero3"].total)
    _, entry = as_printed(step.words, known_gpus.find("L4").torch_bytes / 1e9, read_config("8B"))
    assert entry.fits and entry.total_bytes == step.total_bytes


def test_checkpointing_is_preferred_to_offload_and_said(capsys):
    words = ["--model", "8B", "--gpu", "A100 40GB", "--num_processes", "8", "--max_length", "4096"]
    assert main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    assert "sharded: with --gradient_checkpointing true" in printed
    assert "take sharded" in printed and printed.strip().endswith(
        "--gradient_checkpointing true --per_device_train_batch_size 2"
    )


def test_one_gpu_is_never_recommended_to_share_with_nobody():
    assert "sharded" not in {entry.name for entry in planned(num_processes=1).recipes}
    assert planned(num_processes=1, recipe="sharded").recommended == "sharded"
