"""The memory of a run by component: on each GPU, and in the RAM of each node.

Pure arithmetic on the sizes of a trace, in bytes, without torch. Every constant and formula names
its source.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from packaging.version import Version

from recipes import legal
from recipes.errors import mistake
from recipes.rules.facts import is_true, syncs_each_micro_batch
from recipes.run import RunSpec, known_gpus

# --- What to trace, and what was found ------------------------------------------------------------

# The name under which kernels.py registers kernels of other packages. With "flash" in the name,
# transformers would look for the package flash-attn.
PACKAGED = "recipes_packaged"

# Unfused attention, which keeps batch x heads x length x length numbers in each layer.
EAGER, MATH = "eager", "math"

LOOP = "loop"  # the model's own code loops over a sequence
COMPILED = "compiled"  # equal layers keep only the tensors that torch.compile's partitioner keeps
TRAINED, IN_4_BITS, FROZEN = "trained", "in 4 bits", "frozen"

# The columns of a trace's allocations. Times are counted in allocations made so far. SIZE: bytes.
# FREED: time of the release, NEVER if the tensor outlives the trace. COMPLETE: time when the tensor
# is a complete gradient, NEVER for other tensors. LOGITS: 1 if the last dimension is `vocabulary`.
SIZE, FREED, COMPLETE, LOGITS = range(4)
NEVER = 1 << 62
ROUNDING = 512  # torch's allocator rounds requests up to this: kMinBlockSize of CUDACachingAllocator.cpp


@dataclass(frozen=True)
class Weights:
    """Counts of a model's parameters, and the bytes of its buffers."""

    total: int
    trained: int
    in_4_bits: int = 0
    trained_embedding: int = 0  # parameters of trained embeddings
    largest_layer: int = 0
    largest_parameter: int = 0  # parameters of the largest single tensor
    outside_layers: int = 0  # parameters in no layer: embeddings, the last norm and the head
    looked_up: int = 0  # parameters of an input embedding not tied to the head: its lookup takes no FLOPs
    buffer_bytes: int = 0
    layers: tuple[int, ...] = ()  # parameters of each layer, in order; empty if the layers are unknown
    sizes: tuple[tuple[int, str], ...] = ()  # of each tensor: parameters, and TRAINED, IN_4_BITS or FROZEN
    matrices: tuple[int, ...] = ()  # parameters of each trained tensor except vectors
    file_width: int = 4  # bytes of a parameter in the model's files, 4 (fp32) if the configuration names no dtype


@dataclass(frozen=True)
class Adapters:
    """LoRA or DoRA adapters of rank `rank` on the modules `targets`."""

    rank: int
    targets: tuple[str, ...] | str = "all-linear"
    dropout: float = 0.0
    four_bits: str | None = None  # the dtype that 4-bit base weights compute in
    in_fp32: bool = True  # False with DeepSpeed and FSDP, which cast adapters to the weights' dtype
    dora: bool = False


@dataclass(frozen=True)
class Case:
    """One micro-batch to trace: `batch` sequences of `length` tokens. Dtypes are torch's names."""

    batch: int
    length: int
    task: str = "causal_lm"
    dtype: str = "float32"  # of the weights
    autocast: str | None = None
    checkpointing: bool = False
    attention: str | None = None  # transformers' name; PACKAGED for FlashAttention's package and the like
    mask: bool = True  # the batch is padded, or has several sequences in a row
    adapters: Adapters | None = None
    on_cuda: bool = True  # operations keep the tensors that a GPU of this `capability` keeps
    evaluation: bool = False  # a forward without gradients, by a model in eval mode
    capability: tuple[int, int] = (8, 0)
    liger: bool = False  # Liger computes the loss, without the full logits in memory
    liger_layers: bool = False  # Liger also computes the layers' norms, gated MLPs and rotary embeddings
    compiled: bool = False  # equal layers are compiled (accelerate's regional compilation)
    copies: int = 1  # how many copies of the batch are traced as one batch


