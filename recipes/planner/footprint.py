"""What a run keeps in memory, by component: on each GPU, and in the RAM of each node.

Pure arithmetic on what trace.py found, in bytes. Every constant and formula names its source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from recipes.errors import mistake
from recipes.planner import fsdp
from recipes.planner.shapes import Traced, Weights
from recipes.rules.facts import fsdp_section, gradient_accumulation_kwargs, is_true
from recipes.run import RunSpec

FP32, HALF = 4, 2

# DeepSpeed's defaults, in elements: deepspeed/runtime/zero/config.py. accelerate and Trainer keep
# them.
REDUCE_BUCKET = int(5e8)
MAX_LIVE_PARAMETERS = int(1e9)

# Hugging Face's guide "Methods and tools for efficient training on a single GPU" reads 1343 MiB in
# use on a V100 once the kernels are loaded. Newer cards and drivers take less.
CUDA_CONTEXT_BYTES = 1343 << 20

# Numbers that an optimizer keeps per trained parameter, by the start of `optim` without "paged_".
# Every other one keeps two, as Adam does. Adafactor keeps a row and a column of each matrix.
_MOMENTS = {"sgd": 0, "lomo": 0, "adalomo": 0, "adafactor": 0.01, "lion": 1, "adagrad": 1, "rmsprop": 1, "ademamix": 3}
_IN_8_BITS = 1 + FP32 / 256  # a byte, and an fp32 scale per block of 256: bitsandbytes (blockwise) and torchao
_IN_4_BITS = 0.5 + FP32 / 128  # torchao/optim/adam.py: blocks of 128

# Bytes of a parameter in 4 bits: half a byte, and an fp32 scale per block of 64. Nested
# quantisation keeps these scales in 8 bits, with an fp32 scale per 256 of them.
# Source: quantize_4bit in bitsandbytes/functional.py.
_NF4, _NF4_NESTED = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Components:
    """Bytes on one GPU at the moment of a step that needs most."""

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
    """What a run needs on each GPU, by component, and in the RAM of each node."""

    gpu: Components
    host_bytes_per_node: int


def need(run: RunSpec, weights: Weights, traced: Traced, accumulation: int, context: int = CUDA_CONTEXT_BYTES) -> Need:
    """What `run` needs if each of its `accumulation` micro-batches keeps what `traced` found.

    `context` is what CUDA itself takes on a GPU, in bytes.

    Raises `UserError` for tensor parallelism.
    """
    if run.engine.parallelism.sharing > 1:
        what = "is not planned: how much of this model each process of a group holds is unknown"
        raise mistake("tensor_parallel", what, "recipes fit, which measures it")
    if run.engine.kind == "fsdp":
        fullest = _fullest_of_fsdp(run, weights, traced, accumulation, context if run.hardware.cuda else 0)
        return Need(fullest, _host_bytes(run, weights))
    states = Components(
        parameters=_parameter_bytes(run, weights),
        optimizer=_optimizer_bytes(run, weights),
        buffers=weights.buffer_bytes + _communication_bytes(run, weights),
        context=context if run.hardware.cuda else 0,
    )
    whole = _gradient_bytes(run, weights)
    # Gradients appear one by one while activations are freed, unless all exist throughout: with
    # DeepSpeed, which moves each to a bucket at once, with bucket views, and with accumulation.
    viewed = run["gradient_as_bucket_view"] and run.world_size > 1
    stays = run.engine.kind == "deepspeed" or viewed or accumulation > 1
    moments = ((alive, logits, whole if stays else made) for alive, logits, made in traced.moments)
    activations, logits, gradients = max(moments, key=sum)
    # Gradients become views of DDP's buckets when they are reduced, with the last micro-batch.
    # Until then accumulated gradients exist beside the buckets.
    beside = whole if viewed and accumulation > 1 else 0
    full = {"activations": activations, "logits": logits, "gradients": gradients, "buffers": states.buffers + beside}
    in_a_micro_batch = replace(states, **full)
    in_the_update = replace(states, gradients=whole, optimizer=states.optimizer + _step_bytes(run, weights))
    fullest = max(in_a_micro_batch, in_the_update, key=lambda moment: moment.total)
    return Need(fullest, _host_bytes(run, weights))


def _fullest_of_fsdp(run: RunSpec, weights: Weights, traced: Traced, accumulation: int, context: int) -> Components:
    """The fullest moment of a step under FSDP: what is gathered differs from moment to moment."""
    stored = Components(
        parameters=_parameter_bytes(run, weights),
        optimizer=_optimizer_bytes(run, weights),
        buffers=weights.buffer_bytes,
        context=context,
    )
    unit = fsdp.units(weights, weight_bytes(run), shards(run))
    whole, shard = weights.trained * weight_bytes(run), _gradient_bytes(run, weights)
    all_made = max(1, traced.moments[-1][2])
    moments = []
    for place, (alive, logits, made) in enumerate(traced.moments):
        done = made / all_made
        gathered, unscattered, sent = fsdp.held(unit, done, place < traced.forward, has_logits=logits > 0)
        scattered = shard * done
        if accumulation > 1:  # of the micro-batches before
            scattered = shard if scatters_each_micro_batch(run) else scattered + whole * (1 - done)
        moments.append((alive, logits, scattered + unscattered, gathered, sent))
    alive, logits, gradients, gathered, sent = max(moments, key=sum)
    in_a_micro_batch = replace(
        stored,
        parameters=stored.parameters + math.ceil(gathered),
        gradients=math.ceil(gradients),
        activations=alive,
        logits=logits,
        buffers=stored.buffers + math.ceil(sent),
    )
    in_the_update = replace(stored, gradients=shard, optimizer=stored.optimizer + _step_bytes(run, weights))
    # Weights in 4 bits are loaded onto each GPU as a whole: `fsdp2_prepare_model` then shards them.
    whole_model = math.ceil(_stored_bytes(run, weights)) if weights.in_4_bits else 0
    while_loading = Components(parameters=whole_model, context=context)
    return max(in_a_micro_batch, in_the_update, while_loading, key=lambda moment: moment.total)


# --- On the GPU -----------------------------------------------------------------------------------


def recomputes(run: RunSpec) -> bool:
    """Whether activations are computed again in the backward pass: Trainer's way, or FSDP's own."""
    return bool(run["gradient_checkpointing"]) or (
        run.engine.kind == "fsdp" and is_true(fsdp_section(run).get("activation_checkpointing"))
    )


def scatters_each_micro_batch(run: RunSpec) -> bool:
    """Whether FSDP scatters the gradients of every micro-batch, and not only those of the last."""
    return is_true(gradient_accumulation_kwargs(run).get("sync_each_batch"))


def weight_bytes(run: RunSpec) -> int:
    """Bytes of a parameter in use: DeepSpeed and FSDP2 cast it to 16 bits, autocast does not."""
    if run.engine.kind in ("deepspeed", "fsdp") and (run["bf16"] or run["fp16"]):
        return HALF
    return _loaded_bytes(run)


def _stored_bytes(run: RunSpec, weights: Weights) -> float:
    """Bytes of the whole model in the dtypes that it is kept in between steps."""
    trained = weights.trained * _trained_bytes(run)
    width = weight_bytes(run)
    if run.engine.kind == "fsdp":  # shards of frozen weights stay as they were loaded
        width = _loaded_bytes(run)
    if weights.in_4_bits and run.engine.kind != "deepspeed":
        width = FP32  # peft casts the rest
    return _packed_bytes(run, weights) + trained + (weights.total - weights.in_4_bits - weights.trained) * width


def _packed_bytes(run: RunSpec, weights: Weights) -> float:
    """Bytes of the weights that are stored in 4 bits."""
    return weights.in_4_bits * (_NF4_NESTED if run["use_bnb_nested_quant"] else _NF4)


def _trained_bytes(run: RunSpec) -> int:
    """Bytes of a trained parameter and of its gradient. Adapters are fp32 except with DeepSpeed.

    In mixed precision, accelerate makes trained parameters fp32 for FSDP2 (`fsdp2_prepare_model`).
    """
    mixed = run["bf16"] or run["fp16"]
    if (run.engine.kind == "fsdp" and mixed) or (run["use_peft"] and run.engine.kind != "deepspeed"):
        return FP32
    return weight_bytes(run)


def _loaded_bytes(run: RunSpec) -> int:
    return FP32 if run["dtype"] == "float32" else HALF


def _shard(size: float, run: RunSpec, from_stage: int) -> int:
    """One GPU's share of a state, rounded up. ZeRO shards it from this stage on, FSDP2 always."""
    sharded = run.engine.kind == "fsdp" or (run.engine.kind == "deepspeed" and run.engine.zero_stage >= from_stage)
    return math.ceil(size / shards(run)) if sharded else math.ceil(size)


