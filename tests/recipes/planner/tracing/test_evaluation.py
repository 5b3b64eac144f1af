"""What an evaluation takes, against Trainer's own, and what the plan makes of it."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from launch.training.trainer import RecipeTrainer
from recipes.factories import arguments_for
from recipes.planner.fits import Estimator
from recipes.planner.shapes import EVALUATION, TRAINING
from recipes.planner.tracing.live_bytes import LiveBytes
from recipes.planner.tracing.trace import at_batch, trace, trace_shallow, weigh
from recipes.run.hardware import Hardware
from tests.recipes.planner.small import SMALL, peak, planned, run_of

LENGTH = 64
EVALUATES = ("--max_length", str(LENGTH), "--eval_strategy", "steps", "--fp16", "false")


def of_a_real_trainer(config, run, folder):
    """Peak bytes of an evaluation after a step of training, without weights and optimizer."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    row = torch.randint(0, 1000, (LENGTH,))
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}] * 16
    own = {"output_dir": str(folder), "max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    own |= {"disable_tqdm": True, "report_to": "none"}
    args = arguments_for(run, TrainingArguments, own)
    trainer = RecipeTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert all(parameter.grad is None for parameter in model.parameters())
    live = LiveBytes()
    live.ignore([*model.parameters(), *model.buffers()])
    with live:
        trainer.evaluate()
    return peak(live)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("precision", [(), ("--bf16", "true")], ids=["fp32", "bf16"])
@pytest.mark.parametrize("smoothing", [(), ("--label_smoothing_factor", "0.1")], ids=["", "smoothed"])
def test_a_planned_evaluation_takes_what_trainers_own_takes(name, precision, smoothing, tmp_path):
    flags = (*smoothing, "--per_device_eval_batch_size", "8", "--use_cpu", "true", "--gradient_checkpointing", "true")
    run = run_of("standard", *EVALUATES, *flags, *precision, hardware=Hardware(cores=2))
    found = Estimator(SMALL[name]).memory(run, 1).evaluation
    assert peak(found) == pytest.approx(of_a_real_trainer(SMALL[name], run, tmp_path), rel=0.02)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_small_traces_give_the_evaluation_of_every_batch_and_depth(name, autocast):
    case = replace(Estimator(SMALL[name]).case(run_of("standard", *EVALUATES), 2), evaluation=True, autocast=autocast)
    own = {key: value for key, value in SMALL[name].to_dict().items() if key not in ("layer_types", "n_layer")}
    deep = type(SMALL[name])(**{**own, "num_hidden_layers": 7})
    weights = weigh(deep, "causal_lm")
    (two, _), (three, _) = (trace_shallow(deep, weights, replace(case, batch=batch)) for batch in (2, 3))
    whole = trace(deep, replace(case, batch=9))
    assert (at_batch(two, three, 9).allocations == whole.allocations).all()


WIDE = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=100_000
)
LONG = ("--max_length", "2048", "--per_device_train_batch_size", "1")


def of_evaluation(batch, *flags, config=WIDE, **other):
    own = ["--eval_strategy", "steps", "--per_device_eval_batch_size", str(batch)] if batch else []
    return planned(*LONG, *own, *flags, config=config, recipe="standard", **other)


def test_a_large_evaluation_sets_the_peak_and_the_plan_says_which_one_fits():
    without, small, large = (of_evaluation(batch, gpu_memory=20).recipes[0] for batch in (None, 1, 64))
    assert without.components == replace(small.components, cached=without.components.cached)
    assert (small.moment, large.moment) == (TRAINING, EVALUATION)
    assert large.components.logits > 10 * small.components.logits
    assert large.components.gradients == 0
    assert small.fits and not large.fits
    assert of_evaluation(large.evaluation_batch, gpu_memory=20).recipes[0].fits
    assert not of_evaluation(2 * large.evaluation_batch, gpu_memory=20).recipes[0].fits


def test_the_first_thing_to_try_is_a_smaller_evaluation_and_it_fits():
    plan = of_evaluation(64, gpu_memory=20)
    assert plan.recommended is None
    (step,) = plan.next_steps
    assert step.fits
    assert f"--per_device_eval_batch_size {plan.recipes[0].evaluation_batch}" in step.words


def test_an_evaluation_batch_that_nobody_wrote_is_made_to_fit():
    plan = planned(*LONG, "--eval_strategy", "steps", config=WIDE, recipe="standard", gpu_memory=8)
    assert plan.recommended == "standard"
    size = plan.recipes[0].flags["per_device_eval_batch_size"]
    assert size < 8
    assert f"--per_device_eval_batch_size {size}" in plan.command
