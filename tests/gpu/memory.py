"""Memory that `plan_memory` predicts against what torch allocates and reserves on one GPU; one call, one table.

    python -m tests.gpu.memory [--sizes 0.1B 0.5B 1.2B 3B] [--output FILE.json]

Every case trains two optimizer steps with RecipeTrainer in a process of its own: the second holds the optimizer's state
when its activations come. Models are made from their configurations, tokens are random, nothing is compiled. "DDP"
cases are wrapped as a rank among several is; with the others Trainer is alone.

    python -m tests.gpu.memory --sizes tiny

rehearses every case with a tiny model, on a CPU too: in fp32 there, short, and against what torch's own allocator
counted. That compares no GPU with anything. Needs torch, transformers, accelerate and, for LoRA, peft; a case that
cannot run here says why in its row.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

STEPS, RATE, GIB = 2, 1e-4, 2**30
FAMILIES = {
    "gpt2": {"vocab_size": 50_257},
    "llama": {"vocab_size": 32_000},
    "qwen2": {"vocab_size": 151_936, "tie_word_embeddings": True},
    "bert": {"vocab_size": 30_522},
}
# Width, layers, heads, heads of keys and values, and width of the MLP.
SHAPES = {
    "tiny": (64, 2, 2, 2, 128),
    "0.05B": (512, 6, 8, 8, 1408),  # what a CPU trains in seconds
    "0.1B": (768, 12, 12, 12, 3072),
    "0.3B": (1024, 24, 16, 16, 4096),
    "0.5B": (896, 24, 14, 2, 4864),
    "0.8B": (1280, 36, 20, 20, 5120),
    "1.2B": (2048, 20, 16, 16, 5632),
    "3B": (2560, 32, 20, 20, 6912),
}
TINY_LENGTH = 64


@dataclass(frozen=True)
class Case:
    """One training. `flags` are train.py's, beyond recipe, batch and length; without `ddp` one process is alone."""

    family: str
    size: str
    recipe: str
    micro: int
    length: int
    accumulation: int = 1
    ddp: bool = True
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        return "sequence_classification" if self.family == "bert" else "causal_lm"

    def __str__(self) -> str:
        words = [f"{self.family} {self.size}", self.recipe if self.ddp else f"{self.recipe} alone"]
        words += [f"{self.micro}x{self.accumulation} of {self.length}", *map(_short_flag, self.flags.items())]
        return ", ".join(words)


def _short_flag(flag: tuple[str, Any]) -> str:
    name, value = flag
    return {True: name, False: f"no {name}"}.get(value, f"{name} {value}") if isinstance(value, bool) else str(value)


CHECKPOINTED = {"gradient_checkpointing": True}
EIGHT_BIT = {"optim": "adamw_bnb_8bit"}
LORA = {"use_peft": True}
PACKED = {"packing": True}
CASES = [
    Case("gpt2", "0.1B", "standard", 8, 1024),
    Case("gpt2", "0.1B", "standard", 8, 1024, flags={"bf16": False}),
    Case("gpt2", "0.8B", "fast", 4, 1024, accumulation=2),
    Case("bert", "0.1B", "standard", 32, 512),
    Case("bert", "0.3B", "standard", 16, 512, accumulation=2),
    Case("bert", "0.3B", "standard", 16, 512, flags=CHECKPOINTED),
    Case("qwen2", "0.5B", "fast", 4, 2048),
    Case("qwen2", "0.5B", "standard", 4, 2048, accumulation=2, flags=EIGHT_BIT),
    Case("qwen2", "0.5B", "standard", 4, 2048, flags=LORA),
    Case("llama", "1.2B", "standard", 4, 2048, ddp=False, flags=PACKED),
    Case("llama", "1.2B", "standard", 4, 2048, flags=PACKED),
    Case("llama", "1.2B", "fast", 8, 2048),
    Case("llama", "1.2B", "fast", 4, 2048, accumulation=2),
    Case("llama", "1.2B", "fast", 4, 4096),
    Case("llama", "1.2B", "fast", 4, 4096, accumulation=2, flags=CHECKPOINTED),
    Case("llama", "1.2B", "fast", 4, 2048, flags={**LORA, **CHECKPOINTED}),
    Case("llama", "3B", "fast", 1, 2048),
    Case("llama", "3B", "fast", 2, 4096, accumulation=2, flags=CHECKPOINTED),
    Case("llama", "3B", "fast", 2, 2048, flags=EIGHT_BIT),
]


def cases(sizes: list[str]) -> list[Case]:
    """Those of the given sizes; "tiny" stands for every case at a tiny size."""
    chosen = [case for case in CASES if case.size in sizes]
    tiny = [Case(**{**vars(case), "size": "tiny", "length": TINY_LENGTH}) for case in CASES]
    return tiny * ("tiny" in sizes) + chosen


