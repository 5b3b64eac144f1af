"""What a run keeps in memory, by component: on each GPU, and in the RAM of each node.

Pure arithmetic on what trace.py found, in bytes. Every constant and formula names its source.
"""

from __future__ import annotations

import math
from dataclasses import replace

from recipes.errors import mistake
from recipes.planner.context import context_of
from recipes.planner.libraries import fsdp, optimizers
from recipes.planner.libraries.optimizers import FP32
from recipes.planner.shapes import EVALUATION, LOADING, TRAINING, UPDATE, Components, Need, Traced, Weights
from recipes.rules.facts import fsdp_section, gradient_accumulation_kwargs, is_true
from recipes.run import RunSpec

HALF = 2

# DeepSpeed's defaults, in elements: deepspeed/runtime/zero/config.py. accelerate and Trainer keep
# them.
REDUCE_BUCKET = int(5e8)
MAX_LIVE_PARAMETERS = int(1e9)
SUB_GROUP = int(1e9)

# Bytes of a parameter in 4 bits: half a byte, and an fp32 scale per block of 64. Nested
# quantisation keeps these scales in 8 bits, with an fp32 scale per 256 of them.
# Source: quantize_4bit in bitsandbytes/functional.py.
_NF4, _NF4_NESTED = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)


def need(
    run: RunSpec,
    weights: Weights,
    traced: Traced,
    accumulation: int,
    context: int | None = None,
    evaluation: Traced | None = None,
) -> Need:
    """What `run` needs if each of its `accumulation` micro-batches keeps what `traced` found.

    `context` is what CUDA itself takes on a GPU, in bytes; None for what is known of such a card.
    `evaluation` is what was found for a batch of an evaluation, None without evaluations.

    Raises `UserError` for tensor parallelism.
    """
    if run.engine.parallelism.sharing > 1:
        what = "is not planned: how much of this model each process of a group holds is unknown"
        raise mistake("tensor_parallel", what, "recipes fit, which measures it")
    context = context_of(run).bytes if context is None or not run.hardware.cuda else context
    if run.engine.kind == "fsdp":
        moments = _moments_of_fsdp(run, weights, traced, accumulation, context, evaluation)
        return _fullest(moments, _host_bytes(run, weights))
    states = Components(
        parameters=_parameter_bytes(run, weights),
        optimizer=_optimizer_bytes(run, weights),
        buffers=weights.buffer_bytes + _communication_bytes(run, weights),
        context=context,
    )
    whole = _gradient_bytes(run, weights)
    # Gradients appear one by one while activations are freed, unless all exist throughout: with
    # DeepSpeed, which moves each to a bucket at once, with bucket views, and with accumulation.
    viewed = run["gradient_as_bucket_view"] and run.world_size > 1
    stays = run.engine.kind == "deepspeed" or viewed or accumulation > 1
    fullest = ((alive, logits, whole if stays else made) for alive, logits, made in traced.moments)
    activations, logits, gradients = max(fullest, key=sum)
    # Gradients become views of DDP's buckets when they are reduced, with the last micro-batch.
    # Until then accumulated gradients exist beside the buckets.
    beside = whole if viewed and accumulation > 1 else 0
    full = {"activations": activations, "logits": logits, "gradients": gradients, "buffers": states.buffers + beside}
    # ZeRO-1 and ZeRO-2 have their bucket in the backward alone.
    after = states if run.engine.zero_stage not in (1, 2) else replace(states, buffers=weights.buffer_bytes)
    moments = {
        LOADING: Components(parameters=_loaded_whole(run, weights), context=states.context),
        TRAINING: replace(states, **full),
        UPDATE: replace(
            after,
            gradients=_gradients_in_update(run, weights),
            optimizer=states.optimizer + update_bytes(run, weights),
        ),
    }
    if evaluation:
        # Trainer has freed the gradients by then, but not the buckets that they are views of, nor
        # ZeRO-3 its flat ones.
        activations, logits, _ = max(evaluation.moments, key=sum)
        kept = whole if run.engine.zero_stage == 3 or viewed else 0
        moments[EVALUATION] = replace(after, gradients=kept, activations=activations, logits=logits)
    return _fullest(moments, _host_bytes(run, weights))


def _fullest(moments: dict[str, Components], host: int) -> Need:
    moment = max(moments, key=lambda name: moments[name].total)
    return Need(moments[moment], host, moment)


