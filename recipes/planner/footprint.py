"""What a run keeps in memory: parameters, gradients, optimizer state and activations, on a GPU and in host RAM.

Pure arithmetic on what `recipes.trace` found, in bytes. Where a constant or a formula comes from stands with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from recipes.planner.shapes import Traced, Weights
from recipes.run import RunSpec

FP32, HALF = 4, 2

# DeepSpeed's own defaults, in elements: deepspeed/runtime/zero/config.py. Neither accelerate nor Trainer changes them.
REDUCE_BUCKET = int(5e8)
MAX_LIVE_PARAMETERS = int(1e9)

# Hugging Face's guide "Methods and tools for efficient training on a single GPU" finds 1343 MiB in use on a V100 once
# the kernels are loaded. Newer cards and drivers take less.
CUDA_CONTEXT_BYTES = 1343 << 20

# Numbers that an optimizer keeps for each trained parameter, by how the name of `optim` starts, less "paged_"; two
# where it is not here, as Adam does. Adafactor keeps a row and a column of each matrix, hardly anything.
_MOMENTS = {"sgd": 0, "lomo": 0, "adalomo": 0, "adafactor": 0.01, "lion": 1, "adagrad": 1, "rmsprop": 1, "ademamix": 3}
_IN_8_BITS = 1 + FP32 / 256  # a byte, and an fp32 scale a block of 256: bitsandbytes, blockwise, and torchao
_IN_4_BITS = 0.5 + FP32 / 128  # torchao/optim/adam.py: blocks of 128


# Bytes of a parameter in 4 bits: half a byte, and an fp32 scale a block of 64, which nested quantisation keeps in 8
# bits, with an fp32 scale a block of 256 of them. bitsandbytes/functional.py, quantize_4bit.
_NF4, _NF4_NESTED = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)


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
    """Bytes of a parameter as the GPU computes with it: DeepSpeed and FSDP2 cast it to 16 bits, autocast does not."""
    if run.engine.kind in ("deepspeed", "fsdp") and (run["bf16"] or run["fp16"]):
        return HALF
    return FP32 if run["dtype"] == "float32" else HALF


def _stored_bytes(run: RunSpec, weights: Weights) -> float:
    """The whole model, in the types it is kept in between steps."""
    if run.engine.kind == "fsdp":  # accelerate shards fp32 parameters, and gathers them in 16 bits
        return weights.total * FP32
    packed = weights.in_4_bits * (_NF4_NESTED if run["use_bnb_nested_quant"] else _NF4)
    trained = weights.trained * _trained_bytes(run)
    width = FP32 if weights.in_4_bits and run.engine.kind != "deepspeed" else weight_bytes(run)  # peft casts the rest
    return packed + trained + (weights.total - weights.in_4_bits - weights.trained) * width


def _trained_bytes(run: RunSpec) -> int:
    """Bytes of a trained parameter and of its gradient; adapters are fp32 in any case, except in DeepSpeed."""
    if run.engine.kind == "fsdp" or (run["use_peft"] and run.engine.kind != "deepspeed"):
        return FP32
    return weight_bytes(run)


def _shard(size: float, run: RunSpec, from_stage: int) -> int:
    """One GPU's share of a state that ZeRO spreads from this stage on, and FSDP2 in any case. The last is padded."""
    sharded = run.engine.kind == "fsdp" or (run.engine.kind == "deepspeed" and run.engine.zero_stage >= from_stage)
    return math.ceil(size / run.world_size) if sharded else math.ceil(size)