@dataclass(frozen=True, eq=False)
class Traced:
    """The memory of one micro-batch, without parameters and buffers.

    The first `made_forward` rows of `allocations` come from the forward. `kernels` may hold EAGER
    or MATH (unfused attention ran), COMPILED (layers were compiled), and LOOP (`_at_length` made
    the trace). `made_by` has each row's operation and size, unless the trace was extrapolated.
    """

    allocations: np.ndarray
    made_forward: int
    kernels: frozenset[str] = frozenset()
    made_by: Sequence[object] = ()

    @cached_property
    def moments(self) -> np.ndarray:
        """The bytes alive at each moment, in the columns activations, logits and gradients.

        Two moments follow each allocation. In the second moment, gradients that are now complete
        count as gradients, no longer as activations.
        """
        if not len(self.allocations):
            return np.zeros((1, 3), int)
        sizes, freed, complete, logits = self.allocations.T
        sizes = -(-sizes // ROUNDING) * ROUNDING
        end = len(sizes)

        def at(times: np.ndarray, change: np.ndarray) -> np.ndarray:
            """For each allocation, return the sum of the changes up to its time."""
            there = times <= end
            return np.bincount(times[there], change[there], end + 1).astype(int).cumsum()[1:]

        alive, wide = (part.cumsum() - at(freed + 1, part) for part in (sizes, sizes * logits))
        moments = np.empty((2 * end, 3), int)
        for place, gradients in enumerate((at(complete + 1, sizes), at(complete, sizes))):
            moments[place::2] = np.stack((alive - wide - gradients, wide, gradients), axis=1)
        return moments


NOTHING = Traced(np.empty((0, 4), int), 0)  # neither activations nor logits


@dataclass(frozen=True)
class Components:
    """Bytes on one GPU at the moment that needs the most memory."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    cached: int = 0
    context: int = 0

    @property
    def allocated(self) -> int:
        """torch.cuda.max_memory_allocated at the end of the training."""
        return self.total - self.cached - self.context

    @property
    def total(self) -> int:
        """The process's memory in nvidia-smi, which includes CUDA's own overhead."""
        return sum(getattr(self, field.name) for field in fields(self))


# The moments of a training at which a GPU may need the most memory.
LOADING, TRAINING, UPDATE, EVALUATION = "loading", "training", "update", "evaluation"


# --- What follows from the flags ------------------------------------------------------------------

HALF, FP32 = 2, 4

# DeepSpeed's defaults, in elements: deepspeed/runtime/zero/config.py. accelerate and Trainer keep
# them.
REDUCE_BUCKET = int(5e8)
MAX_LIVE_PARAMETERS = int(1e9)
SUB_GROUP = int(1e9)

# Bytes of a parameter in 4 bits: half a byte, and an fp32 scale per block of 64. Nested
# quantisation keeps these scales in 8 bits, with one fp32 scale per 256 scales.
# Source: quantize_4bit in bitsandbytes/functional.py.
HALF_A_BYTE, NF4, NF4_NESTED = 0.5, 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)


def recomputes(run: RunSpec) -> bool:
    """True if the backward recomputes activations, by Trainer's or by FSDP's checkpointing."""
    return bool(run["gradient_checkpointing"]) or (
        run.engine.kind == "fsdp" and is_true(run.engine.fsdp.get("activation_checkpointing"))
    )


def mixed_precision(run: RunSpec) -> str | None:
    """Return the dtype of mixed precision: `bfloat16` with bf16, `float16` with fp16, else None."""
    return "bfloat16" if run["bf16"] else "float16" if run["fp16"] else None


def casts_the_model(run: RunSpec) -> bool:
    """True for DeepSpeed and FSDP (planned as FSDP2): both cast the model, without autocast."""
    return run.engine.kind in ("deepspeed", "fsdp")


def loaded_bytes(run: RunSpec) -> int:
    return FP32 if run["dtype"] == "float32" else HALF


def weight_bytes(run: RunSpec) -> int:
    """Return a parameter's bytes in a step: 2 if DeepSpeed or FSDP2 casts it for bf16 or fp16."""
    return HALF if casts_the_model(run) and mixed_precision(run) else loaded_bytes(run)


def trained_bytes(run: RunSpec) -> int:
    """Return the bytes of one trained parameter. Its gradient takes the same number of bytes.

    Adapters are fp32 except with DeepSpeed. In mixed precision, accelerate casts trained parameters
    to fp32 for FSDP2 (`fsdp2_prepare_model`).
    """
    mixed_fsdp = run.engine.kind == "fsdp" and mixed_precision(run)
    return FP32 if mixed_fsdp or (run["use_peft"] and run.engine.kind != "deepspeed") else weight_bytes(run)


def bytes_in_4_bits(run: RunSpec) -> float:
    """Return the bytes of a parameter in 4 bits, with the parameter's share of the scales."""
    return NF4_NESTED if run["use_bnb_nested_quant"] else NF4


def shards(run: RunSpec) -> int:
    """Return how many processes share one copy of the states. HSDP makes several such copies."""
    return run.world_size // run.engine.parallelism.dp_replicate_size


# --- Optimizers -----------------------------------------------------------------------------------
#
# Read from the source of torch 2.13 (torch/optim), transformers 5.23 (trainer_optimizer.py, and
# Adafactor in optimization.py) and bitsandbytes 0.50, and compared with real updates in
# tests/recipes/planner/test_optimizers.py. bitsandbytes updates in one kernel
# (backends/cuda/ops.py), which allocates nothing. torch's fused AdamW allocates nothing either.

# Numbers that an optimizer keeps per trained parameter. Keys: starts of `optim` without "paged_".
# All other optimizers keep two, as Adam does. Adafactor keeps a row and a column of each matrix.
_MOMENTS = {"sgd": 0, "lomo": 0, "adalomo": 0, "adafactor": 0.01, "lion": 1, "adagrad": 1, "rmsprop": 1, "ademamix": 3}
_IN_8_BITS = 1 + FP32 / 256  # a byte, and an fp32 scale per block of 256: bitsandbytes (blockwise) and torchao
_IN_4_BITS = 0.5 + FP32 / 128  # torchao/optim/adam.py: blocks of 128
_IN_FP32 = ("adafactor", "lion", "ademamix", "rmsprop_bnb", "adamw_bnb", "adamw_32bit")  # even for 16-bit weights

# Temporary copies of all parameters in torch's foreach update (the default on a GPU), by optimizer.
# These are upper bounds: some optimizers make one copy only for weight decay or momentum.
_TEMPORARIES = {"adamw_torch": 1, "adagrad": 2, "rmsprop": 2, "sgd": 1}


def moments_of(run: RunSpec) -> float:
    """Return how many numbers the optimizer keeps for each trained parameter: 2 for Adam."""
    optim = str(run["optim"]).removeprefix("paged_")
    kept = next((count for name, count in _MOMENTS.items() if optim.startswith(name)), 2)
    return kept + ("momentum" in str(run["optim_args"]))


def few_bits(run: RunSpec) -> float | None:
    """Return the bytes per number in the state of an 8-bit or 4-bit optimizer, else None."""
    optim = str(run["optim"])
    return _IN_8_BITS if "8bit" in optim else _IN_4_BITS if "4bit" in optim else None


def optimizer_bytes_per_parameter(run: RunSpec) -> float:
    """Return optimizer bytes per trained parameter, before sharding. Embeddings may take more."""
    copy = FP32 if run.engine.kind == "deepspeed" else 0  # the fp32 copy of the parameter
    in_fp32 = copy or str(run["optim"]).removeprefix("paged_").startswith(_IN_FP32)
    return copy + moments_of(run) * (few_bits(run) or (FP32 if in_fp32 else trained_bytes(run)))


def requests_of_update(run: RunSpec, weights: Weights, width: int) -> list[list[int]]:
    """Return the sizes that an update allocates, in groups. Each group is freed before the next.

    `width` is the bytes of a trained parameter. Adafactor updates one matrix at a time, while the
    tensor `update` of the previous matrix still exists. Small norms and biases are left out.
    """
    if run["optim"] != "adafactor":
        trained = [size for size, kind in weights.sizes if kind == TRAINED] or [weights.trained]
        return [[size * width for size in trained] * _TEMPORARIES.get(str(run["optim"]), 0)]
    matrices = weights.matrices or (min(weights.trained, weights.largest_parameter),)
    pairs = list(pairwise(matrices)) or [(matrices[0], 0)]
    return [[FP32 * max(pair)] * (2 if width == FP32 else 4) + [FP32 * min(pair)] for pair in pairs]


# --- On the GPU -----------------------------------------------------------------------------------

# MiB of a training's context, by the start of the GPU's name in the catalogue. A context holds only
# kernels that were called: torch makes CUDA load a kernel at its first call (CUDA_MODULE_LOADING).
_CUDA = {
    "T4": (140.875, "published for T4 (torch 2.10, CUDA 12.8, github.com/Anassbzdd/fitcheck)"),
    "A100": (426, "published for A100 (driver 535.183, CUDA 12.2, github.com/pytorch/torchrec/pull/3580)"),
    "H200": (770, "measured on an H200 (torch 2.11, CUDA 13.0, driver 580.159.04, tests/gpu/results)"),
}
_CUDA["H100"] = _CUDA["H200"]  # the H200 has the same processor and kernels
_NCCL = 546  # MiB of a communicator in addition to the context, measured with one rank


def context_of(run: RunSpec) -> tuple[int, str]:
    """Return the bytes that CUDA and NCCL take on each GPU of this run, outside torch's allocator,
    and the source of the figure. The figure is the one known for this kind of GPU; for an unknown
    kind, the largest known one; on a CPU, 0.
    """
    if not run.hardware.cuda:
        return 0, ""
    card = known_gpus.known(run.hardware.gpus[0].name) or run.hardware.gpus[0]
    alike = next((name for name in _CUDA if card.name.startswith(name)), None)
    mib, source = _CUDA[alike] if alike else max(_CUDA.values())
    source = source if alike else f"the largest known value, {source}"
    if run.world_size > 1 or run.engine.kind == "fsdp":  # FSDP2 uses NCCL on one GPU too
        mib += _NCCL
        source += f", with {_NCCL} MiB for NCCL, measured with one rank; several may take more"
    return round(mib * 2**20), source


class Memory:
    """The memory of a run in which all `accumulation` micro-batches have the trace `micro_batch`.

    `evaluation` is the trace of an evaluation batch, None without evaluations. All sizes are in
    bytes. Sizes of parameters, gradients and optimizer state are one GPU's share.
    """

    def __init__(
        self,
        run: RunSpec,
        weights: Weights,
        micro_batch: Traced = NOTHING,
        accumulation: int = 1,
        evaluation: Traced | None = None,
    ) -> None:
        self.run, self.weights, self.kind = run, weights, run.engine.kind
        self.micro_batch, self.accumulation, self.evaluation = micro_batch, accumulation, evaluation
        self.context, _ = context_of(run)
        self.stage = run.engine.zero_stage
        self.offloads = run.engine.offload_optimizer != "none"
        self.offloads_parameters = run.engine.offload_param != "none"
        # Gradients become views of DDP's buckets when DDP reduces them. If DDP reduces only in the
        # last micro-batch, the gradients of earlier micro-batches exist beside the buckets.
        self.viewed = run["gradient_as_bucket_view"] and run.world_size > 1 and not casts_the_model(run)
        self.beside_views = self.viewed and accumulation > 1 and not syncs_each_micro_batch(run)

    @property
    def gpu(self) -> Components:
        """Each GPU's memory at the fullest moment. Raises `UserError` for tensor parallelism."""
        return self._moments[self.moment]

    @cached_property
    def moment(self) -> str:
        """The moment that needs the most GPU memory: LOADING, TRAINING, UPDATE or EVALUATION."""
        return max(self._moments, key=lambda name: self._moments[name].total)

    @cached_property
    def _moments(self) -> dict[str, Components]:
        """One GPU's memory by the name of the moment. Raises `UserError` for tensor parallelism."""
        if self.run.engine.parallelism.sharing > 1:
            what = "cannot be planned, because it is unknown which share of this model each process holds"
            raise mistake("tensor_parallel", what, "use `recipes fit`, which measures the memory")
        after = Components(
            parameters=self.parameters,
            optimizer=self.optimizer,
            buffers=self.weights.buffer_bytes + self._bucket_bytes,
            context=self.context,
        )
        states = replace(after, buffers=after.buffers + (self.gradients if self.beside_views else 0))
        if self.stage in (1, 2):  # ZeRO-1 and ZeRO-2 free their bucket before the update
            after = replace(after, buffers=self.weights.buffer_bytes)
        # Each GPU loads all 4-bit weights before `fsdp2_prepare_model` or DeepSpeed shards them:
        # for 4-bit, transformers uses no `zero.Init` (`get_init_context` of modeling_utils.py).
        whole = math.ceil(self._stored_bytes) if self.weights.in_4_bits else 0
        optimizer = after.optimizer + self.update
        found = {
            LOADING: Components(parameters=whole, context=self.context),
            TRAINING: self._fullest(states, self.micro_batch, self.accumulation),
            UPDATE: replace(after, gradients=self.gradients_in_update, optimizer=optimizer),
        }
        if self.evaluation:
            # Before an evaluation, Trainer frees the gradients, but not the buckets that gradients
            # are views of. ZeRO-3 keeps its flat gradients.
            kept = self.gradients if self.stage == 3 or self.viewed else 0
            found[EVALUATION] = replace(self._fullest(after, self.evaluation, 1), gradients=kept)
        return found

    def _fullest(self, states: Components, traced: Traced, accumulation: int) -> Components:
        """Return `states` plus a micro-batch's memory at the moment that needs the most memory."""
        alive, logits, made = traced.moments.T
        gathered = sent = 0 * made  # gathered parameters, and buffers for sending
        if self.kind != "fsdp":
            # Gradients appear one by one while activations are freed. In three cases all gradients
            # take memory all the time: with bucket views, with accumulation, and with DeepSpeed,
            # which moves each new gradient to a bucket immediately.
            stays = self.kind == "deepspeed" or self.viewed or accumulation > 1
            gradients = np.full_like(made, self.gradients) if stays else made
        else:
            done = made / max(1, made[-1])
            is_forward = np.arange(len(done)) < 2 * traced.made_forward
            gathered, gradients, sent = self._held_by_fsdp(done, is_forward, logits > 0)
            scattered = self.gradients * done
            if accumulation > 1 and syncs_each_micro_batch(self.run):  # the sum over earlier micro-batches
                scattered = self.gradients
            elif accumulation > 1:
                scattered = scattered + self.weights.trained * weight_bytes(self.run) * (1 - done)
            gradients = gradients + scattered
        parts = np.ceil(np.stack((alive, logits, gradients, gathered, sent), axis=1))
        activations, logits, gradients, gathered, sent = map(int, parts[parts.sum(1).argmax()])
        return replace(
            states,
            activations=activations,
            logits=logits,
            gradients=gradients,
            parameters=states.parameters + gathered,
            buffers=states.buffers + sent,
        )

    def _held_by_fsdp(self, done: np.ndarray, is_forward: np.ndarray, has_logits: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return three arrays of bytes, by moment: gathered parameters, gradients that are not yet
        sharded, and buffers for scattering. `done` is the share of gradients that are complete.

        Read from the source of torch 2.13 and accelerate 1.15, and compared with the live bytes of
        real ranks by tests/benchmarks/sharded.py:

        - `fsdp2_prepare_model` (accelerate/utils/fsdp_utils.py) makes these units: each layer; the
          input embedding, unless it is tied to the head; the tail, which is the last norm and the
          head. The tail stays gathered from its forward to its backward. A tied embedding belongs
          to the tail, and the tail is then gathered from the first operation on.
        - A unit is gathered into one buffer, then copied from the buffer into the parameters. In
          the forward of torch below 2.15, `wait_for_unshard` keeps the buffer until the next unit
          is copied: old buffer, new buffer and copy are in memory. In the backward, the next unit's
          buffer is filled during a unit's backward (`FSDPParamGroup.wait_for_unshard` and
          `_backward_prefetch`). A single process copies its own shard, without a buffer.
        - A unit's gradients are whole until the unit's backward ends. Their scatter buffer stays
          until the next unit has made a buffer (`FSDPParamGroup.post_backward`, `foreach_reduce`).
        - Without `sync_each_batch`, Trainer calls accelerate's `no_sync` in every micro-batch of a
          step except the last. Gradients are then not scattered: each GPU holds all gradients.
        """
        weights, width, ranks = self.weights, weight_bytes(self.run), shards(self.run)
        in_layers = max(1, weights.total - weights.outside_layers)
        trains_all = bool(weights.trained_embedding)  # False with adapters, which are in the layers
        trained_in_layers = max(0, weights.trained - weights.outside_layers * trains_all)
        packed = weights.in_4_bits / in_layers
        layer = weights.largest_layer * (packed * HALF_A_BYTE + (1 - packed) * width)
        tail, table = (weights.outside_layers - weights.looked_up) * width, weights.looked_up * width
        of_layer = weights.largest_layer * width * trained_in_layers / in_layers
        of_tail, of_table, of_all = tail * trains_all, table * trains_all, weights.trained * width
        copies = 2 if ranks > 1 else 1  # of a unit while it is gathered: buffer and parameters
        casts = ranks > 1 and width != (trained_bytes(self.run) if trains_all else self.frozen_width)
        cast = layer / ranks if casts else 0  # a shard is cast to the dtype of the gather
        tied = not table
        always = tail if tied else 0
        made = done * of_all
        of_layers = np.maximum(0, made - (0 if tied else of_tail))  # a tied tail's gradients are complete last
        begun = of_layers % of_layer if of_layer else 0 * done
        sent_before = np.where(of_layers < of_layer, 0 if tied else of_tail, of_layer)
        cases = [is_forward & has_logits & (not tied), has_logits, is_forward, made > of_all - of_table]
        in_forward = copies if Version(legal.version("torch") or "0") >= Version("2.15") else 2 * copies - 1
        gathered = [copies * tail, tail + (copies - 1) * layer, always + in_forward * layer, always + table]
        last = always + copies * layer + np.maximum(0, cast - begun)
        return (
            np.select(cases, gathered, last),
            np.select(cases, [0 * done, np.minimum(made, of_tail), 0 * done, of_table + 0 * done], begun),
            np.select(cases, [0, 0, 0, of_layer], sent_before),
        )

    @property
    def _stored_bytes(self) -> float:
        """Bytes that the whole model takes between steps if it is not sharded."""
        weights = self.weights
        frozen = (weights.total - weights.in_4_bits - weights.trained) * self.frozen_width
        return weights.in_4_bits * bytes_in_4_bits(self.run) + weights.trained * trained_bytes(self.run) + frozen

    @property
    def frozen_width(self) -> int:
        """Bytes that a frozen parameter not in 4 bits takes between steps."""
        # FSDP's shards of frozen weights keep the dtype in which the weights were loaded.
        return loaded_bytes(self.run) if self.kind == "fsdp" else weight_bytes(self.run)

    def _shard(self, size: float, from_stage: int) -> int:
        """Return a GPU's share of `size`. FSDP2 shards everything, ZeRO from stage `from_stage`."""
        sharded = self.kind == "fsdp" or (self.kind == "deepspeed" and self.stage >= from_stage)
        return math.ceil(size / shards(self.run)) if sharded else math.ceil(size)

    @cached_property
    def parameters(self) -> int:
        if self.kind == "fsdp":  # FSDP does not shard the scales of 4-bit weights: each GPU holds all
            scales = self.weights.in_4_bits * (bytes_in_4_bits(self.run) - HALF_A_BYTE)
            return math.ceil(scales) + (0 if self.offloads_parameters else self._shard(self._stored_bytes - scales, 3))
        stored = self._shard(self._stored_bytes, 3)
        if self.stage < 3:
            return stored
        # ZeRO-3 releases gathered parameters late, and gathers a layer's experts all at once.
        gathered = min(self.weights.total, max(MAX_LIVE_PARAMETERS, self.weights.largest_layer))
        return gathered * weight_bytes(self.run) + (0 if self.offloads_parameters else stored)

    @cached_property
    def gradients(self) -> int:
        """Bytes of the gradients, or of this GPU's share if they are sharded; 0 with offload."""
        return 0 if self.offloads else self._shard(self.weights.trained * trained_bytes(self.run), 2)

    @cached_property
    def gradients_in_update(self) -> int:
        """Bytes of the gradients while the weights are updated.

        DeepSpeed makes a flat copy of this GPU's share, and copies the flat copy to fp32 (`step` of
        stage_1_and_2.py). ZeRO-3 makes both copies for a billion parameters at a time. ZeRO-1 still
        holds all gradients when it copies the share. Two ranks on a CPU held exactly these bytes.
        """
        width = weight_bytes(self.run)
        if self.kind != "deepspeed" or not self.gradients:
            return self.gradients
        copied = self._share * width + self._at_once * (width + (FP32 if width < FP32 else 0))
        return copied if self.stage > 1 else max(copied, self.gradients + self._share * width)

    @property
    def _share(self) -> int:
        """The number of trained parameters that one GPU updates if the update is sharded."""
        return math.ceil(self.weights.trained / shards(self.run))

    @property
    def _at_once(self) -> int:
        return min(self._share, SUB_GROUP) if self.stage == 3 else self._share

    @cached_property
    def optimizer(self) -> int:
        if self.offloads:
            return 0
        # Trainer keeps the moments of embeddings in fp32 with bitsandbytes, but not with torchao.
        stays_in_fp32 = few_bits(self.run) and not str(self.run["optim"]).startswith("adamw_torch")
        in_fp32 = self.weights.trained_embedding if stays_in_fp32 else 0
        kept = (self.weights.trained - in_fp32) * optimizer_bytes_per_parameter(self.run)
        return self._shard(kept + moments_of(self.run) * in_fp32 * FP32, 1)

    @cached_property
    def update(self) -> int:
        """Bytes that the update allocates temporarily; 0 with offload.

        DeepSpeed updates flat fp32 tensors: one for all weights, or one per billion with ZeRO-3.
        """
        if self.offloads:
            return 0
        if self.kind == "deepspeed" and self.run["optim"] != "adafactor":
            flat = Weights(self._at_once, self._at_once)
            return max(map(sum, requests_of_update(self.run, flat, FP32)))
        return self._shard(max(map(sum, requests_of_update(self.run, self.weights, trained_bytes(self.run)))), 1)

    @property
    def _bucket_bytes(self) -> int:
        if self.kind == "deepspeed":  # the bucket, and a gradient before its copy to the bucket
            return (REDUCE_BUCKET + self.weights.largest_parameter) * weight_bytes(self.run)
        if self.kind in ("single", "fsdp") or self.run.world_size == 1 or self.run["gradient_as_bucket_view"]:
            return 0
        return self.weights.trained * trained_bytes(self.run)  # DDP's buckets beside the gradients

    # --- In host RAM ------------------------------------------------------------------------------

    @cached_property
    def host_bytes(self) -> int:
        """Bytes of RAM at the fullest moment, on the node that needs the most RAM."""
        kept, gradients = self._offloaded_bytes
        return round(max(self._loading_bytes, kept + gradients, kept + self._saving_bytes))

    @property
    def _loading_bytes(self) -> float:
        """Bytes of the model in a node's RAM while all processes of the node load it.

        - ZeRO-3 creates each parameter as shards on the GPUs. Only rank 0 maps the files into RAM
          (`_load_pretrained_model` of transformers 5.23), in the dtype of the files.
        - FSDP2: only rank 0 reads the weights and sends them, unless `cpu_ram_efficient_loading` is
          off. Before rank 0 sends, each process casts all trained parameters to fp32
          (`fsdp2_prepare_model`), even a process that has read nothing.
        - Weights in 4 bits: each process reads all of them, under ZeRO-3 and FSDP2 too.
        - In all other cases each process holds the whole model.
        """
        run, weights = self.run, self.weights
        if weights.in_4_bits:
            return self._stored_bytes * run.local_world_size
        if self.kind == "deepspeed" and self.stage == 3:
            return 0 if run["from_scratch"] else weights.total * weights.file_width
        width = loaded_bytes(run)
        reads_once = self.kind == "fsdp" and is_true(run.engine.fsdp.get("cpu_ram_efficient_loading", True))
        if not reads_once:
            return weights.total * width * run.local_world_size
        if width == trained_bytes(run):
            return weights.total * width
        return (weights.total - weights.trained) * width + weights.trained * trained_bytes(run) * run.local_world_size

    @property
    def _offloaded_bytes(self) -> tuple[float, float]:
        """Bytes that offload keeps in a node's RAM between steps, and bytes of FSDP's gradients.

        The update frees FSDP's gradients. DeepSpeed's optimizer takes 18 bytes per trained
        parameter: 16 for an fp32 copy, gradient and two moments; and 2 for a 16-bit copy to send
        back to the GPU (stage_1_and_2.py). Parameter offload adds 2 bytes for every parameter.
        """
        share = self.run.local_world_size / self.run.world_size
        if self.kind == "fsdp" and self.offloads:  # the shards are the parameters; moments and gradients are in fp32
            kept = self._stored_bytes + 2 * FP32 * self.weights.trained
            return kept * share, FP32 * self.weights.trained * share
        states = 18 * self.weights.trained * share if self.offloads else 0
        parameters = HALF * self.weights.total * share if self.offloads_parameters else 0
        return states + parameters, 0

    @property
    def _saving_bytes(self) -> float:
        """Bytes of the copies of weights in RAM during a save.

        DeepSpeed below ZeRO-3 copies the whole model on all ranks (`Accelerator.get_state_dict`),
        though only rank 0 writes it. In all other cases only rank 0 copies weights from its GPU,
        and with adapters only the trained weights. ZeRO-3 and FSDP2 gather one parameter at a time.
        """
        if self.kind == "deepspeed" and self.stage < 3:
            return self.weights.total * weight_bytes(self.run) * self.run.local_world_size
        width = weight_bytes(self.run) if self.kind == "deepspeed" else trained_bytes(self.run)
        return self.weights.trained * width
