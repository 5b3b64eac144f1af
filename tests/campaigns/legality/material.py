"""What drawn runs train on: tiny models of several architectures, and small files of data."""

from __future__ import annotations

import json
from pathlib import Path

ROWS = 80


def write_material(folder: Path) -> Path:
    """models/ and data/, written once. Takes seconds."""
    if not (folder / "complete").exists():
        (folder / "models").mkdir(parents=True, exist_ok=True)
        (folder / "data").mkdir(exist_ok=True)
        _write_models(folder / "models")
        _write_data(folder / "data")
        (folder / "complete").touch()
    return folder


def _write_models(folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoConfig
    from transformers.utils import logging

    from launch.data.demo import demo_tokenizer

    logging.disable_progress_bar()
    tokenizer = demo_tokenizer()
    common = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    wide = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    kinds = {
        "llama": ("LlamaForCausalLM", "llama", {**wide, "max_position_embeddings": 256}),
        "llama-tied": ("LlamaForCausalLM", "llama", {**wide, "tie_word_embeddings": True}),
        "gpt2": ("GPT2LMHeadModel", "gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}),
        "opt": (
            "OPTForCausalLM",
            "opt",
            {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "ffn_dim": 64,
                "word_embed_proj_dim": 32,
            },
        ),
        "bert": ("BertForMaskedLM", "bert", wide),
        "bert-classifier": ("BertForSequenceClassification", "bert", {**wide, "num_labels": 3}),
        "t5": (
            "T5ForConditionalGeneration",
            "t5",
            {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "d_kv": 16},
        ),
    }
    for name, (model, kind, sizes) in kinds.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**common, **sizes})
        getattr(transformers, model)(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "adapters").mkdir()
    (folder / "adapters" / "adapter_config.json").write_text("{}", encoding="utf-8")
    (folder / "empty").mkdir()
    short = folder / "llama-short"
    config = AutoConfig.for_model("llama", **{**common, **wide, "max_position_embeddings": 32})
    transformers.LlamaForCausalLM(config).save_pretrained(short)
    tokenizer.save_pretrained(short)


def _write_data(folder: Path) -> None:
    texts = [f"Example {n} says " + "well " * (1 + n % 7) + "and ends." for n in range(ROWS)]
    chats = [
        [{"role": "user", "content": f"What is {n} and one?"}, {"role": "assistant", "content": f"It is {n + 1}."}]
        for n in range(ROWS)
    ]
    _write_rows(folder / "texts.jsonl", [{"text": text} for text in texts])
    _write_rows(folder / "few.jsonl", [{"text": text} for text in texts[:3]])
    _write_rows(folder / "pairs.jsonl", [{"prompt": text[:12], "completion": text[12:]} for text in texts])
    _write_rows(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    labels = ("bad", "fair", "good")
    lines = ["text,label", *(f"{text},{labels[n % 3]}" for n, text in enumerate(texts))]
    (folder / "labels.csv").write_text("\n".join(lines), encoding="utf-8")


def _write_rows(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