def shards(run: RunSpec) -> int:
    """Processes that share one copy of the model's states: HSDP has several copies of them."""
    return run.world_size // run.engine.parallelism.replicate


def _parameter_bytes(run: RunSpec, weights: Weights) -> int:
    if run.engine.kind == "fsdp":  # each GPU has all scales of 4-bit weights: they are no parameters
        scales = _packed_bytes(run, weights) - fsdp.IN_4_BITS * weights.in_4_bits
        own = _shard(_stored_bytes(run, weights) - scales, run, 3)
        return math.ceil(scales) + (own if run.engine.offload_param == "none" else 0)
    stored = _shard(_stored_bytes(run, weights), run, 3)
    if run.engine.zero_stage < 3:
        return stored
    # What ZeRO-3 has fetched and not yet released. A layer of experts is fetched as a whole.
    gathered = min(weights.total, max(MAX_LIVE_PARAMETERS, weights.largest_layer))
    own = 0 if run.engine.offload_param != "none" else stored
    return gathered * weight_bytes(run) + own


def _gradient_bytes(run: RunSpec, weights: Weights) -> int:
    """Bytes of the gradients that stay from one micro-batch to the next."""
    if run.engine.offload_optimizer != "none":  # gradients go to the host
        return 0
    if run.engine.kind != "deepspeed":
        return _shard(weights.trained * _trained_bytes(run), run, 2)
    return _shard(weights.trained * FP32, run, 2)


