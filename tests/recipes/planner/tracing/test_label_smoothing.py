"""Label smoothing: Trainer computes the loss of a language model from its logits."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from launch.training.trainer import RecipeTrainer
from recipes.factories import arguments_for
from recipes.planner.fits import Estimator
from recipes.planner.tracing.live_bytes import LiveBytes
from recipes.run.hardware import Hardware
from tests.recipes.planner.small import peak, planned, run_of

LENGTH, WORDS = 64, 16_000
_SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDY = LlamaConfig(**_SHAPE, vocab_size=WORDS)
SMOOTHED = ("--label_smoothing_factor", "0.1")


def of_a_real_trainer(run, rows, folder):
    """Peak bytes of one micro-batch of Trainer, without weights and optimizer."""
    model = AutoModelForCausalLM.from_config(WORDY, dtype=getattr(torch, run["dtype"]))
    row = torch.randint(0, WORDS, (LENGTH,))
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}] * rows
    own = {"output_dir": str(folder), "max_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    args = arguments_for(run, TrainingArguments, own)
    trainer = RecipeTrainer(model=model, args=args, train_dataset=data)
    trainer.train()
    batch = {name: torch.stack([one[name] for one in data]) for name in data[0]}
    live = LiveBytes()
    live.ignore([*model.parameters(), *model.buffers(), *batch.values()])
    with live:
        trainer.training_step(trainer.model_wrapped, batch)
    return peak(live)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("kind", [(), ("--bf16", "true"), ("--dtype", "bfloat16")], ids=["fp32", "autocast", "bf16"])
@pytest.mark.parametrize("flags", [(), SMOOTHED], ids=["plain", "smoothed"])
def test_a_planned_micro_batch_takes_what_trainers_own_takes(rows, kind, flags, tmp_path):
    fixed = ("--max_length", str(LENGTH), "--use_cpu", "true", "--fp16", "false")
    run = run_of("standard", *fixed, *kind, *flags, hardware=Hardware(cores=2))
    estimator = Estimator(WORDY)
    estimator.traced(run, 2)  # from whose trace those of other micro-batches come
    assert peak(estimator.traced(run, rows)) == pytest.approx(of_a_real_trainer(run, rows, tmp_path), rel=0.02)


def test_a_plan_counts_it_for_a_language_model():
    def logits(*flags):
        (entry,) = planned("--max_length", str(LENGTH), *flags, config=WORDY, recipe="standard").recipes
        return entry.components.logits

    assert logits(*SMOOTHED) > 1.25 * logits()
    classifies = ("--task", "sequence_classification")
    assert logits(*classifies, *SMOOTHED) == logits(*classifies)
