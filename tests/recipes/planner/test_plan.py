"""Plans: the largest micro-batch that fits, the recommended recipe, what to try if nothing fits."""

import shlex
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from launch.cli import main
from recipes import plan_memory
from recipes.catalog import RECIPES
from recipes.errors import UserError
from recipes.planner.fits import Estimator, Planner, estimator_of
from recipes.planner.memory import EVALUATION, NOTHING, TRAINING
from recipes.rules.check import check
from recipes.run import here, resolve
from recipes.run.files import shipped
from recipes.run.hardware import Gpu
from tests.recipes.planner.small import LARGE, SMALL, planned, run_of
from tests.support.runs import A100, machine

SMALL_CARD = 1.55  # GB, of which CUDA itself takes 0.45: LARGE fits with no recipe


@pytest.mark.parametrize("card", [{}, {"gpu": "L4", "gpu_memory": 24.0}], ids=["neither", "both"])
def test_a_plan_needs_either_a_gpu_or_the_memory_of_one(card):
    with pytest.raises(UserError, match="give either gpu"):
        plan_memory("7B", **card)


# --- What is recommended --------------------------------------------------------------------------


def as_printed(command, card=SMALL_CARD, world=1):
    """The run of a printed command, which is legal, and its plan at its own micro-batch."""
    words = shlex.split(command.removeprefix("pip install liger-kernel && "))
    assert words[:2] == ["recipes", "train"] and words[words.index("--num_processes") + 1] == str(world)
    own = RECIPES[words[words.index("--recipe") + 1]]().engine
    engine = words[3] if words[2] == "--accelerate_config" else own
    liger = "--use_liger_kernel true" in command  # which a step may ask to install
    hardware = machine(Gpu("a GPU", (8, 0), round(card * 1e9)), world, liger)
    place = here(world, engine, hardware=hardware, environment={}, trained_by="nobody", packages=frozenset())
    run = resolve(words[words.index("--recipe") :], place)
    assert not [problem for problem in check(run) if problem.severity == "error"], command
    return run, Planner(estimator_of(LARGE), round(card * 1e9)).at(run, run.batch.micro)


