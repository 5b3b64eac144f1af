"""What a run keeps in memory: parameters, gradients, optimizer state and activations, on a GPU and in host RAM.

Pure arithmetic on what `recipes.trace` found, in bytes. Where a constant or a formula comes from stands with it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from recipes.run import RunSpec

if TYPE_CHECKING:
    from recipes.trace import Traced

FP32, HALF = 4, 2

# DeepSpeed's own defaults, in elements: deepspeed/runtime/zero/config.py. Neither accelerate nor Trainer changes them.
REDUCE_BUCKET = int(5e8)
MAX_LIVE_PARAMETERS = int(1e9)

# Hugging Face's guide "Methods and tools for efficient training on a single GPU" finds 1343 MiB in use on a V100 once
# the kernels are loaded. Newer cards and drivers take less.
CUDA_CONTEXT_BYTES = 1343 << 20

# Bytes of optimizer state for each trained parameter in fp32, by how the name of `optim` starts: two moments, unless
# said otherwise. The 8-bit ones keep a byte a moment and an fp32 scale a block of 256 (bitsandbytes, blockwise).
_OPTIMIZER_BYTES = {
    "adamw_bnb_8bit": 2 + 2 * 4 / 256, "adamw_8bit": 2 + 2 * 4 / 256, "paged_adamw_8bit": 2 + 2 * 4 / 256,
    "lion_8bit": 1 + 4 / 256, "paged_lion_8bit": 1 + 4 / 256, "lion": 4, "paged_lion": 4, "sgd": 0, "adafactor": 0.01,
}  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """Parameters of a model: all, those of its embeddings, and those of its largest layer; and bytes of its buffers."""

    total: int
    embedding: int = 0
    largest_layer: int = 0
    buffer_bytes: int = 0


@dataclass(frozen=True)
class Components:
    """Bytes on one GPU at the fullest moment of a step."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Need:
    """What a run needs: on each GPU, by component, and in the RAM of each node."""

    gpu: Components
    host_bytes_per_node: int


def need(run: RunSpec, weights: Weights, traced: Traced, accumulation: int, context: int = CUDA_CONTEXT_BYTES) -> Need:
    """What `run` keeps in memory when each of its `accumulation` micro-batches keeps what `traced` says."""
    states = Components(
        parameters=_parameter_bytes(run, weights),
        optimizer=_optimizer_bytes(run, weights),
        buffers=weights.buffer_bytes + _communication_bytes(run, weights),
        context=context if run.hardware.cuda else 0,
    )
    whole = _gradient_bytes(run, weights)
    # DeepSpeed takes each gradient away into a bucket at once; bucket views and accumulated gradients are always there.
    viewed = run["gradient_as_bucket_view"] and run.world_size > 1
    stays = run.engine.kind == "deepspeed" or viewed or accumulation > 1
    # else gradients appear one by one while activations go
    moments = ((alive, words, whole if stays else made) for alive, words, made in traced.moments)
    activations, logits, gradients = max(moments, key=sum)
    # Views hold what was reduced: until the last micro-batch is, accumulated gradients lie beside DDP's buckets.
    beside = whole if viewed and accumulation > 1 else 0
    full = {"activations": activations, "logits": logits, "gradients": gradients, "buffers": states.buffers + beside}
    in_a_micro_batch = replace(states, **full)
    in_the_update = replace(states, gradients=whole, optimizer=states.optimizer + _step_bytes(run, weights))
    fullest = max(in_a_micro_batch, in_the_update, key=lambda moment: moment.total)
    return Need(fullest, _host_bytes(run, weights))


# --- On the GPU ------------------------------------------------------------------------------------------------------


def weight_bytes(run: RunSpec) -> int:
    """Bytes of a parameter as the GPU computes with it: DeepSpeed casts the model to 16 bits, autocast does not."""
    if run.engine.kind == "deepspeed" and (run["bf16"] or run["fp16"]):
        return HALF
    return FP32 if run["dtype"] == "float32" else HALF


def _parameter_bytes(run: RunSpec, weights: Weights) -> int:
    if run.engine.zero_stage < 3:
        return weights.total * weight_bytes(run)
    gathered = min(weights.total, MAX_LIVE_PARAMETERS)  # what ZeRO-3 has fetched and not yet let go
    own = 0 if run.engine.offload_param != "none" else weights.total // run.world_size
    return (gathered + own) * weight_bytes(run)


def _gradient_bytes(run: RunSpec, weights: Weights) -> int:
    """Gradients that stay from one micro-batch to the next."""
    if run.engine.kind != "deepspeed":
        return weights.total * weight_bytes(run)
    if run.engine.offload_optimizer != "none":  # they go to the host
        return 0
    shards = run.world_size if run.engine.zero_stage >= 2 else 1
    return weights.total * FP32 // shards


def _optimizer_bytes(run: RunSpec, weights: Weights) -> int:
    if run.engine.offload_optimizer != "none":
        return 0
    names = sorted((name for name in _OPTIMIZER_BYTES if run["optim"].startswith(name)), key=len)
    moments = _OPTIMIZER_BYTES[names[-1]] if names else 2 * FP32
    if run.engine.kind == "deepspeed":  # and the fp32 parameters that the 16-bit ones are copied from
        return round(weights.total * (FP32 + moments) / (run.world_size if run.engine.zero_stage else 1))
    if moments in (2 * FP32, FP32):
        return round(weights.total * moments * weight_bytes(run) / FP32)  # moments have their parameter's dtype
    in_fp32 = weights.embedding  # Trainer keeps embeddings' moments in 32 bits
    return round((weights.total - in_fp32) * moments + in_fp32 * 2 * FP32)


def _step_bytes(run: RunSpec, weights: Weights) -> int:
    """What the update itself takes for a moment: torch's foreach AdamW makes one temporary for each parameter."""
    foreach = run["optim"] == "adamw_torch" and run.engine.kind != "deepspeed"
    return weights.total * weight_bytes(run) if foreach else 0


def _communication_bytes(run: RunSpec, weights: Weights) -> int:
    if run.engine.kind == "deepspeed":
        return REDUCE_BUCKET * weight_bytes(run)
    if run.engine.kind == "single" or run.world_size == 1 or run["gradient_as_bucket_view"]:
        return 0
    return weights.total * weight_bytes(run)  # DDP's buckets beside the gradients


# --- In host RAM -----------------------------------------------------------------------------------------------------


def _host_bytes(run: RunSpec, weights: Weights) -> int:
    """The RAM of a node for its processes: each loads the whole model first; offloaded shares stay.

    An offloaded parameter takes 18 bytes: fp32 copy, gradient and two moments, and 16 bits to copy it back from
    (deepspeed/runtime/zero/stage_1_and_2.py).
    """
    loading = weights.total * FP32 * run.local_world_size
    share = run.local_world_size / run.world_size
    states = 18 * weights.total * share if run.engine.offload_optimizer != "none" else 0
    parameters = HALF * weights.total * share if run.engine.offload_param != "none" else 0
    return round(max(loading, states + parameters))