def _parameter_bytes(run: RunSpec, weights: Weights) -> int:
    stored = _shard(_stored_bytes(run, weights), run, 3)
    if run.engine.kind == "fsdp":  # beside the shards: what is in no layer, the running layer and the one fetched ahead
        gathered = min(weights.total, weights.outside_layers + 2 * weights.largest_layer)
        return stored + gathered * weight_bytes(run)
    if run.engine.zero_stage < 3:
        return stored
    # What ZeRO-3 has fetched and not yet let go: a layer of experts is fetched whole, however large.
    gathered = min(weights.total, max(MAX_LIVE_PARAMETERS, weights.largest_layer))
    own = 0 if run.engine.offload_param != "none" else stored
    return gathered * weight_bytes(run) + own


def _gradient_bytes(run: RunSpec, weights: Weights) -> int:
    """Gradients that stay from one micro-batch to the next."""
    if run.engine.kind == "fsdp":  # shards, and the whole ones of what is in no layer until they are scattered
        return _shard(weights.trained * FP32, run, 2) + weights.outside_layers * weight_bytes(run)
    if run.engine.kind != "deepspeed":
        return weights.trained * _trained_bytes(run)
    if run.engine.offload_optimizer != "none":  # they go to the host
        return 0
    return _shard(weights.trained * FP32, run, 2)


def _optimizer_bytes(run: RunSpec, weights: Weights) -> int:
    if run.engine.offload_optimizer != "none":
        return 0
    optim = str(run["optim"])
    moments = next((count for name, count in _MOMENTS.items() if optim.removeprefix("paged_").startswith(name)), 2)
    if "8bit" in optim or "4bit" in optim:
        width = _IN_8_BITS if "8bit" in optim else _IN_4_BITS
        # With bitsandbytes Trainer keeps those of embeddings in fp32.
        in_fp32 = 0 if optim.startswith("adamw_torch") else weights.trained_embedding
        return _shard(moments * ((weights.trained - in_fp32) * width + in_fp32 * FP32), run, 1)
    if run.engine.kind == "deepspeed":  # and the fp32 parameters that the 16-bit ones are copied from
        return _shard(weights.trained * (FP32 + moments * FP32), run, 1)
    return _shard(weights.trained * moments * _trained_bytes(run), run, 1)  # moments have their parameter's dtype


def _step_bytes(run: RunSpec, weights: Weights) -> int:
    """What the update itself takes for a moment: torch's foreach AdamW makes one temporary for each parameter."""
    foreach = run["optim"] == "adamw_torch" and run.engine.kind != "deepspeed"
    return _shard(weights.trained * _trained_bytes(run), run, 1) if foreach else 0


def _communication_bytes(run: RunSpec, weights: Weights) -> int:
    if run.engine.kind == "deepspeed":
        return (REDUCE_BUCKET + weights.largest_parameter) * weight_bytes(run)  # a gradient on its way to the bucket
    if run.engine.kind == "fsdp":
        return 2 * weights.largest_layer * weight_bytes(run)  # a layer's whole gradient, and the buffer it is sent from
    if run.engine.kind == "single" or run.world_size == 1 or run["gradient_as_bucket_view"]:
        return 0
    return weights.trained * _trained_bytes(run)  # DDP's buckets beside the gradients


# --- In host RAM -----------------------------------------------------------------------------------------------------


def _host_bytes(run: RunSpec, weights: Weights) -> int:
    """The RAM of a node for its processes: each loads the whole model first; offloaded shares stay.

    An offloaded parameter takes 18 bytes: fp32 copy, gradient and two moments, and 16 bits to copy it back from
    (deepspeed/runtime/zero/stage_1_and_2.py).
    """
    loaded_by = 1 if run.engine.kind == "fsdp" else run.local_world_size  # cpu_ram_efficient_loading: rank 0 alone
    width = FP32 if run["dtype"] == "float32" else HALF
    loading = (_stored_bytes(run, weights) if weights.in_4_bits else weights.total * width) * loaded_by
    share = run.local_world_size / run.world_size
    states = 18 * weights.trained * share if run.engine.offload_optimizer != "none" else 0
    parameters = HALF * weights.total * share if run.engine.offload_param != "none" else 0
    return round(max(loading, states + parameters))
