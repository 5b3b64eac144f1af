"""Recipe `sharded` on CPU ranks: FSDP2 shards, trains what DDP trains, and saves one whole model.

accelerate's refusal of a CPU is lifted (tests/support/fsdp_on_cpu.py); all else is what users run.
"""

import json

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.rows import jsonl
from tests.support.running import ROOT, eval_losses, launch_quickly, losses, model_flags

SCRIPT = ROOT / "tests" / "support" / "fsdp_on_cpu.py"
STEADY = "--learning_rate 5e-3 --lr_scheduler_type constant --logging_steps 1".split()
HELD_OUT = "--dataset_train_split train[:90%] --dataset_test_split train[90%:]".split()
EVERY_SECOND_STEP = "--eval_strategy steps --eval_steps 2 --save_strategy steps --save_steps 2".split()


@pytest.fixture(scope="module")
def sharded(tiny_model, texts, tmp_path_factory):
    """Trains with FSDP2; returns the outcome and its folder."""

    def start(*more: str, steps: int = 4):
        folder = tmp_path_factory.mktemp("sharded")
        words = ["--recipe", "sharded", *model_flags(tiny_model, texts), *STEADY, "--max_steps", str(steps), *more]
        return launch_quickly(*words, output=folder, config="sharded.yaml", script=SCRIPT), folder

    return start


@pytest.fixture(scope="module")
def both(tiny_model, texts, sharded, tmp_path_factory):
    """The outcomes and folders of the same training with FSDP2 and with DDP."""

    def start(*more: str):
        folder = tmp_path_factory.mktemp("ddp")
        words = ["--recipe", "standard", *model_flags(tiny_model, texts), *STEADY, "--max_steps", "4", *more]
        return sharded(*more), (launch_quickly(*words, output=folder), folder)

    return start


def held(folder, what: str) -> list[int]:
    return [json.loads((folder / f"held-{rank}.json").read_text())[what] for rank in (0, 1)]


def test_fsdp2_splits_the_parameters_matches_the_losses_of_ddp_and_saves_one_full_model(both):
    (outcome, folder), (ddp, other) = both()
    assert (outcome.code, outcome.record["engine"]) == (0, "FSDP2"), outcome.output
    assert losses(outcome) == pytest.approx(losses(ddp), rel=1e-6)
    parameters = 4 * outcome.record["num_parameters"]
    assert held(folder, "parameters") == [parameters / 2] * 2
    assert held(folder, "optimizer") == [2 * parameters / 2] * 2
    names = {file.name for file in (folder / "checkpoint-4" / "pytorch_model_fsdp_0").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert not list((folder / "checkpoint-4").glob("*.safetensors"))
    whole, expected = load_file(folder / "model.safetensors"), load_file(other / "model.safetensors")
    assert whole.keys() == expected.keys()
    assert all(whole[name].allclose(weight, atol=1e-5) for name, weight in expected.items())
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.slow
def test_fsdp2_does_not_round_the_loss_in_bf16(both):
    """Under FSDP2 the libraries round the count of tokens, and then the loss itself, to bf16."""
    (outcome, _), (ddp, _) = both("--bf16")
    assert losses(outcome)[0] == pytest.approx(losses(ddp)[0], rel=2e-4)
    assert losses(outcome) == pytest.approx(losses(ddp), rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dora", [(), ("--use_dora",)], ids=["lora", "dora"])
@pytest.mark.parametrize("four_bits", [(), ("--load_in_4bit",)], ids=["whole", "4 bits"])
def test_lora_and_dora_under_fsdp2_have_the_losses_and_weights_of_ddp(four_bits, dora, both):
    (outcome, folder), (ddp, other) = both("--use_peft", *four_bits, *dora)
    assert losses(outcome) == pytest.approx(losses(ddp), rel=1e-5)
    weights, expected = (load_file(place / "adapter_model.safetensors") for place in (folder, other))
    assert weights.keys() == expected.keys()
    assert all(weights[name].allclose(expected[name], atol=1e-5) for name in expected)


@pytest.mark.slow
def test_load_best_model_at_end_under_fsdp2_loads_the_checkpoint_with_the_lowest_eval_loss(sharded):
    """Ranks that disagree which one is the best would each load a half of another model."""
    best = ["--load_best_model_at_end", "--save_total_limit", "3"]
    outcome, folder = sharded(*HELD_OUT, *EVERY_SECOND_STEP, *best, steps=6)
    evaluated = [loss for _, loss in eval_losses(outcome)]
    assert evaluated[2] == min(evaluated)
    assert outcome.record["eval_loss"] == pytest.approx(evaluated[2], rel=1e-6)
    state = json.loads((folder / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"].endswith("checkpoint-6")


@pytest.mark.slow
def test_fsdp2_trains_a_bert_classifier_with_the_losses_of_ddp(bert, tmp_path):
    rows = [{"text": f"Row {n} " + "good " * (n % 3), "label": ["bad", "fair", "good"][n % 3]} for n in range(128)]
    data = jsonl(tmp_path, rows)
    flags = ["--task", "sequence_classification", *model_flags(bert, data), *STEADY, "--max_steps", "3"]
    outcome = launch_quickly(
        "--recipe", "sharded", *flags, output=tmp_path / "sharded", config="sharded.yaml", script=SCRIPT
    )
    ddp = launch_quickly("--recipe", "standard", *flags, output=tmp_path / "ddp")
    assert losses(outcome) == pytest.approx(losses(ddp), rel=1e-5), outcome.output
