"""A run that lost or won processes goes on with those it has, as if nothing had happened.

Each is stopped in the middle of an epoch whose last batch is not full, and resumed by another
number of processes at the same global batch. Without dropout the losses are those of an
uninterrupted run, up to the order in which floats are summed; dropout would draw other masks.
"""

import collections
import json

import pytest
import yaml

from tests.support.parallel import zero
from tests.support.rows import jsonl
from tests.support.running import ROOT, eval_losses, launch_quickly, losses, model_flags

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "tests" / "support" / "witness.py"
UNEVEN = "--global_batch_size 12 --num_train_epochs 3 --dataset_train_split train[:54]".split()  # 15 steps
STEADY = "--learning_rate 5e-3 --lr_scheduler_type linear --weight_decay 0.1 --logging_steps 1".split()
ADAPTERS = "--use_peft --lora_dropout 0".split()
FP32 = "--bf16 false".split()  # 16 bits round by the number of processes, resumed or not
BOUND = 5e-6  # of losses that start at 5.5 and end at 3.6
ENGINES = {
    "ddp": ("standard", []),
    "lora": ("standard", ADAPTERS),
    "zero2": ("memory", FP32),
    "zero3": ("memory_zero3", FP32),
    "zero2-lora": ("memory", [*FP32, *ADAPTERS]),
    "fsdp2": ("sharded", []),
}
ORDERS = {
    "last batch": (4, "standard", []),  # before the last of an epoch, which accelerate fills with others' examples
    "by length": (7, "standard", ["--train_sampling_strategy", "group_by_length"]),
    "rebalanced": (7, "standard", ["--train_sampling_strategy", "batch_rebalance"]),
    "packed": (3, "fast", ["--packing"]),
}


@pytest.fixture(scope="module")
def train(tiny_model, texts, tmp_path_factory):
    """Trains with a recipe in one world after the other; all but the last are stopped at a step."""

    def start(recipe: str, *more: str, worlds=(4,), stops=(), output=None, ends="finished"):
        folder = output or tmp_path_factory.mktemp(recipe)
        words = ["--recipe", recipe, *model_flags(tiny_model, texts), *UNEVEN, *STEADY, *more]
        for processes, stop in zip(worlds, [*stops, None], strict=True):
            told = {"STOP_AT_STEP": str(stop)} if stop else {}
            how = dict(processes=processes, script=SCRIPT, env=told, config=f"{recipe}.yaml")
            outcome = launch_quickly(*words, output=folder, **how)
            assert outcome.record["status"] == ("preempted" if stop else ends), outcome.output
        return outcome, folder

    return start


def examples(folder) -> dict[int, list[str]]:
    """For each step the examples that it trained on, on whatever rank."""
    seen = collections.defaultdict(list)
    for file in folder.glob("examples-*.jsonl"):
        for step, names in map(json.loads, file.read_text().splitlines()):
            seen[step] += names
    return {step: sorted(names) for step, names in sorted(seen.items())}


@pytest.mark.parametrize(("recipe", "more"), ENGINES.values(), ids=ENGINES)
def test_a_run_of_4_processes_resumed_by_2_then_1_then_3_trains_as_if_never_stopped(recipe, more, train):
    whole, there = train(recipe, *more)
    outcome, here = train(recipe, *more, worlds=(4, 2, 1, 3), stops=(3, 7, 11))
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)
    assert examples(here) == examples(there)
    assert not list(here.glob("converted-*"))
    said = "checkpoint-11 was written by 1 process and is resumed by 3: the data and its order stay the same"
    assert said in " ".join(outcome.output.split())


@pytest.mark.parametrize("worlds", [(2, 2), (2, 3)])
@pytest.mark.parametrize(("stop", "recipe", "more"), ORDERS.values(), ids=ORDERS)
def test_the_data_order_continues_after_a_resume_with_the_same_or_more_processes(stop, recipe, more, worlds, train):
    whole, there = train(recipe, *more, worlds=(2,))
    outcome, here = train(recipe, *more, worlds=worlds, stops=(stop,))
    assert examples(here) == examples(there)
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)


def test_an_evaluation_before_the_last_batch_of_an_epoch_changes_no_example_and_no_loss(train):
    whole, there = train("standard", worlds=(4,))
    evaluated = "--eval_strategy steps --eval_steps 4 --dataset_test_split train[54:60] --per_device_eval_batch_size 1"
    outcome, here = train("standard", *evaluated.split(), worlds=(4,))
    assert examples(here) == examples(there)
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)


def test_a_tensor_parallel_run_resumed_with_more_replicas_keeps_the_losses(train, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**zero(2), "tensor_parallel": {"autotp_size": 2}}))
    whole, _ = train("standard", "--deepspeed", str(file), worlds=(2,))
    outcome, _ = train("standard", "--deepspeed", str(file), worlds=(2, 4), stops=(7,))
    assert losses(outcome) == pytest.approx(losses(whole), abs=BOUND)


@pytest.mark.parametrize("packing", [["--max_length", "64"], ["--packing", "--max_length", "32"]], ids=str)
def test_a_mixture_resumed_with_other_process_counts_sees_the_same_examples_at_each_step(packing, tiny_model, tmp_path):
    """Of three parts the two smaller are repeated."""
    parts = []
    for name, (size, weight) in {"large": (60, 2), "small": (11, 2), "tiny": (3, 1)}.items():
        rows = [{"text": f"{name} {row}"} for row in range(size)]
        parts.append({"name": jsonl(tmp_path, rows, f"{name}.jsonl"), "weight": weight})
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"dataset_name": parts}))
    words = f"--recipe standard --model_name_or_path {tiny_model} --config {tmp_path / 'settings.yaml'}".split()
    words += [*"--global_batch_size 12 --max_steps 20 --logging_steps 1".split(), *packing]
    for folder, worlds in {"whole": [(2, None)], "parts": [(2, 3), (4, 11), (1, 16), (2, None)]}.items():
        for processes, stop in worlds:
            told = {"STOP_AT_STEP": str(stop)} if stop else {}
            outcome = launch_quickly(*words, output=tmp_path / folder, processes=processes, script=SCRIPT, env=told)
        assert outcome.record["status"] == "finished", outcome.output
    assert examples(tmp_path / "parts") == examples(tmp_path / "whole")


def test_load_best_model_at_end_loads_a_checkpoint_of_another_number_of_processes(train):
    """The highest loss counts as the best here: that of the first checkpoint."""
    best = "--load_best_model_at_end --metric_for_best_model eval_loss --greater_is_better true --eval_strategy steps"
    every = "--eval_steps 3 --save_strategy steps --save_steps 3 --dataset_test_split train[54:64]"
    outcome, folder = train("memory", *FP32, *best.split(), *every.split(), worlds=(2, 1), stops=(7,))
    evaluated = [loss for _, loss in eval_losses(outcome)]
    assert outcome.record["eval_loss"] == pytest.approx(max(evaluated), rel=1e-6) == pytest.approx(evaluated[0])
    assert not list(folder.glob("converted-*"))


def test_deepspeed_sgd_resumed_with_other_process_counts_is_refused_with_the_count_that_works(train, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(zero(2)))
    sgd = ["--deepspeed", str(file), "--optim", "sgd"]
    outcome, folder = train("standard", *sgd, worlds=(2, 1), stops=(3,), ends="preempted")
    assert outcome.code and "Traceback" not in outcome.output
    assert "--num_processes 2" in outcome.output and "only the state of Adam" in outcome.output
    outcome, _ = train("standard", *sgd, worlds=(2,), output=folder)
    assert outcome.record["global_step"] == 15