def config_of(case: Case):
    import torch
    from transformers import BertConfig, GPT2Config, LlamaConfig, Qwen2Config

    width, layers, heads, shared, mlp = SHAPES[case.size]
    own = {**FAMILIES[case.family], "use_cache": False}
    if case.size == "tiny":
        own |= {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
    if not torch.cuda.is_available():  # where attention with dropout is not fused, and keeps every weight
        own |= {
            {"gpt2": "attn_pdrop", "bert": "attention_probs_dropout_prob"}.get(case.family, "attention_dropout"): 0.0
        }
    if case.family == "gpt2":
        return GPT2Config(n_embd=width, n_layer=layers, n_head=heads, n_positions=case.length, **own)
    shape = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": mlp,
        "max_position_embeddings": case.length,
    }
    if case.family == "bert":
        return BertConfig(**shape, **own)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[case.family](**shape, num_key_value_heads=shared, **own)


# --- Predicted -------------------------------------------------------------------------------------------------------


def predicted(case: Case) -> dict[str, Any]:
    """The plan for the same model, batch and card. Raises `UserError` for what cannot be planned."""
    from recipes import plan_memory
    from recipes.errors import UserError
    from recipes.run import gpus, hardware

    machine = hardware.read()
    card: dict[str, Any] = {"gpu": "H100"}  # a CPU rehearses; the card decides nothing in fp32
    if machine.gpus:
        card = {"gpu_memory": machine.gpus[0].memory_bytes / 1e9}
        with suppress(UserError):
            card = {"gpu": gpus.find(machine.gpus[0].name).name}
    world = 2 if case.ddp else 1  # a rank's own memory is the same among two as among any number
    flags = {**own_flags(case), "task": case.task, "max_length": case.length}
    flags["global_batch_size"] = case.micro * case.accumulation * world
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value).lower())]
    (planned,) = plan_memory(config_of(case), recipe=case.recipe, num_processes=world, argv=argv, **card).recipes
    return {"components": asdict(planned.components), "total": planned.total_bytes, "traced": planned.traced}


def own_flags(case: Case) -> dict[str, Any]:
    """train.py's flags of a case, as they count on this machine."""
    import torch

    batch = {"per_device_train_batch_size": case.micro, "gradient_accumulation_steps": case.accumulation}
    on_a_cpu = {} if torch.cuda.is_available() else {"bf16": False}
    compiled = {"torch_compile": False} if case.recipe == "fast" else {}
    return {**batch, **on_a_cpu, **compiled, **case.flags}


# --- Measured --------------------------------------------------------------------------------------------------------


def measured(case: Case) -> dict[str, Any]:
    """Bytes at the fullest moment of two steps in this process."""
    import torch

    if case.ddp:
        _be_a_rank()
    if not torch.cuda.is_available():
        with cpu_allocations() as counted:
            train(case)
        return {"allocated": counted.peak}
    trainer = train(case)
    found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    free, total = torch.cuda.mem_get_info()
    found["outside_torch"] = total - free - torch.cuda.memory_reserved()  # the context, and whoever else is there
    del trainer
    return found


def train(case: Case):
    """Two optimizer steps of RecipeTrainer, set up as train.py would."""
    import transformers

    from launch.training.trainer import RecipeTrainer, apply_ddp_settings
    from recipes.factories import training_arguments
    from recipes.run import resolve

    with tempfile.TemporaryDirectory() as folder:
        world = {"global_batch_size": case.micro * case.accumulation, "max_steps": STEPS, "learning_rate": RATE}
        quiet = {"save_strategy": "no", "disable_tqdm": True, "report_to": "none", "dataloader_num_workers": 0}
        settings = {"recipe": case.recipe, "output_dir": folder, "task": case.task, "max_length": case.length}
        if case.recipe == "fast":
            quiet["dataloader_prefetch_factor"] = None
        run = resolve(settings={**settings, **world, **quiet, **own_flags(case)}, demonstrate=False)
        if run.problems:
            raise ValueError("; ".join(map(str, run.problems)))
        args = training_arguments(run, transformers.TrainingArguments)
        trainer = RecipeTrainer(model=model_of(case, run), args=args, train_dataset=rows(case, run["packing"]))
        trainer.remove_callback(transformers.PrinterCallback)
        apply_ddp_settings(trainer, run)
        trainer.train()
    return trainer


def model_of(case: Case, run):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    auto = AutoModelForCausalLM if case.task == "causal_lm" else AutoModelForSequenceClassification
    model = auto.from_config(config_of(case), dtype=torch.float32)
    return with_adapters(model, run) if run["use_peft"] else model


