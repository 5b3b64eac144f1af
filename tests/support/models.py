"""Tiny models on the disk, and how a run loads them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from launch.data.demo import demo_tokenizer
from launch.training.model import load_model, load_tokenizer, with_model
from recipes.errors import UserError
from recipes.rules.check import require_legal
from tests.support.runs import resolved

SMALL = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def chat_tokenizer():
    """The demonstration's bytes, and a template that marks the assistant's messages."""
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = Path(__file__).with_name("chat_template.jinja").read_text()
    return tokenizer


def save(model, folder) -> str:
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


def change(folder: Path, **fields) -> None:
    """Replace fields of the config.json in a folder."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def write_llama(folder: Path, **sizes) -> Path:
    """A Llama of these sizes, and the byte-level tokenizer."""
    tokenizer = chat_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    save(LlamaForCausalLM(LlamaConfig(**{"vocab_size": len(tokenizer), **ids, **sizes})), folder)
    return folder


def run_with(name=None, **chosen):
    """A run on a CPU with these settings."""
    named = {"model_name_or_path": name} if name else {}
    data = {"dataset_name": "somebody/reviews"} if name or "task" in chosen else {}
    return resolved(settings={"recipe": "baseline", **named, **data, **chosen})


def load(run, labels=None, problem_type=None):
    """As train.py does it: the rules first, then the tokenizer, the rules once more, the model."""
    require_legal(run)
    tokenizer = load_tokenizer(run)
    run, _ = with_model(run, tokenizer)
    return load_model(run, tokenizer, labels, problem_type)


def problem(run, *classes):
    with pytest.raises(UserError) as caught:
        load(run, *classes)
    (found,) = caught.value.problems
    assert "\n" not in str(found)
    return found


def loss_of(model):
    ids = torch.arange(1, 17).unsqueeze(0)
    return model(input_ids=ids, labels=ids).loss
