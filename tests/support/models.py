"""Tiny models on the disk, and how a run loads them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from launch.training.data import Data
from launch.training.demo import demo_tokenizer
from launch.training.model import load_model, load_tokenizer
from recipes.errors import UserError
from recipes.flags import RunFlags

SMALL = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LANGUAGE = Data(None, None, None, "texts", None)
CLASSES = Data(None, None, None, "labelled texts", ["bad", "fair", "good"])


def save(model, folder) -> str:
    model.save_pretrained(folder)
    demo_tokenizer().save_pretrained(folder)
    return str(folder)


def run_with(name=None, **chosen):
    defaults = {flag.name: flag.default for flag in dataclasses.fields(RunFlags)}
    arguments = {
        "seed": 42,
        "bf16": False,
        "fp16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "gradient_checkpointing_kwargs": None,
    }
    return defaults | arguments | {"model_name_or_path": name} | chosen


def load(run, data=LANGUAGE):
    return load_model(run, load_tokenizer(run), data)


def problem(run, data=LANGUAGE):
    with pytest.raises(UserError) as caught:
        load(run, data)
    (found,) = caught.value.problems
    assert "\n" not in str(found)
    return found


def loss_of(model):
    ids = torch.arange(1, 17).unsqueeze(0)
    return model(input_ids=ids, labels=ids).loss


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}
