"""A rank that trains a tiny Llama with Trainer itself: `python parallel.py JSON`, and its losses.

The JSON holds `settings` of TrainingArguments and, if wanted, `sizes` of a ParallelismConfig.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch

from launch.host.world import leave_group
from tests.support.real_failures import arguments, tiny_llama
from tests.support.running import run_ranks

ROWS = torch.randint(1, 32, (32, 16), generator=torch.Generator().manual_seed(0))


def zero(stage: int | None, **more) -> dict:
    """DeepSpeed's JSON of a ZeRO stage."""
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    own = {**dict.fromkeys(auto, "auto"), "zero_allow_untested_optimizer": True}
    return {**own, "zero_optimization": {"stage": stage, **more}}


def train(folder: str, settings: dict, sizes: dict | None = None):
    """The Trainer after four steps, the same for every rank of whatever engine."""
    from accelerate import ParallelismConfig
    from transformers import Trainer

    own = dict(use_cpu=True, max_steps=4, logging_steps=1, learning_rate=0.05, lr_scheduler_type="constant")
    config = ParallelismConfig(**sizes) if sizes else None
    args = arguments(Path(folder), **{**own, "optim": "sgd", "parallelism_config": config, **settings})
    if sizes and sizes.get("sp_size"):
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)  # accelerate does so on a GPU alone
    # Prompts of different lengths: what is averaged over tokens must not be averaged over batches.
    places = torch.arange(16)
    data = [
        {"input_ids": row, "labels": row.masked_fill(places < number % 7, -100), "position_ids": places}
        for number, row in enumerate(ROWS)
    ]
    model = tiny_llama(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    return trainer


def printed(folder: Path, processes: int, variables: dict[str, str] | None = None, **request) -> str:
    """What all ranks print. `variables` are added to their environment."""
    folder.mkdir(exist_ok=True)
    words = [__file__, json.dumps({"folder": str(folder), **request})]
    return run_ranks(processes, {**os.environ, "DS_ACCELERATOR": "cpu", **(variables or {})}, words)[1]


def ranks(folder: Path, processes: int, **request) -> list[dict]:
    """Each rank's losses, gradient norms, engine, and number of parameters in ZeRO-3's shards."""
    output = printed(folder, processes, **request)
    reports = [json.loads(found) for found in re.findall(r"^REPORT (.*)$", output, re.M)]
    assert len(reports) == processes, output
    return reports


if __name__ == "__main__":
    trainer = train(**json.loads(sys.argv[1]))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    report = {name: [entry.get(name) for entry in logged] for name in ("loss", "grad_norm")}
    engine = trainer.accelerator.distributed_type.value
    report["trained"] = [trainer.args.world_size, engine, type(trainer.model_wrapped).__name__]
    report["in shards"] = sum(hasattr(one, "ds_tensor") for one in trainer.model.parameters())
    sys.stdout.write(f"REPORT {json.dumps(report)}\n")  # in one piece: the other ranks write too
    sys.stdout.flush()
    trainer.accelerator.free_memory()
    leave_group()