@pytest.mark.parametrize("memory", [3.25, 8])
@pytest.mark.parametrize(
    ("batch", "total"),
    [([], 16), (["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "8"], 8)],
    ids=["default batch", "own batch"],
)
def test_the_recommended_command_and_each_next_step_fit_and_keep_the_global_batch(memory, batch, total):
    plan = planned("--max_length", "128", *batch, config=LARGE, gpu_memory=memory)
    best = next(entry for entry in plan.recipes if entry.name == plan.recommended)
    assert best.fits
    for words, found in ((plan.command, best), *((step.words, step.planned) for step in plan.next_steps)):
        run, entry = as_printed(words, memory)
        assert entry.fits and (entry.total_bytes, run.batch.total) == (found.total_bytes, total)


def test_the_command_printed_by_plan_has_a_placeholder_if_no_folder_or_config_flag_names_a_model(tmp_path):
    SMALL["llama"].save_pretrained(tmp_path)
    file = tmp_path / "settings.yaml"
    file.write_text("model_name_or_path: mine")
    for model, argv, named in (
        (tmp_path, [], f"--model_name_or_path {tmp_path}"),
        (tmp_path / "config.json", [], "--model_name_or_path YOUR_MODEL"),
        ("50M", ["--config", str(file)], f"--config {file}"),
    ):
        plan = plan_memory(model, gpu="L4", recipe="standard", argv=argv)
        assert plan.command.startswith(f"recipes train --num_processes 1 --recipe standard {named} --")
        assert plan.command.count("--model_name_or_path") == named.count("--model_name_or_path")


def test_plan_recommends_and_prints_gradient_checkpointing_rather_than_offload(capsys):
    words = ["--model", "8B", "--gpu", "A100 40GB", "--num_processes", "8", "--max_length", "4096"]
    assert main(["plan", *words]) == 0
    printed = capsys.readouterr().out
    assert "sharded: needs --gradient_checkpointing true" in printed
    assert "take sharded" in printed
    flags = "--gradient_checkpointing true --per_device_train_batch_size 2 --dataset_name YOUR_DATA"
    assert f"{flags}\n" in printed


def test_sharded_is_recommended_for_one_gpu_only_if_it_is_the_requested_recipe():
    assert "sharded" not in {entry.name for entry in planned(num_processes=1).recipes}
    assert planned(num_processes=1, recipe="sharded").recommended == "sharded"


# --- Evaluations ----------------------------------------------------------------------------------

WIDE = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=100_000
)


def of_evaluation(batch):
    own = ["--eval_strategy", "steps", "--per_device_eval_batch_size", str(batch)] if batch else []
    argv = ["--max_length", "2048", "--per_device_train_batch_size", "1", *own]
    return planned(*argv, config=WIDE, recipe="standard", gpu_memory=20)


def test_plan_replaces_an_eval_batch_whose_peak_memory_does_not_fit_by_the_largest_that_fits():
    without, small, large = (of_evaluation(batch).recipes[0] for batch in (None, 1, 64))
    assert without.components == replace(small.components, cached=without.components.cached)
    assert (small.moment, large.moment) == (TRAINING, EVALUATION)
    assert large.components.logits > 5 * small.components.logits and large.components.gradients == 0
    size = large.flags["per_device_eval_batch_size"]
    assert large.fits and of_evaluation(2 * size).recipes[0].flags == large.flags
    assert f"needs --per_device_eval_batch_size {size}: otherwise no micro-batch fits" in large.notes
    assert f"--per_device_eval_batch_size {size} " in of_evaluation(64).command


def test_an_evaluation_is_planned_without_compilation_or_gradient_checkpointing(monkeypatch):
    """Trainer evaluates the model that accelerate has not compiled."""
    cases = []
    monkeypatch.setattr(Estimator, "_of_case", lambda self, run, case: cases.append(case) or NOTHING)
    for flags in ((), ("--gradient_checkpointing",)):
        Estimator(SMALL["llama"]).memory(run_of("fast", "--eval_strategy", "epoch", *flags, hardware=machine(A100)), 4)
    training, evaluation, recomputed, again = cases
    assert training.compiled and recomputed.checkpointing
    assert not any(case.compiled or case.checkpointing for case in (evaluation, again))


# --- If nothing fits ------------------------------------------------------------------------------

YAML = str(shipped("standard.yaml"))


def steps(*argv, config=LARGE, gpu_memory=SMALL_CARD, **named):
    plan = planned("--max_length", "128", *argv, config=config, gpu_memory=gpu_memory, **named)
    assert plan.recommended is None
    return plan.next_steps


def test_next_steps_of_a_plan_are_complete_commands_ordered_from_checkpointing_to_qlora():
    plan = planned("--max_length", "128", config=LARGE, gpu_memory=SMALL_CARD)
    found, standard = plan.next_steps, next(one.total_bytes for one in plan.recipes if one.name == "standard")
    order = ["gradient_checkpointing", "adamw_bnb_8bit", "memory", "use_peft", "load_in_4bit"]
    places = [next(i for i, step in enumerate(found) if word in step.words) for word in order]
    assert places == sorted(places)
    for step in found:
        assert "--model_name_or_path YOUR_MODEL" in step.words
        run, entry = as_printed(step.words)
        assert (entry.total_bytes, run.batch.total) == (step.planned.total_bytes, 16)
        assert entry.fits == step.planned.fits
        assert step.saves_bytes == standard - entry.total_bytes


def test_a_plan_explains_a_refused_recipe_and_its_next_step_drops_the_refused_flag():
    plan = planned("--optim", "adamw_bnb_8bit", "--max_length", "128", config=LARGE, gpu_memory=SMALL_CARD)
    assert {entry.name for entry in plan.recipes} == {"fast", "standard"}
    assert "replaced by DeepSpeedCPUAdam" in plan.refused["memory"]
    step = next(step for step in plan.next_steps if " --recipe memory " in step.words)
    assert "--optim" not in step.words and step.slowdown.startswith("without --optim; ")


def test_plan_replaces_a_micro_batch_that_does_not_fit_by_the_largest_at_the_same_global_batch():
    batch = ("--per_device_train_batch_size", "64", "--global_batch_size", "64")
    plan = planned("--max_length", "128", *batch, config=LARGE, gpu_memory=4)
    best = next(entry for entry in plan.recipes if entry.name == plan.recommended)
    assert f"micro-batch 64 does not fit: {best.micro_batch} is the largest that does" in best.notes
    assert best.micro_batch * best.accumulation == 64 and not best.flags
    run, entry = as_printed(plan.command, 4)
    assert entry.fits and (run.batch.total, run.batch.micro) == (64, best.micro_batch)
    twice = plan.command.replace(f"batch_size {run.batch.micro}", f"batch_size {2 * run.batch.micro}")
    assert run.batch.micro > 1 and not as_printed(twice, 4)[1].fits


def test_plan_suggests_liger_if_only_the_logits_do_not_fit():
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(**shape, vocab_size=64_000)
    plan = planned("--max_length", "2048", config=llama, gpu_memory=1.88, recipe="standard")
    with_liger = [step for step in plan.next_steps if step.words.startswith("pip install liger-kernel && recipes ")]
    assert with_liger and all(step.planned.fits and "Liger's loss" in step.slowdown for step in with_liger)
    places = {step.words: place for place, step in enumerate(plan.next_steps)}
    before = [plan.next_steps[places[step.words] - 1] for step in with_liger if places[step.words]]
    assert not any(step.planned.fits for step in before)


def test_if_only_offload_fits_one_next_step_of_the_plan_avoids_it_without_lora_and_one_with_lora():
    plan = planned("--max_length", "128", config=LARGE, gpu_memory=2.38)
    assert plan.recommended == "memory"
    assert [step.planned.run["use_peft"] for step in plan.next_steps] == [False, True]
    for step in plan.next_steps:
        run, entry = as_printed(step.words, 2.38)
        assert entry.fits and run.engine.offload_optimizer == "none" and run["use_peft"] == step.planned.run["use_peft"]
        assert not (run["use_peft"] and run["gradient_checkpointing"])  # which costs time, and is not needed here
        assert (run["learning_rate"] == 2e-4) == run["use_peft"]


def test_next_steps_that_change_the_recipe_drop_accelerate_config_and_say_so():
    found = steps(num_processes=2, accelerate_config=YAML, gpu_memory=2)
    assert {"sharded", "memory", "standard"} <= {word for step in found for word in shlex.split(step.words)}
    for step in found:
        keeps_it = f"--accelerate_config {YAML}" in step.words
        assert keeps_it == (" standard " in step.words) and keeps_it != ("without --accelerate_config" in step.slowdown)
        _, entry = as_printed(step.words, 2, world=2)
        assert entry.total_bytes == step.planned.total_bytes


@pytest.mark.parametrize("flags", [[], ["--use_peft", "--load_in_4bit"]])
def test_each_next_step_differs_from_the_request_and_from_the_others_and_saves_memory(flags):
    argv = ["--gradient_checkpointing", "true", *flags]
    asked = run_of("sharded", "--max_length", "128", *argv)
    names = ("gradient_checkpointing", "use_peft", "load_in_4bit", "max_length", "optim", "dtype", "use_liger_kernel")
    found = [("sharded", *(asked[name] for name in names))]
    for step in steps(*argv, gpu_memory=0.5, num_processes=2, recipe="sharded"):
        run = step.planned.run
        found.append((run["recipe"], *(run[name] for name in names)))
        assert step.saves_bytes > 0
    assert len(found) == len(set(found)) and (flags or len(found) > 1)


def test_every_next_step_of_a_plan_saves_ram_if_only_ram_is_short():
    asked = {"config": LARGE, "gpu_memory": 3, "recipe": "memory_zero3"}
    plan = planned("--max_length", "128", **asked, host_memory=0.5)
    enough = planned("--max_length", "128", **asked, host_memory=plan.recipes[0].host_bytes_per_node * 1.1e-9)
    assert plan.recipes[0].fits_gpu and plan.next_steps and plan.short_of_ram and enough.recipes[0].fits
    for step in plan.next_steps:
        saved = plan.recipes[0].host_bytes_per_node - step.planned.host_bytes_per_node
        assert step.saves_host_bytes == saved > 0
