"""Tiny trainings, launches and ranks of the real libraries, and whether a rule reports them."""

import json
import os
import warnings
from pathlib import Path

from recipes.errors import Problem
from recipes.rules.check import RULES
from recipes.run import here, resolve
from recipes.run.hardware import Gpu, Hardware
from tests.support.running import launched as launched
from tests.support.running import run_ranks

BY_NAME = {rule.name: rule for rule in RULES}
TOKENS = {"input_ids": list(range(8)), "labels": list(range(8))}


def assert_fires(
    rule: str,
    settings: dict,
    *,
    world: int | None = 1,
    gpu: tuple[int, int] | None = None,
    config=None,
    environment: dict[str, str] | None = None,
) -> Problem:
    """The rule reports the run that just failed. Returns what it reports."""
    run = resolve(
        [],
        here(
            world,
            hardware=Hardware((Gpu("GPU", gpu, 16 << 30),)) if gpu else Hardware(),
            accelerate_config=str(config) if config else None,
            environment=environment or {},
        ),
        settings=settings,
    )
    found = list(BY_NAME[rule](run))
    assert found, f"{rule} says nothing about {settings}"
    return found[0]


def arguments(folder: Path, **changes):
    from transformers import TrainingArguments

    fixed = dict(
        output_dir=str(folder), use_cpu=True, report_to="none", max_steps=2, save_strategy="no", disable_tqdm=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TrainingArguments(**{**fixed, **changes})


def tiny_llama(**changes):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(
        LlamaConfig(**{**sizes, "num_key_value_heads": 2, "max_position_embeddings": 32, **changes})
    )


def train(folder: Path, *, model=None, evaluates=False, **changes):
    """A real Trainer that has trained a tiny model. Equal settings have equal losses."""
    from transformers import Trainer

    args = arguments(folder, **changes)
    rows = [TOKENS] * 16
    evaluated = rows[:4] if evaluates else None
    trainer = Trainer(model or tiny_llama(), args, train_dataset=rows, eval_dataset=evaluated)
    trainer.train()
    return trainer


def losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


ZERO_2 = {"zero_optimization": {"stage": 2}}

SCRIPT = """
import json, sys, tempfile, torch
from launch.host.world import leave_group
from tests.support.real_failures import train
from pathlib import Path
settings = json.loads(sys.argv[1])
trainer = train(Path(tempfile.mkdtemp()), per_device_train_batch_size=2, **settings)
parts = [trainer.args.world_size, trainer.accelerator.distributed_type.value, type(trainer.model_wrapped).__name__]
sys.stdout.write(f"TRAINED {' '.join(map(str, parts))}\\n")  # in one piece: the other rank writes too
leave_group()
"""


def torchrun(folder: Path, settings: dict, processes: int = 2, **environment: str) -> str:
    script = folder / "ranks.py"
    script.write_text(SCRIPT, encoding="utf-8")
    return run_ranks(processes, {**os.environ, **environment}, [str(script), json.dumps(settings)])[1]
