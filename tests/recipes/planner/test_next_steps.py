"""What to try if nothing fits: what is cheapest comes first, and each step is what it says."""

import re
import shlex

import pytest
from transformers import GPTNeoXConfig, LlamaConfig

from recipes.planner.fits import Estimator
from recipes.run import known_gpus
from recipes.run.files import shipped
from tests.recipes.planner.small import LARGE, SHAPE, SMALL_CARD, as_printed, planned, run_of

YAML = str(shipped("standard.yaml"))


def steps(*argv, config=LARGE, gpu_memory=SMALL_CARD, **named):
    plan = planned("--max_length", "128", *argv, config=config, gpu_memory=gpu_memory, **named)
    assert plan.recommended is None
    return plan.next_steps


def test_a_micro_batch_that_is_too_large_is_made_smaller_before_anything_else_changes():
    (step,) = steps("--per_device_train_batch_size", "64", "--global_batch_size", "64", gpu_memory=4)
    run, entry = as_printed(step.words, 4)
    assert entry.fits and entry.total_bytes == step.total_bytes
    assert run.batch.total == 64 and "--optim" not in step.words and "checkpointing" not in step.words
    _, larger = as_printed(step.words.replace(f"size {run.batch.micro}", f"size {2 * run.batch.micro}"), 4)
    assert not larger.fits


def test_a_smaller_micro_batch_is_offered_where_the_one_asked_for_fits_only_with_checkpointing():
    config = type(LARGE)(**SHAPE | {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8})
    batch = ["--per_device_train_batch_size", "64", "--global_batch_size", "64", "--max_length", "1024"]
    plan = planned(*batch, config=config, gpu="RTX 4090", gpu_memory=None, recipe="standard")
    (entry,), (step,) = plan.recipes, plan.next_steps
    assert "with --gradient_checkpointing true; without it, micro-batch 64 does not fit" in entry.notes
    assert step.fits and "checkpointing" not in step.words and step.seconds < plan.times["standard"].total


def test_several_gpus_share_before_anything_else_changes_at_the_largest_micro_batch_that_fits():
    first = steps("--global_batch_size", "512", num_processes=8, recipe="standard")[0]
    assert first.fits and " --recipe sharded " in first.words and "checkpointing" not in first.words
    run, entry = as_printed(first.words, world=8)
    assert entry.fits and entry.total_bytes == first.total_bytes and 64 > run.batch.micro > 1
    _, larger = as_printed(first.words.replace(f"size {run.batch.micro}", f"size {2 * run.batch.micro}"), world=8)
    assert not larger.fits


def test_liger_is_a_step_where_only_the_logits_are_too_much():
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(**shape, vocab_size=64_000)
    plan = planned("--max_length", "2048", config=llama, gpu_memory=1.5, recipe="standard")
    words = {re.sub("--per_device_train_batch_size [0-9]+", "", step.words): step for step in plan.next_steps}
    with_liger = {more: step for more, step in words.items() if "--use_liger_kernel true" in more}
    assert with_liger and all(step.fits and "pip install liger-kernel" in step.slowdown for step in with_liger.values())
    for more in with_liger:
        assert not words[more.removesuffix(" --use_liger_kernel true")].fits
    other = Estimator(GPTNeoXConfig(**shape))
    assert not other.has_liger(run_of("standard", "--use_liger_kernel", "true"))


@pytest.mark.parametrize(("memory", "adapters"), [(2.3, [False, True]), (2.0, [True])])
def test_where_only_offload_fits_other_settings_do_without_and_adapters(memory, adapters):
    plan = planned("--max_length", "128", config=LARGE, gpu_memory=memory)
    assert plan.recommended == "memory" and [step.adapters for step in plan.next_steps] == adapters
    for step in plan.next_steps:
        run, entry = as_printed(step.words, memory)
        assert entry.fits and run.engine.offload_optimizer == "none" and bool(run["use_peft"]) == step.adapters


def test_a_step_to_another_recipe_leaves_the_accelerate_yaml_out():
    found = steps(num_processes=2, accelerate_config=YAML, gpu_memory=2)
    assert {"sharded", "memory", "standard"} <= {word for step in found for word in shlex.split(step.words)}
    for step in found:
        keeps_it = f"--accelerate_config {YAML}" in step.words
        assert keeps_it == (" standard " in step.words) and keeps_it != ("without --accelerate_config" in step.slowdown)
        _, entry = as_printed(step.words.partition(" # on ")[0], 2, world=2)
        assert entry.total_bytes == step.total_bytes


@pytest.mark.parametrize("flags", [[], ["--use_peft", "--load_in_4bit"]])
def test_no_step_is_the_request_or_another_step_and_each_saves(flags):
    argv = ["--max_length", "128", "--gradient_checkpointing", "true", *flags]
    plan = planned(*argv, config=LARGE, gpu_memory=0.5, num_processes=2, recipe="sharded")
    asked, _ = as_printed(
        "recipes train --num_processes 2 --recipe sharded --model_name_or_path m " + shlex.join(argv), 0.5, world=2
    )
    micro = plan.recipes[0].micro_batch
    names = ("gradient_checkpointing", "use_peft", "load_in_4bit", "max_length", "optim", "dtype")
    found = [(asked["recipe"], micro, *(asked[name] for name in names))]
    for step in (step for step in plan.next_steps if not step.card):
        run, _ = as_printed(step.words, 0.5, world=2)
        found.append((run["recipe"], run.batch.micro, *(run[name] for name in names)))
        assert step.saves_bytes == plan.recipes[0].total_bytes - step.total_bytes > 0
    assert len(found) == len(set(found)) and (flags or len(found) > 1)


def test_where_only_ram_is_short_every_step_needs_less_of_it():
    plan = planned("--max_length", "128", config=LARGE, gpu_memory=3, recipe="memory_zero3", host_memory=0.5)
    assert plan.recipes[0].fits_gpu and plan.next_steps
    assert plan.short_of_ram
    for step in plan.next_steps:
        assert not step.card and step.host_bytes_per_node < plan.recipes[0].host_bytes_per_node
        assert step.saves_host_bytes == plan.recipes[0].host_bytes_per_node - step.host_bytes_per_node


@pytest.mark.parametrize(("gpu", "better"), [("L4", "A100 40GB"), ("RTX 4090", "RTX 5090"), ("B200", None)])
def test_the_next_card_is_one_of_the_same_kind_with_more_memory(gpu, better):
    width = 2048 if better else 8192
    wide = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 20}
    plan = planned("--max_length", "64", config=type(LARGE)(**wide), gpu=gpu, gpu_memory=None, recipe="standard")
    found = [step for step in plan.next_steps if step.card]
    assert [step.card for step in found] == ([better] if better else [])
    for step in found:
        card = known_gpus.find(step.card)
        assert card.torch_bytes > plan.usable_bytes and step.fits and step.total_bytes < card.torch_bytes