def _moments_of_fsdp(
    run: RunSpec, weights: Weights, traced: Traced, accumulation: int, context: int, evaluation: Traced | None
) -> dict[str, Components]:
    """The moments of a training under FSDP: each operation finds something else gathered."""
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
            scattered = shard if syncs_each_micro_batch(run) else scattered + whole * (1 - done)
        moments.append((alive, logits, scattered + unscattered, gathered, sent))
    alive, logits, gradients, gathered, sent = max(moments, key=sum)
    found = {
        TRAINING: replace(
            stored,
            parameters=stored.parameters + math.ceil(gathered),
            gradients=math.ceil(gradients),
            activations=alive,
            logits=logits,
            buffers=stored.buffers + math.ceil(sent),
        ),
        UPDATE: replace(stored, gradients=shard, optimizer=stored.optimizer + update_bytes(run, weights)),
        LOADING: Components(parameters=_loaded_whole(run, weights), context=context),
    }
    if evaluation:
        forward = [(a, b, fsdp.held(unit, 0, is_forward=True, has_logits=b > 0)[0]) for a, b, _ in evaluation.moments]
        alive, logits, gathered = max(forward, key=sum)
        whole_units = stored.parameters + math.ceil(gathered)
        found[EVALUATION] = replace(stored, parameters=whole_units, activations=alive, logits=logits)
    return found


# --- On the GPU -----------------------------------------------------------------------------------


def _loaded_whole(run: RunSpec, weights: Weights) -> int:
    """Weights in 4 bits are loaded onto each GPU as a whole, and sharded only then.

    `fsdp2_prepare_model` shards them, or DeepSpeed: transformers uses no `zero.Init` for them
    (`get_init_context` of modeling_utils.py).
    """
    return math.ceil(_stored_bytes(run, weights)) if weights.in_4_bits else 0


def recomputes(run: RunSpec) -> bool:
    """Whether activations are computed again in the backward pass: Trainer's way, or FSDP's own."""
    return bool(run["gradient_checkpointing"]) or (
        run.engine.kind == "fsdp" and is_true(fsdp_section(run).get("activation_checkpointing"))
    )


def syncs_each_micro_batch(run: RunSpec) -> bool:
    """Whether DDP and FSDP exchange gradients in every micro-batch, and not once a step."""
    return is_true(gradient_accumulation_kwargs(run).get("sync_each_batch"))


def weight_bytes(run: RunSpec) -> int:
    """Bytes of a parameter in use: DeepSpeed and FSDP2 cast it to 16 bits, autocast does not."""
    if run.engine.kind in ("deepspeed", "fsdp") and (run["bf16"] or run["fp16"]):
        return HALF
    return _loaded_bytes(run)


def _stored_bytes(run: RunSpec, weights: Weights) -> float:
    """Bytes of the whole model in the dtypes that it is kept in between steps."""
    trained = weights.trained * trained_bytes(run)
    frozen = (weights.total - weights.in_4_bits - weights.trained) * frozen_bytes(run, weights)
    return _packed_bytes(run, weights) + trained + frozen


def frozen_bytes(run: RunSpec, weights: Weights) -> int:
    """Bytes of a parameter that is not trained, and not in 4 bits, in between steps."""
    if weights.in_4_bits and run.engine.kind != "deepspeed":
        return FP32  # peft casts the rest
    if run.engine.kind == "fsdp":  # shards of frozen weights stay as they were loaded
        return _loaded_bytes(run)
    return weight_bytes(run)


def _packed_bytes(run: RunSpec, weights: Weights) -> float:
    """Bytes of the weights that are stored in 4 bits."""
    return weights.in_4_bits * bytes_in_4_bits(run)


def bytes_in_4_bits(run: RunSpec) -> float:
    """Bytes of a parameter in 4 bits, with its share of the scales."""
    return _NF4_NESTED if run["use_bnb_nested_quant"] else _NF4


def trained_bytes(run: RunSpec) -> int:
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
    return _shard(weights.trained * trained_bytes(run), run, 2)


def _gradients_in_update(run: RunSpec, weights: Weights) -> int:
    """Bytes of the gradients while the weights are updated.

    DeepSpeed makes one flat copy of this GPU's share, and one in fp32 of that (`step` of
    stage_1_and_2.py), ZeRO-3 of a billion parameters at a time. With ZeRO-1 the whole gradients are
    still there when the share is copied. Two ranks on a CPU hold just this.
    """
    stays, width = _gradient_bytes(run, weights), weight_bytes(run)
    if run.engine.kind != "deepspeed" or not stays:
        return stays
    share = math.ceil(weights.trained / shards(run))
    at_once = min(share, SUB_GROUP) if run.engine.zero_stage == 3 else share
    in_fp32 = FP32 if width < FP32 else 0
    copied = share * width + at_once * (width + in_fp32)
    return copied if run.engine.zero_stage > 1 else max(copied, stays + share * width)


def optimizer_bytes_per_parameter(run: RunSpec) -> float:
    """What the optimizer keeps of each trained parameter on all devices together, at least."""
    if in_few_bits := optimizers.few_bits(run):
        return optimizers.moments(run) * in_few_bits
    if run.engine.kind == "deepspeed":  # and fp32 copies of the parameters
        return FP32 + optimizers.moments(run) * FP32
    return optimizers.moments(run) * optimizers.width_of_moments(run, trained_bytes(run))


