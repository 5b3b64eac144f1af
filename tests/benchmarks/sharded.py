"""Planned against live bytes of FSDP2: small models on two ranks, torch's real fully_shard, gloo.

    python -m tests.benchmarks.sharded

accelerate's own function wraps the model, as it does on GPUs. After every operation of two steps
each rank adds up the bytes of the tensors that are alive. The short cases hold little but
parameters, gradients, optimizer state and what is gathered; the long ones mostly activations.
"""

import contextlib
import json
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from launch.host.world import leave_group
from launch.training.model import auto_class, with_adapters
from recipes.planner.fits import Estimator
from recipes.quiet import silence
from recipes.rules.facts import gradient_accumulation_kwargs
from recipes.run import here, resolve
from recipes.run.hardware import Hardware

WORLD = 2
_WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_hidden_layers": 8}
_ONCE = '--accelerator_config {"split_batches":false}'
_LORA = "--use_peft true --lora_dropout 0 --lora_r 8"
# The model's changes, tokens per sequence, and the flags that change the recipe.
CASES: dict[str, tuple[dict, int, str]] = {
    "short": ({"vocab_size": 2000}, 8, ""),
    "short, a large vocabulary": ({"vocab_size": 32000}, 8, ""),
    "short, tied embeddings": ({"vocab_size": 32000, "tie_word_embeddings": True}, 8, ""),
    "short, fp32": ({"vocab_size": 2000}, 8, "--bf16 false"),
    "short, accumulation 2": ({"vocab_size": 2000}, 8, "--gradient_accumulation_steps 2"),
    "short, accumulation 2, scattered once": ({"vocab_size": 2000}, 8, f"--gradient_accumulation_steps 2 {_ONCE}"),
    "short, LoRA": ({"vocab_size": 2000}, 8, _LORA),
    "short, LoRA on 16-bit weights": ({"vocab_size": 2000}, 8, f"{_LORA} --dtype bfloat16"),
    "long": ({"vocab_size": 2000}, 512, ""),
    "long, a large vocabulary": ({"vocab_size": 32000}, 512, ""),
    "long, checkpointing": ({"vocab_size": 2000}, 512, "--gradient_checkpointing true"),
    "long, LoRA": ({"vocab_size": 2000}, 512, _LORA),
}
MICRO = 2


def case_of(name: str):
    """The model's configuration and the run of a case."""
    changes, length, flags = CASES[name]
    flags += f" --recipe sharded --optim adamw_torch_fused --max_length {length} --per_device_train_batch_size {MICRO}"
    for flag, value in {"--bf16": "true", "--gradient_accumulation_steps": "1"}.items():
        flags += "" if flag in flags else f" {flag} {value}"
    place = here(WORLD, "sharded", hardware=Hardware(cores=2), environment={}, trained_by="nobody")
    return LlamaConfig(**_WIDE, **changes), resolve(flags.split(), place)


def _measure(rank: int, folder: str) -> None:
    """One rank. Rank 0 writes the peak of each case into live.json."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    with silence():
        found = {case: _two_steps(case) for case in CASES}
    if rank == 0:
        Path(folder, "live.json").write_text(json.dumps(found))
    leave_group()


def _two_steps(case: str) -> int:
    """The most bytes that were alive on this rank."""
    config, run = case_of(case)
    config.use_cache = False
    torch.manual_seed(0)
    model = auto_class(run).from_config(config, dtype=getattr(torch, run["dtype"]))
    if run["use_peft"]:
        model = with_adapters(run, model)
    if run["gradient_checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model = _wrapped(run, model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    rows = torch.randint(0, 1000, (MICRO, run["max_length"]))
    accumulation = run["gradient_accumulation_steps"]
    each = bool(gradient_accumulation_kwargs(run).get("sync_each_batch"))
    with _live_bytes([*model.parameters(), *model.buffers()]) as live:
        for _ in range(2):
            for micro in range(accumulation):
                model.set_requires_gradient_sync(each or micro == accumulation - 1)  # as Accelerator.no_sync does
                model(input_ids=rows, labels=rows, attention_mask=torch.ones_like(rows)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.peak


def _wrapped(run, model):
    """As `Accelerator.prepare` does it for FSDP2 on a GPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap"
    )
    precision = "bf16" if run["bf16"] else "no"
    if run["bf16"]:
        plugin.set_mixed_precision("bf16")
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator = SimpleNamespace(state=state, mixed_precision=precision, is_main_process=False, device="cpu")
    return fsdp2_prepare_model(accelerator, model)


@contextlib.contextmanager
def _live_bytes(tensors):
    """Adds up the bytes of all storages after each operation: fully_shard empties some."""
    storages: dict[int, weakref.ref] = {}

    class Live(TorchDispatchMode):
        peak = 0

        def add(self, tensor) -> None:
            storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
            key = storage._cdata
            storages.setdefault(key, weakref.ref(storage, lambda _: storages.pop(key, None)))

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.add(tensor)
            alive = [storage for ref in list(storages.values()) if (storage := ref()) is not None]
            self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
            return out

    live = Live()
    for tensor in tensors:
        live.add(tensor)
    with live:
        yield live


def main() -> None:
    """Prints the bytes of each case, planned and real, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure, (folder,), nprocs=WORLD)
        live = json.loads(Path(folder, "live.json").read_text())
    runs = {case: case_of(case) for case in live}
    planned = {case: Estimator(config).memory(run, MICRO).gpu.total for case, (config, run) in runs.items()}
    print(json.dumps({case: (planned[case], real) for case, real in live.items()}))


if __name__ == "__main__":
    main()
