"""What drawn runs train on: tiny models of several architectures, and small files of data."""

from __future__ import annotations

import json
from pathlib import Path

ROWS = 80
_WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_OPT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, "word_embed_proj_dim": 32}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
_T5 = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16}
# Folder -> class, its config's kind and sizes.
_MODELS = {
    "llama": ("LlamaForCausalLM", "llama", {**_WIDE, "max_position_embeddings": 256}),
    "llama-tied": ("LlamaForCausalLM", "llama", {**_WIDE, "tie_word_embeddings": True}),
    "llama-short": ("LlamaForCausalLM", "llama", {**_WIDE, "max_position_embeddings": 32}),
    "gpt2": ("GPT2LMHeadModel", "gpt2", _GPT2),
    "opt": ("OPTForCausalLM", "opt", _OPT),
    "bert": ("BertForMaskedLM", "bert", _WIDE),
    "bert-classifier": ("BertForSequenceClassification", "bert", {**_WIDE, "num_labels": 3}),
    "t5": ("T5ForConditionalGeneration", "t5", _T5),
}


def write_material(folder: Path) -> Path:
    """models/ and data/, written once. Takes seconds."""
    if not (folder / "complete").exists():
        (folder / "data").mkdir(parents=True, exist_ok=True)
        _write_models(folder / "models")
        _write_data(folder / "data")
        (folder / "complete").touch()
    return folder


def _write_models(folder: Path) -> None:
    import torch
    import transformers
    from transformers.utils import logging

    from launch.data.demo import demo_tokenizer

    logging.disable_progress_bar()
    tokenizer = demo_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    for name, (model, kind, sizes) in _MODELS.items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **ids, **sizes)
        getattr(transformers, model)(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "empty").mkdir()
    (folder / "adapters").mkdir()
    (folder / "adapters" / "adapter_config.json").write_text("{}", encoding="utf-8")


def _write_data(folder: Path) -> None:
    texts = [f"Example {n} says " + "well " * (1 + n % 7) + "and ends." for n in range(ROWS)]
    chats = [
        [{"role": "user", "content": f"What is {n} and one?"}, {"role": "assistant", "content": f"It is {n + 1}."}]
        for n in range(ROWS)
    ]
    rows = {
        "texts": [{"text": text} for text in texts],
        "few": [{"text": text} for text in texts[:3]],
        "pairs": [{"prompt": text[:12], "completion": text[12:]} for text in texts],
        "chats": [{"messages": chat} for chat in chats],
    }
    for name, content in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content), encoding="utf-8")
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    labels = [f"{text},{('bad', 'fair', 'good')[n % 3]}" for n, text in enumerate(texts)]
    (folder / "labels.csv").write_text("\n".join(["text,label", *labels]), encoding="utf-8")
