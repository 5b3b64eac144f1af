"""Planned against resident bytes: small models through two real optimizer steps on this CPU.

    python -m tests.benchmarks.resident

All cases run in one process, and each is measured alone: glibc maps every large tensor by itself,
so that freed memory returns to the kernel, and the kernel's high-water mark of resident memory is
reset before each case.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path

# Tensors of 64 KiB and more get their own pages, which return to the kernel when they are freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
LENGTH, MICRO = 192, 4

_WIDE = {"hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 4000}
_GPT2 = {"n_embd": 384, "n_layer": 2, "n_head": 6, "vocab_size": 4000, "bos_token_id": 0, "eos_token_id": 0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_key_value_heads": 6}
_LORA = "--use_peft true --lora_dropout 0"
# The model, and the flags that change the recipe `standard`.
CASES: dict[str, tuple[str, dict, str]] = {
    "GPT-2": ("GPT2Config", _GPT2, ""),
    "Llama": ("LlamaConfig", {**_WIDE, "intermediate_size": 1024}, ""),
    "BERT": ("BertConfig", {**_WIDE, "intermediate_size": 1536}, "--task sequence_classification"),
    "Qwen2": ("Qwen2Config", {**_WIDE, "intermediate_size": 1024, "num_key_value_heads": 2}, ""),
    "Qwen3-MoE": ("Qwen3MoeConfig", {**_WIDE, **_EXPERTS}, ""),
    "Llama, LoRA": ("LlamaConfig", {**_WIDE, "intermediate_size": 1024}, _LORA),
    "Llama, checkpointing": ("LlamaConfig", {**_WIDE, "intermediate_size": 1024}, "--gradient_checkpointing true"),
    "GPT-2, accumulation 2": ("GPT2Config", _GPT2, "--gradient_accumulation_steps 2"),
}


def run_of(recipe: str, length: int, micro: int, flags: str, **place):
    """The run of these flags on a machine with two cores, without accumulation if not asked for."""
    from recipes.run import here, resolve
    from recipes.run.hardware import Hardware

    flags = f"{flags} --recipe {recipe} --max_length {length} --per_device_train_batch_size {micro}"
    if "--gradient_accumulation_steps" not in flags:
        flags += " --gradient_accumulation_steps 1"
    here_nobody = here(**place, hardware=Hardware(cores=2), environment={}, trained_by="nobody")
    return resolve([*flags.split(), "--optim", "adamw_torch_fused"], here_nobody)


def planned(config, run) -> int:
    from recipes.planner.fits import Estimator

    return Estimator(config).memory(run, run.batch.micro).gpu.total


def case_of(name: str):
    """The model's configuration and the run of a case."""
    import transformers

    kind, settings, flags = CASES[name]
    return getattr(transformers, kind)(**settings), run_of("standard", LENGTH, MICRO, flags)


def resident(case: str, folder: Path) -> int:
    """Peak resident bytes of two optimizer steps, less what was resident before the model."""
    import torch
    from transformers import TrainingArguments

    from launch.training.model import auto_class, with_adapters
    from launch.training.trainer import RecipeTrainer
    from recipes.factories import arguments_for

    config, run = case_of(case)
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: see proc(5)
    torch.manual_seed(0)
    config.use_cache = False
    model = auto_class(run).from_config(config, dtype=torch.float32)
    if run["use_peft"]:
        model = with_adapters(run, model)
    rows = torch.randint(0, 1000, (2 * run.batch.total, LENGTH))
    labels = torch.zeros(len(rows), dtype=torch.long) if run["task"] == "sequence_classification" else rows
    mask = torch.ones(LENGTH, dtype=torch.long)
    mask[-1] = 0  # without padding, transformers would drop the mask
    pairs = zip(rows, labels, strict=True)
    data = [{"input_ids": row, "labels": label, "attention_mask": mask} for row, label in pairs]
    own = {"output_dir": str(folder), "max_steps": 2, "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
    args = arguments_for(run, TrainingArguments, {**own, "logging_strategy": "no"})
    RecipeTrainer(model=model, args=args, train_dataset=data).train()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure() -> dict[str, tuple[int, int]]:
    """Bytes of each case: planned, and real."""
    from recipes.quiet import silence

    with tempfile.TemporaryDirectory() as folder, silence():
        resident("Llama, LoRA", Path(folder))  # warm-up: libraries and MKL's buffers load
        found = {case: resident(case, Path(folder)) for case in CASES}
        return {case: (planned(*case_of(case)), real) for case, real in found.items()}


def print_found(found: dict[str, tuple[int, int]], title: str) -> None:
    """A table for people, and on the last line JSON for tests."""
    print(f"| {title} | planned MiB | real MiB | off by |\n|---|---|---|---|")
    for case, (planned, real) in found.items():
        print(f"| {case} | {planned / 2**20:.1f} | {real / 2**20:.1f} | {planned / real - 1:+.1%} |")
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):  # glibc reads them at a start
        os.execve(sys.executable, [sys.executable, "-m", "tests.benchmarks.resident"], {**os.environ, **ALLOCATOR})
    print_found(measure(), f"two steps of {MICRO} x {LENGTH} tokens, fp32, resident")
