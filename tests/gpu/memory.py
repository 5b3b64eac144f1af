"""Memory that `plan_memory` predicts against what torch allocates and reserves on one GPU.

Every case trains two optimizer steps with RecipeTrainer: in the second, activations and optimizer
state are in memory together. Models are initialised from a configuration, tokens are random. The
model is wrapped in DDP as on one rank of several.

On a CPU a case trains in fp32, and "allocated" is what torch's CPU allocator counted: this tests
the script, not the plan for a GPU.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

from launch.host import memory
from launch.host.processes import free_port

Figures = dict[str, Any]

STEPS, RATE, GIB = 2, 1e-4, 2**30
FAMILIES = {
    "gpt2": {"vocab_size": 50_257},
    "llama": {"vocab_size": 32_000},
    "qwen2": {"vocab_size": 151_936, "tie_word_embeddings": True},
    "bert": {"vocab_size": 30_522},
    "qwen3_moe": {"vocab_size": 151_936, "num_experts": 8, "num_experts_per_tok": 2},
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
    """One training. `flags` are more flags of train.py. Only rows that are `padded` get a mask."""

    family: str
    size: str
    recipe: str
    micro: int
    length: int
    accumulation: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    padded: bool = False

    @property
    def task(self) -> str:
        return "sequence_classification" if self.family == "bert" else "causal_lm"

    def __str__(self) -> str:
        flags = [name if value is True else f"{name} {value}" for name, value in self.flags.items()]
        batch = f"{self.micro}x{self.accumulation} of {self.length}{' padded' * self.padded}"
        return ", ".join([f"{self.family} {self.size}", self.recipe, batch, *flags])


CHECKPOINTED = {"gradient_checkpointing": True}
EIGHT_BIT = {"optim": "adamw_bnb_8bit"}
LORA = {"use_peft": True, "dtype": "float32"}
COMPILED = {"torch_compile": True, "use_regional_compilation": True, "attn_implementation": "sdpa"}
CASES = [
    Case("llama", "1.2B", "standard", 4, 2048, padded=True),
    Case("qwen2", "0.5B", "standard", 4, 2048, padded=True),
    Case("llama", "1.2B", "fast", 4, 2048, accumulation=2, flags=COMPILED),
    Case("llama", "1.2B", "fast", 4, 2048, flags={**COMPILED, **LORA}),
    Case("gpt2", "0.1B", "standard", 8, 1024),
    Case("gpt2", "0.1B", "standard", 8, 1024, flags={"bf16": False}),
    Case("gpt2", "0.8B", "fast", 4, 1024, accumulation=2),
    Case("bert", "0.1B", "standard", 32, 512),
    Case("bert", "0.3B", "standard", 16, 512, accumulation=2),
    Case("bert", "0.3B", "standard", 16, 512, flags=CHECKPOINTED),
    Case("qwen2", "0.5B", "fast", 4, 2048),
    Case("qwen2", "0.5B", "standard", 4, 2048, accumulation=2, flags=EIGHT_BIT),
    Case("qwen2", "0.5B", "standard", 4, 2048, flags=LORA),
    Case("qwen3_moe", "0.1B", "standard", 4, 1024),
    Case("llama", "1.2B", "standard", 4, 2048, flags={"packing": True}),
    Case("llama", "1.2B", "fast", 8, 2048),
    Case("llama", "1.2B", "fast", 4, 2048, accumulation=2),
    Case("llama", "1.2B", "fast", 4, 4096),
    Case("llama", "1.2B", "fast", 4, 4096, accumulation=2, flags=CHECKPOINTED),
    Case("llama", "1.2B", "fast", 4, 2048, flags={**LORA, **CHECKPOINTED}),
    Case("llama", "1.2B", "fast", 4, 2048, flags={**LORA, **CHECKPOINTED, "use_dora": True}),
    Case("llama", "1.2B", "fast", 4, 2048, flags={**CHECKPOINTED, "use_peft": True}),
    Case("llama", "3B", "fast", 1, 2048),
    Case("llama", "3B", "fast", 2, 4096, accumulation=2, flags=CHECKPOINTED),
    Case("llama", "3B", "fast", 2, 2048, flags=EIGHT_BIT),
    Case("llama", "1.2B", "fast", 4, 2048, flags={"use_liger_kernel": False}),
    Case("llama", "1.2B", "sharded", 4, 2048),
    Case("qwen2", "0.5B", "fast", 4, 2048, flags={"attn_implementation": "flex_attention"}),
    Case("llama", "3B", "standard", 4, 2048, flags={**CHECKPOINTED, "use_peft": True, "load_in_4bit": True}),
    Case("qwen2", "0.5B", "standard", 2, 2048, flags={"eval_strategy": "steps", "per_device_eval_batch_size": 4}),
]
FRAGMENTED = {"expandable_segments": False}


def cases(rehearse: bool) -> list[Case]:
    """All of them, and again without expandable segments; for a rehearsal the first 25, tiny."""
    if rehearse:
        return [replace(case, size="tiny", length=64) for case in CASES[:25]]
    return [*CASES, *(replace(case, flags={**case.flags, **FRAGMENTED}) for case in CASES)]


def config_of(case: Case, card: str | None = None):
    import torch
    from transformers import AutoConfig

    width, layers, heads, shared, mlp = SHAPES[case.size]
    own = {**FAMILIES[case.family], "use_cache": False}
    if case.size == "tiny":
        own |= {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
    if not (card or torch.cuda.is_available()):  # attention with dropout is not fused there, and keeps all its weights
        dropout = {"gpt2": "attn_pdrop", "bert": "attention_probs_dropout_prob"}
        own[dropout.get(case.family, "attention_dropout")] = 0.0
    if case.family == "gpt2":
        return AutoConfig.for_model("gpt2", n_embd=width, n_layer=layers, n_head=heads, n_positions=case.length, **own)
    own |= {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": mlp}
    own |= {} if case.family == "bert" else {"num_key_value_heads": shared, "moe_intermediate_size": mlp // 4}
    return AutoConfig.for_model(case.family, max_position_embeddings=case.length, **own)


def flags_of(case: Case, card: str | None = None) -> dict[str, Any]:
    """The flags of train.py for a case on this machine, but for the global batch."""
    import torch

    flags = {"per_device_train_batch_size": case.micro, "gradient_accumulation_steps": case.accumulation}
    flags |= {"task": case.task, "max_length": case.length}
    flags |= {} if card or torch.cuda.is_available() else {"bf16": False}
    flags |= {"torch_compile": False} if case.recipe == "fast" else {}
    return {**flags, **case.flags}


def measure(case: Case, work: Path) -> Figures:
    """What a case takes in this process, which can measure only one."""
    return {f"{name} GiB": size / GIB for name, size in measured(case).items()}


def predicted(case: Case, card: str | None = None) -> Figures:
    """What the plan expects for the same model, batch and GPU: all of it, what torch allocates, and
    the CUDA context. Without a GPU, that is on a CPU, cuBLAS has no workspaces.
    """
    from recipes import plan_memory
    from recipes.planner.allocator import workspace_bytes
    from recipes.planner.fits import Estimator

    workspaces = 0 if card else 2 * workspace_bytes((9, 0))
    # The memory of a rank of DDP is the same in any world of more than one.
    world = 1 if case.recipe == "sharded" else 2
    flags = {**flags_of(case, card), "global_batch_size": case.micro * case.accumulation * world}
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value).lower())]
    config = config_of(case, card)
    with patch.object(Estimator, "case", lambda *run, of=Estimator.case: replace(of(*run), mask=case.padded)):
        (plan,) = plan_memory(config, recipe=case.recipe, num_processes=world, argv=argv, gpu=card or "H100").recipes
    parts = plan.components
    allocated = plan.total_bytes - parts.context - parts.cached - workspaces
    planned = {"planned": allocated, "planned process": plan.total_bytes, "planned context": parts.context}
    return {f"{name} GiB": size / GIB for name, size in planned.items()}


def compared(planned: Figures, found: Figures) -> Figures:
    """The plan beside what was measured. A training `holds` on a GPU that is just large enough by
    the plan.
    """
    from recipes.planner.fits import MARGIN

    figures = {"planned GiB": planned["planned GiB"], **found}
    figures["difference"] = planned["planned GiB"] / found["allocated GiB"] - 1
    if "process GiB" in found:
        figures["planned process GiB"] = planned["planned process GiB"]
        figures["of process"] = planned["planned process GiB"] / found["process GiB"] - 1
        figures["holds"] = found["process GiB"] <= planned["planned process GiB"] * (1 + MARGIN)
    return figures


# --- Measured ------------------------------------------------------------------------------------


def measured(case: Case) -> dict[str, int]:
    """Peak bytes of two steps in this process; on a GPU also those outside of torch: the CUDA
    context with its kernels.
    """
    # torch reads this when CUDA starts, which bitsandbytes does as soon as peft imports it.
    os.environ["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{case.flags.get('expandable_segments', True)}"
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"]
    import torch

    _be_a_rank()
    if not torch.cuda.is_available():
        # gloo may free DDP's first copy of the weights, in a thread that the profiler does not see.
        with patch("torch.nn.parallel.distributed._sync_module_states"), cpu_allocations() as counted:
            train(case)
        return counted
    train(case)
    return peaks()


def peaks() -> dict[str, int]:
    """Peak bytes of this process: in torch's allocator, in the CUDA context, and both together."""
    import torch

    if not torch.cuda.is_available():
        return {"allocated": memory.peak(cuda=False)}
    found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    if held := process_bytes():
        found["context"] = held - torch.cuda.memory_reserved()
        found["process"] = found["reserved"] + found["context"]
    return found


