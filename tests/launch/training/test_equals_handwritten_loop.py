"""What a recipe trains is what a plain PyTorch loop trains: the same loss at every step."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.data.load import load_data
from launch.training.model import load_tokenizer
from recipes.run import resolve
from tests.support.loop import loop_steps
from tests.support.running import losses, model_flags, train_here

STEPS, LENGTH, RATE = 8, 64, 1e-3
JOINED = ("--packing", "--packing_strategy", "wrapped")


@pytest.mark.parametrize(
    ("recipe", "micro", "accumulation", "bf16"),
    [("baseline", 4, 4, False), ("standard", 4, 4, False), ("fast", 8, 2, False), ("fast", 8, 2, True)],
)
def test_a_recipe_has_the_losses_of_a_handwritten_loop(tiny_model, texts, tmp_path, recipe, micro, accumulation, bf16):
    flags = f"--recipe {recipe} --max_steps {STEPS} --learning_rate {RATE} --logging_steps 1" + " --bf16" * bf16
    order = "--train_sampling_strategy sequential --dataloader_drop_last --num_train_epochs 10"
    outcome = train_here(tiny_model, texts, tmp_path, *flags.split(), *order.split(), *JOINED)
    record = outcome.record
    assert record["tokens_per_second"] == pytest.approx(record["samples_per_second"] * LENGTH)
    run = resolve([*model_flags(tiny_model, texts), *JOINED])
    rows = torch.stack([row["input_ids"] for row in load_data(run, load_tokenizer(run)).train])
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    batch = {"micro": micro, "accumulation": accumulation}
    expected = loop_steps(reference, rows, steps=STEPS, learning_rate=RATE, bf16=bf16, **batch)
    assert losses(outcome) == pytest.approx([loss for loss, _ in expected], rel=1e-3 if bf16 else 1e-5)
