"""Tiny trainings, launches and ranks of the real libraries, and whether a rule reports them."""

import warnings
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from recipes.errors import Problem
from recipes.rules.check import RULES
from recipes.run.hardware import Gpu, Hardware
from tests.support.running import launched as launched
from tests.support.runs import resolved

BY_NAME = {rule.name: rule for rule in RULES}
TOKENS = {"input_ids": list(range(8)), "labels": list(range(8))}


def assert_fires(rule: str, settings: dict, *, world=1, gpu=None, config=None, environment=None) -> Problem:
    """The rule reports the run that just failed. Returns what it reports."""
    hardware = Hardware((Gpu("GPU", gpu, 16 << 30),)) if gpu else Hardware()
    place = {"hardware": hardware, "accelerate_config": config and str(config), "environment": environment or {}}
    found = list(BY_NAME[rule](resolved("", world, settings, **place)))
    assert found, f"{rule} says nothing about {settings}"
    return found[0]


def arguments(folder: Path, **changes):
    fixed = dict(
        output_dir=str(folder), use_cpu=True, report_to="none", max_steps=2, save_strategy="no", disable_tqdm=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TrainingArguments(**{**fixed, **changes})


def tiny_llama(**changes):
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "max_position_embeddings": 32, **changes}))


def train(folder: Path, *, model=None, evaluates=False, **changes):
    """A real Trainer that has trained a tiny model. Equal settings have equal losses."""
    args = arguments(folder, **changes)
    rows = [TOKENS] * 16
    evaluated = rows[:4] if evaluates else None
    trainer = Trainer(model or tiny_llama(), args, train_dataset=rows, eval_dataset=evaluated)
    trainer.train()
    return trainer


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