def optimizer_bytes_per_parameter(run: RunSpec) -> float:
    """What the optimizer keeps of each trained parameter on all devices together, at least."""
    optim = str(run["optim"])
    if "8bit" in optim or "4bit" in optim:
        return _moments(optim) * (_IN_8_BITS if "8bit" in optim else _IN_4_BITS)
    if run.engine.kind == "deepspeed":  # and fp32 copies of the parameters
        return FP32 + _moments(optim) * FP32
    return _moments(optim) * _trained_bytes(run)  # moments have their parameter's dtype


def _moments(optim: str) -> float:
    return next((count for name, count in _MOMENTS.items() if optim.removeprefix("paged_").startswith(name)), 2)


def _optimizer_bytes(run: RunSpec, weights: Weights) -> int:
    if run.engine.offload_optimizer != "none":
        return 0
    optim = str(run["optim"])
    if "8bit" in optim or "4bit" in optim:
        # With bitsandbytes, Trainer keeps the moments of embeddings in fp32.
        in_fp32 = 0 if optim.startswith("adamw_torch") else weights.trained_embedding
        in_few_bits = (weights.trained - in_fp32) * optimizer_bytes_per_parameter(run)
        return _shard(in_few_bits + _moments(optim) * in_fp32 * FP32, run, 1)
    return _shard(weights.trained * optimizer_bytes_per_parameter(run), run, 1)


def _step_bytes(run: RunSpec, weights: Weights) -> int:
    """What the update needs for a moment: torch's foreach AdamW makes a temporary per parameter."""
    foreach = run["optim"] == "adamw_torch" and run.engine.kind != "deepspeed"
    return _shard(weights.trained * _trained_bytes(run), run, 1) if foreach else 0


def _communication_bytes(run: RunSpec, weights: Weights) -> int:
    if run.engine.kind == "deepspeed":
        return (REDUCE_BUCKET + weights.largest_parameter) * weight_bytes(run)  # and a gradient on its way there
    if run.engine.kind == "single" or run.world_size == 1 or run["gradient_as_bucket_view"]:
        return 0
    return weights.trained * _trained_bytes(run)  # DDP's buckets beside the gradients


# --- In host RAM ----------------------------------------------------------------------------------


def _host_bytes(run: RunSpec, weights: Weights) -> int:
    """Bytes of a node's RAM: each process first loads the whole model; later offloaded shares stay.

    An offloaded parameter takes 18 bytes: fp32 copy, gradient and two moments, and a 16-bit copy to
    send back (deepspeed/runtime/zero/stage_1_and_2.py).
    """
    loaded_by = 1 if run.engine.kind == "fsdp" else run.local_world_size  # cpu_ram_efficient_loading: only rank 0
    width = _loaded_bytes(run)
    loading = (_stored_bytes(run, weights) if weights.in_4_bits else weights.total * width) * loaded_by
    share = run.local_world_size / run.world_size
    states = 18 * weights.trained * share if run.engine.offload_optimizer != "none" else 0
    parameters = HALF * weights.total * share if run.engine.offload_param != "none" else 0
    if run.engine.kind == "fsdp" and states:  # its shards are the parameters; then gradients and moments, in fp32
        states, parameters = (_stored_bytes(run, weights) + 3 * FP32 * weights.trained) * share, 0
    return round(max(loading, states + parameters))
