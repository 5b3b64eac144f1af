"""Memory that `plan_memory` predicts against what torch allocates and reserves on one GPU.

Every case trains two optimizer steps with RecipeTrainer: in the second, activations and optimizer
state are in memory together. Models are initialised from a configuration, tokens are random,
nothing is compiled. The model is wrapped in DDP as on one rank of several, unless the case says
"alone".

On a CPU a case trains in fp32, and "allocated" is what torch's CPU allocator counted: this tests
the script, not the plan for a GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from launch.doctor.machine import smi_rows
from launch.host.processes import free_port

Figures = dict[str, Any]

STEPS, RATE, GIB = 2, 1e-4, 2**30
FAMILIES = {
    "gpt2": {"vocab_size": 50_257},
    "llama": {"vocab_size": 32_000},
    "qwen2": {"vocab_size": 151_936, "tie_word_embeddings": True},
    "bert": {"vocab_size": 30_522},
    "qwen3-moe": {"vocab_size": 151_936, "num_experts": 8, "num_experts_per_tok": 2},
}
# Width, layers, heads, heads of keys and values, and width of the MLP.
SHAPES = {
    "tiny": (64, 2, 2, 2, 128),
    "0.1B": (768, 12, 12, 12, 3072),
    "0.3B": (1024, 24, 16, 16, 4096),
    "0.5B": (896, 24, 14, 2, 4864),
    "0.8B": (1280, 36, 20, 20, 5120),
    "1.2B": (2048, 20, 16, 16, 5632),
    "3B": (2560, 32, 20, 20, 6912),
}


@dataclass(frozen=True)
class Case:
    """One training. `flags` are more flags of train.py; without `ddp` the model is not wrapped."""

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
    Case("qwen3-moe", "0.1B", "standard", 4, 1024),
    Case("llama", "1.2B", "standard", 4, 2048, ddp=False, flags=PACKED),
    Case("llama", "1.2B", "standard", 4, 2048, flags=PACKED),
    Case("llama", "1.2B", "fast", 8, 2048),
    Case("llama", "1.2B", "fast", 4, 2048, accumulation=2),
    Case("llama", "1.2B", "fast", 4, 4096),
    Case("llama", "1.2B", "fast", 4, 4096, accumulation=2, flags=CHECKPOINTED),
    Case("llama", "1.2B", "fast", 4, 2048, flags={**LORA, **CHECKPOINTED}),
    Case("llama", "1.2B", "fast", 4, 2048, flags={**LORA, **CHECKPOINTED, "use_dora": True}),
    Case("llama", "3B", "fast", 1, 2048),
    Case("llama", "3B", "fast", 2, 4096, accumulation=2, flags=CHECKPOINTED),
    Case("llama", "3B", "fast", 2, 2048, flags=EIGHT_BIT),
]


def cases(rehearse: bool) -> list[Case]:
    """All of them; for a rehearsal on a CPU at a tiny size."""
    return [replace(case, size="tiny", length=64) for case in CASES] if rehearse else CASES


def config_of(case: Case):
    import torch
    from transformers import BertConfig, GPT2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

    width, layers, heads, shared, mlp = SHAPES[case.size]
    own = {**FAMILIES[case.family], "use_cache": False}
    if case.size == "tiny":
        own |= {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
    if not torch.cuda.is_available():  # attention with dropout is not fused there, and keeps all its weights
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
    shape["num_key_value_heads"] = shared
    if case.family == "qwen3-moe":
        return Qwen3MoeConfig(**shape, moe_intermediate_size=mlp // 4, **own)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[case.family](**shape, **own)


# --- Predicted -----------------------------------------------------------------------------------


def predicted(case: Case) -> dict[str, Any]:
    """The plan for the same model, batch and GPU. Raises `UserError` if it cannot be planned."""
    from recipes import plan_memory
    from recipes.errors import UserError
    from recipes.run import hardware, known_gpus

    machine = hardware.read()
    card: dict[str, Any] = {"gpu": "H100"}  # for a rehearsal: in fp32 the plan does not depend on the GPU
    if machine.gpus:
        card = {"gpu_memory": machine.gpus[0].memory_bytes / 1e9}
        with suppress(UserError):
            card = {"gpu": known_gpus.find(machine.gpus[0].name).name}
    world = 2 if case.ddp else 1  # the memory of a rank is the same with any larger number
    flags = {**own_flags(case), "task": case.task, "max_length": case.length}
    flags["global_batch_size"] = case.micro * case.accumulation * world
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value).lower())]
    (planned,) = plan_memory(config_of(case), recipe=case.recipe, num_processes=world, argv=argv, **card).recipes
    return {"components": asdict(planned.components), "total": planned.total_bytes}


def own_flags(case: Case) -> dict[str, Any]:
    """The flags of train.py for a case on this machine."""
    import torch

    batch = {"per_device_train_batch_size": case.micro, "gradient_accumulation_steps": case.accumulation}
    on_a_cpu = {} if torch.cuda.is_available() else {"bf16": False}
    compiled = {"torch_compile": False} if case.recipe == "fast" else {}
    return {**batch, **on_a_cpu, **compiled, **case.flags}


# --- Measured ------------------------------------------------------------------------------------


def outside_torch() -> int | None:
    """Bytes of its GPU that are taken beside what torch has reserved in this process; None if
    nvidia-smi names another process there.
    """
    import torch

    device = torch.cuda.current_device()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    if sum(uuid in row for row in smi_rows("--query-compute-apps=gpu_uuid,pid")) > 1:
        return None
    free, total = torch.cuda.mem_get_info(device)
    size = total - free - torch.cuda.memory_reserved(device)
    return size if size > 0 else None


def measured(case: Case) -> dict[str, Any]:
    """Peak bytes of two steps in this process."""
    import torch

    if case.ddp:
        _be_a_rank()
    if not torch.cuda.is_available():
        with cpu_allocations() as counted:
            train(case)
        return counted
    trainer = train(case)
    found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    free, total = torch.cuda.mem_get_info()
    found["outside_torch"] = total - free - torch.cuda.memory_reserved()  # the CUDA context, and other processes
    found["context"] = outside_torch()  # None if other processes use the GPU
    del trainer
    return found


def train(case: Case):
    """Two optimizer steps of RecipeTrainer, set up as train.py would."""
    import transformers

    from launch.training.trainer import RecipeTrainer
    from recipes.factories import arguments_for
    from recipes.run import here, resolve

    with tempfile.TemporaryDirectory() as folder:
        world = {"global_batch_size": case.micro * case.accumulation, "max_steps": STEPS, "learning_rate": RATE}
        quiet = {"save_strategy": "no", "disable_tqdm": True, "report_to": "none", "dataloader_num_workers": 0}
        settings = {"recipe": case.recipe, "output_dir": folder, "task": case.task, "max_length": case.length}
        if case.recipe == "fast":
            quiet["dataloader_prefetch_factor"] = None
        run = resolve(place=here(trained_by="nobody"), settings={**settings, **world, **quiet, **own_flags(case)})
        if run.problems:
            raise ValueError("; ".join(map(str, run.problems)))
        args = arguments_for(run, transformers.TrainingArguments)
        data = rows(case, run["packing"])
        trainer = RecipeTrainer(model=model_of(case, run), args=args, train_dataset=data, run=run)
        trainer.train()
    return trainer


def model_of(case: Case, run):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from launch.training.model import with_adapters

    torch.manual_seed(0)
    auto = AutoModelForCausalLM if case.task == "causal_lm" else AutoModelForSequenceClassification
    model = auto.from_config(config_of(case), dtype=torch.float32)
    return with_adapters(run, model) if run["use_peft"] else model


def rows(case: Case, packed: bool) -> list[dict[str, Any]]:
    """Random tokens for two steps, with an attention mask unless sequences are packed."""
    import torch

    count = case.micro * case.accumulation * STEPS
    tokens = torch.randint(0, config_of(case).vocab_size, (count, case.length), generator=torch.Generator())
    mask = {} if packed else {"attention_mask": torch.ones(case.length, dtype=torch.long)}
    labels = torch.arange(count) % 2 if case.task == "sequence_classification" else tokens
    return [{"input_ids": row, "labels": label, **mask} for row, label in zip(tokens, labels, strict=True)]


def _be_a_rank() -> None:
    """Join a world of one process, and have accelerate wrap the model in DDP all the same."""
    from accelerate import PartialState

    world = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in world.items()}}
    PartialState.use_distributed = property(lambda self: True)


@contextmanager
def cpu_allocations() -> Iterator[dict[str, int]]:
    """Peak bytes of torch's CPU allocator within the block, above what it held before."""
    import torch

    counted: dict[str, int] = {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield counted
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    counted["allocated"] = max(accumulate(event.nbytes() for event in events), default=0)


# --- Planned beside measured ---------------------------------------------------------------------


def measure(case: Case, work: Path, rehearse: bool) -> Figures:
    """Plan and peak of a case in this process, which can measure only one."""
    from recipes.errors import UserError

    try:
        plan = predicted(case)
    except UserError as error:
        plan = {"not_planned": str(error.problems[0].what)}
    return compared({**plan, **measured(case)})


def compared(found: Figures) -> Figures:
    """The figures, in GiB too, with what the plan is above them and whether they hold its promise.

    `planned` is what torch should allocate, without the CUDA context: on a CPU without cuBLAS's two
    workspaces. A training `holds` on a GPU that is just large enough by the plan.
    """
    from recipes.planner.allocator import workspace_bytes
    from recipes.planner.fits import MARGIN

    on_gpu = "reserved" in found
    found |= {f"{name}_gib": found[name] / GIB for name in ("allocated", "reserved") if name in found}
    if "not_planned" in found:
        return found
    workspaces = 0 if on_gpu else 2 * workspace_bytes((9, 0))  # of the H100 that stands in
    planned = found["total"] - found["components"]["context"] - found["components"]["cached"] - workspaces
    found |= {"planned": planned, "planned_gib": planned / GIB, "difference": planned / found["allocated"] - 1}
    if on_gpu:
        found["holds"] = found["reserved"] + found["outside_torch"] <= found["total"] * (1 + MARGIN)
    return found