def process_bytes() -> int:
    """Bytes that the driver counts for this process on the first GPU; 0 if it does not tell."""
    import pynvml

    pynvml.nvmlInit()
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    return sum(one.usedGpuMemory or 0 for one in running if one.pid == os.getpid())


def train(case: Case) -> None:
    """Two optimizer steps of RecipeTrainer, set up as train.py would."""
    import torch
    import transformers

    from launch.host.world import prepare_process
    from launch.training.model import _in_4_bits, with_adapters
    from launch.training.trainer import RecipeTrainer
    from recipes.rules.probe import arguments_for
    from recipes.run import here, resolve

    with tempfile.TemporaryDirectory() as folder:
        settings = {"recipe": case.recipe, "output_dir": folder, "max_steps": STEPS, "learning_rate": RATE}
        settings |= {"save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
        settings |= {"dataloader_num_workers": 0, "dataloader_prefetch_factor": None}
        settings |= {"global_batch_size": case.micro * case.accumulation, **flags_of(case)}
        run = resolve(place=here(trained_by="nobody"), settings=settings)
        if run.problems:
            raise ValueError("; ".join(map(str, run.problems)))
        prepare_process(run)
        args = arguments_for(run, transformers.TrainingArguments)
        torch.manual_seed(0)
        causal, classifier = transformers.AutoModelForCausalLM, transformers.AutoModelForSequenceClassification
        auto = causal if case.task == "causal_lm" else classifier
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # random numbers are slow on a CPU
            model = auto.from_config(config_of(case), dtype=getattr(torch, run["dtype"]))
        if run["load_in_4bit"]:
            model.save_pretrained(folder)
            how = {"quantization_config": _in_4_bits(run), "dtype": model.dtype, "device_map": "auto"}
            model = auto.from_pretrained(folder, **how)
        else:
            model.cpu()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model = with_adapters(run, model) if run["use_peft"] else model
        data = rows(case, run["packing"])
        trainer = RecipeTrainer(model=model, args=args, train_dataset=data, eval_dataset=data, run=run)
        trainer.train()


def rows(case: Case, packed: bool) -> list[dict[str, Any]]:
    """Random tokens for two steps, with an attention mask unless sequences are packed."""
    import torch

    count = case.micro * case.accumulation * STEPS
    tokens = torch.randint(0, config_of(case).vocab_size, (count, case.length), generator=torch.Generator())
    mask = {} if packed else {"attention_mask": (torch.arange(case.length) < case.length - case.padded).long()}
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