def with_adapters(model, run):
    """As launch.model adds them; importing that needs datasets too."""
    from peft import LoraConfig, get_peft_model

    if run["gradient_checkpointing"]:
        model.enable_input_require_grads()
    own = {"r": run["lora_r"], "lora_alpha": run["lora_alpha"], "lora_dropout": run["lora_dropout"]}
    return get_peft_model(model, LoraConfig(**own, target_modules="all-linear", task_type="CAUSAL_LM"))


def rows(case: Case, packed: bool) -> list[dict[str, Any]]:
    """Random tokens, as many as two steps take; a mask where sequences are not packed."""
    import torch

    count = case.micro * case.accumulation * STEPS
    tokens = torch.randint(0, config_of(case).vocab_size, (count, case.length), generator=torch.Generator())
    mask = {} if packed else {"attention_mask": torch.ones(case.length, dtype=torch.long)}
    labels = torch.arange(count) % 2 if case.task == "sequence_classification" else tokens
    return [{"input_ids": row, "labels": label, **mask} for row, label in zip(tokens, labels, strict=True)]


def _be_a_rank() -> None:
    """Among a world of one, which accelerate would otherwise not wrap in DDP on a GPU."""
    from accelerate import PartialState

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}}
    PartialState.use_distributed = property(lambda self: True)


@dataclass
class Counted:
    peak: int = 0


@contextmanager
def cpu_allocations() -> Iterator[Counted]:
    """The most that torch's CPU allocator had handed out at once within the block, beyond what was there before."""
    import torch

    counted = Counted()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield counted
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    counted.peak = max(accumulate(event.nbytes() for event in events), default=0)


# --- The table -------------------------------------------------------------------------------------------------------


def row_of(case: Case) -> dict[str, Any]:
    """One row: the plan made in this process, the training measured in one of its own."""
    from recipes.errors import UserError

    row = {"case": str(case), **asdict(case)}
    try:
        row["predicted"] = predicted(case)
    except UserError as error:
        row["not_planned"] = str(error.problems[0].what)
    words = [sys.executable, "-m", "tests.gpu.memory", "--case", json.dumps(asdict(case))]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode == 0:
        row["measured"] = json.loads(done.stdout.splitlines()[-1])
    else:
        row["error"] = (done.stderr.strip().splitlines() or ["no output"])[-1][:160]
    return row


def without_context(row: dict[str, Any]) -> int:
    """What is predicted of torch's own allocations."""
    return row["predicted"]["total"] - row["predicted"]["components"]["context"]


def error_of(row: dict[str, Any]) -> float:
    """How far the prediction is above what torch allocated, as a share of that."""
    return without_context(row) / row["measured"]["allocated"] - 1


def fits(row: dict[str, Any]) -> bool | None:
    """Whether a card that just passes as large enough by the plan would have held what was really taken from it."""
    from recipes.planner.plan import MARGIN

    if "reserved" not in row["measured"]:
        return None
    return row["measured"]["reserved"] + row["measured"]["outside_torch"] <= row["predicted"]["total"] * (1 + MARGIN)


def table(rows: list[dict[str, Any]]) -> str:
    """GiB of torch's own allocations: the CUDA context is in the last column only."""
    heads = ["case", "predicted", "allocated", "reserved", "error", "holds with the margin"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(row))} |" for row in rows)])


def _cells(row: dict[str, Any]) -> list[str]:
    found = row.get("measured", {})
    plan = row.get("not_planned") or _gib(without_context(row))
    taken = [_gib(found[name]) if name in found else "" for name in ("allocated", "reserved")]
    if "error" in row:
        taken[0] = row["error"]
    if "predicted" not in row or "measured" not in row:
        return [row["case"], plan, *taken, "", ""]
    holds = {True: "yes", False: "no", None: ""}[fits(row)]
    return [row["case"], plan, *taken, f"{error_of(row):+.1%}", holds]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size >= GIB / 10 else f"{size / GIB:.4f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = list(dict.fromkeys(case.size for case in CASES))
    parser.add_argument("--sizes", nargs="+", choices=["tiny", *sizes], default=sizes)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="the numbers as JSON too")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measured(Case(**options.case))))
        return 0
    from tests.gpu.speed import versions

    found = []
    for case in cases(options.sizes):
        found.append(row_of(case))
        print(_cells(found[-1]), file=sys.stderr, flush=True)
        if options.output:  # after each, so that an interrupted call keeps what it has
            options.output.write_text(json.dumps({"machine": versions(), "rows": found}, indent=2))
    print(versions())
    if not any("reserved" in row.get("measured", {}) for row in found):
        print("rehearsed without a GPU, in fp32: allocated is what torch's CPU allocator handed out")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