def _optimizer_bytes(run: RunSpec, weights: Weights) -> int:
    if run.engine.offload_optimizer != "none":
        return 0
    in_fp32 = weights.trained_embedding if optimizers.embeddings_stay_in_fp32(run) else 0
    kept = (weights.trained - in_fp32) * optimizer_bytes_per_parameter(run)
    return _shard(kept + optimizers.moments(run) * in_fp32 * FP32, run, 1)


def update_bytes(run: RunSpec, weights: Weights) -> int:
    """What the update needs for a moment.

    DeepSpeed gives torch's optimizer one flat fp32 parameter, ZeRO-3 one for each billion.
    """
    if run.engine.offload_optimizer != "none":
        return 0
    if run.engine.kind != "deepspeed" or run["optim"] == "adafactor":
        return _shard(optimizers.bytes_of_update(run, weights, trained_bytes(run)), run, 1)
    share = math.ceil(weights.trained / shards(run))
    flat = min(share, SUB_GROUP) if run.engine.zero_stage == 3 else share
    return optimizers.bytes_of_update(run, Weights(flat, flat, largest_parameter=flat), FP32)


def _communication_bytes(run: RunSpec, weights: Weights) -> int:
    if run.engine.kind == "deepspeed":
        return (REDUCE_BUCKET + weights.largest_parameter) * weight_bytes(run)  # and a gradient on its way there
    if run.engine.kind == "single" or run.world_size == 1 or run["gradient_as_bucket_view"]:
        return 0
    return weights.trained * trained_bytes(run)  # DDP's buckets beside the gradients


# --- In host RAM ----------------------------------------------------------------------------------


def _host_bytes(run: RunSpec, weights: Weights) -> int:
    """Bytes of the RAM of the node that needs most, at the fullest of its moments."""
    kept, gradients = _offloaded_bytes(run, weights)
    return round(max(_loading_bytes(run, weights), kept + gradients, kept + _saving_bytes(run, weights)))


def _loading_bytes(run: RunSpec, weights: Weights) -> float:
    """The model while it is loaded, by all processes of a node.

    - ZeRO-3 makes each parameter in shards on the GPUs, and rank 0 alone maps the files
      (`_load_pretrained_model` of transformers 5.23), in their own dtype.
    - FSDP2: rank 0 reads and sends, unless `cpu_ram_efficient_loading` is off. But before that each
      process makes what is trained fp32 (`fsdp2_prepare_model`), also where nothing was read.
    - Weights in 4 bits: each process sends its own to its GPU.
    - Else each process has all of it.
    """
    processes = run.local_world_size
    if weights.in_4_bits:
        return _stored_bytes(run, weights) * (1 if run.engine.kind == "fsdp" else processes)
    if run.engine.kind == "deepspeed" and run.engine.zero_stage == 3:
        return 0 if run["from_scratch"] else weights.total * weights.file_width
    width = _loaded_bytes(run)
    reads_once = run.engine.kind == "fsdp" and is_true(fsdp_section(run).get("cpu_ram_efficient_loading", True))
    if not reads_once:
        return weights.total * width * processes
    if width == trained_bytes(run):
        return weights.total * width
    return (weights.total - weights.trained) * width + weights.trained * trained_bytes(run) * processes


def _offloaded_bytes(run: RunSpec, weights: Weights) -> tuple[float, float]:
    """What offload keeps on a node from step to step, and FSDP's gradients, gone after the update.

    With DeepSpeed an offloaded parameter takes 18 bytes: fp32 copy, gradient and two moments, and a
    16-bit copy to send back (deepspeed/runtime/zero/stage_1_and_2.py).
    """
    share = run.local_world_size / run.world_size
    offloads = run.engine.offload_optimizer != "none"
    if run.engine.kind == "fsdp" and offloads:  # its shards are the parameters; moments and gradients are fp32
        kept = _stored_bytes(run, weights) + 2 * FP32 * weights.trained
        return kept * share, FP32 * weights.trained * share
    states = 18 * weights.trained * share if offloads else 0
    parameters = HALF * weights.total * share if run.engine.offload_param != "none" else 0
    return states + parameters, 0


def _saving_bytes(run: RunSpec, weights: Weights) -> float:
    """Copies of weights in RAM while they are saved. A GPU sees one parameter at a time.

    ZeRO-1 and ZeRO-2 copy the whole model in every process (`Accelerator.get_state_dict`), though
    only rank 0 writes it. ZeRO-3 and FSDP2 gather it on rank 0, and safetensors copies it there
    from a GPU; of adapters without the frozen weights.
    """
    if run.engine.kind == "deepspeed" and run.engine.zero_stage < 3:
        return weights.total * weight_bytes(run) * run.local_world_size
    return weights.trained * (weight_bytes(run) if run.engine.kind == "deepspeed" else trained_bytes(run))
