"""What a run keeps in memory, by component: on each GPU, and in the RAM of each node.

Pure arithmetic on what a trace found, in bytes. Every constant and formula names its source.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from recipes.errors import mistake
from recipes.planner.context import context_of
from recipes.planner.shapes import (
    EVALUATION,
    LOADING,
    NOTHING,
    TRAINED,
    TRAINING,
    UPDATE,
    Components,
    Traced,
    Weights,
)
from recipes.rules.facts import fsdp_section, gradient_accumulation_kwargs, is_true
from recipes.run import RunSpec

HALF, FP32 = 2, 4

# DeepSpeed's defaults, in elements: deepspeed/runtime/zero/config.py. accelerate and Trainer keep
# them.
REDUCE_BUCKET = int(5e8)
MAX_LIVE_PARAMETERS = int(1e9)
SUB_GROUP = int(1e9)

# Bytes of a parameter in 4 bits: half a byte, and an fp32 scale per block of 64. Nested
# quantisation keeps these scales in 8 bits, with an fp32 scale per 256 of them.
# Source: quantize_4bit in bitsandbytes/functional.py.
IN_4_BITS, NF4, NF4_NESTED = 0.5, 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256)


# --- What the flags say ---------------------------------------------------------------------------


def recomputes(run: RunSpec) -> bool:
    """Whether activations are computed again in the backward pass: Trainer's way, or FSDP's own."""
    return bool(run["gradient_checkpointing"]) or (
        run.engine.kind == "fsdp" and is_true(fsdp_section(run).get("activation_checkpointing"))
    )


def syncs_each_micro_batch(run: RunSpec) -> bool:
    """Whether DDP and FSDP exchange gradients in every micro-batch, and not once a step."""
    return is_true(gradient_accumulation_kwargs(run).get("sync_each_batch"))


def mixed_precision(run: RunSpec) -> str | None:
    """The name of the 16-bit dtype that operations compute in, None in fp32."""
    return "bfloat16" if run["bf16"] else "float16" if run["fp16"] else None


def casts_the_model(run: RunSpec) -> bool:
    """Whether the parameters are cast for mixed precision, and no operation (`_prepare_fsdp2`)."""
    return run.engine.kind in ("deepspeed", "fsdp")


def loaded_bytes(run: RunSpec) -> int:
    return FP32 if run["dtype"] == "float32" else HALF


def weight_bytes(run: RunSpec) -> int:
    """Bytes of a parameter in use: DeepSpeed and FSDP2 cast it to 16 bits, autocast does not."""
    return HALF if casts_the_model(run) and mixed_precision(run) else loaded_bytes(run)


def trained_bytes(run: RunSpec) -> int:
    """Bytes of a trained parameter and of its gradient. Adapters are fp32 except with DeepSpeed.

    In mixed precision, accelerate makes trained parameters fp32 for FSDP2 (`fsdp2_prepare_model`).
    """
    mixed_fsdp = run.engine.kind == "fsdp" and mixed_precision(run)
    return FP32 if mixed_fsdp or (run["use_peft"] and run.engine.kind != "deepspeed") else weight_bytes(run)


def bytes_in_4_bits(run: RunSpec) -> float:
    """Bytes of a parameter in 4 bits, with its share of the scales."""
    return NF4_NESTED if run["use_bnb_nested_quant"] else NF4


def shards(run: RunSpec) -> int:
    """Processes that share one copy of the model's states: HSDP has several copies of them."""
    return run.world_size // run.engine.parallelism.replicate


# --- Optimizers -----------------------------------------------------------------------------------
#
# Read from the source of torch 2.13 (torch/optim), transformers 5.23 (trainer_optimizer.py, and
# Adafactor in optimization.py) and bitsandbytes 0.50 (backends/cpu/ops.py), and compared with real
# updates in tests/recipes/planner/test_optimizers.py. On a GPU bitsandbytes' updates are one kernel
# (backends/cuda/ops.py): they ask for nothing, and neither does torch's fused AdamW.

# Numbers that an optimizer keeps per trained parameter, by the start of `optim` without "paged_".
# Every other one keeps two, as Adam does. Adafactor keeps a row and a column of each matrix.
_MOMENTS = {"sgd": 0, "lomo": 0, "adalomo": 0, "adafactor": 0.01, "lion": 1, "adagrad": 1, "rmsprop": 1, "ademamix": 3}
_IN_8_BITS = 1 + FP32 / 256  # a byte, and an fp32 scale per block of 256: bitsandbytes (blockwise) and torchao
_IN_4_BITS = 0.5 + FP32 / 128  # torchao/optim/adam.py: blocks of 128

# Temporaries of an update, in copies of a parameter: without weight decay, and how many more with.
# Of all parameters at once, as torch's optimizers do it on a GPU (foreach):
_OF_ALL = {"adamw_torch": (1, 0), "adagrad": (2, 0), "rmsprop": (1, 1), "sgd": (0, 1)}
# Of one parameter after the other, on a CPU (_single_tensor_adamw and so on):
_OF_ONE = {"adamw_torch": (2, 0), "adagrad": (1, 1), "rmsprop": (1, 1), "sgd": (0, 1)}
# bitsandbytes' on a CPU, in fp32: those of Adam, and of Adam in 8 bits, which unpacks its moments.
_OF_BITSANDBYTES, _OF_BITSANDBYTES_IN_8_BITS = 3, 5


def moments_of(run: RunSpec) -> float:
    """Numbers that the optimizer keeps of each trained parameter."""
    optim = str(run["optim"])
    kept = next((count for name, count in _MOMENTS.items() if optim.removeprefix("paged_").startswith(name)), 2)
    if optim not in ("sgd", "rmsprop"):
        return kept
    words = (run["optim_args"] or "").replace(" ", "").split(",")
    given = dict(word.split("=") for word in words if word.count("=") == 1)
    return kept + (float(given.get("momentum", 0)) > 0) + (given.get("centered", "").lower() in ("true", "1", "yes"))


def few_bits(run: RunSpec) -> float | None:
    """Bytes of a number that the optimizer keeps in 8 or 4 bits, None for another optimizer."""
    optim = str(run["optim"])
    return _IN_8_BITS if "8bit" in optim else _IN_4_BITS if "4bit" in optim else None


def optimizer_bytes_per_parameter(run: RunSpec) -> float:
    """What the optimizer keeps of each trained parameter on all devices together, at least."""
    if in_few_bits := few_bits(run):
        return moments_of(run) * in_few_bits
    if run.engine.kind == "deepspeed":  # and fp32 copies of the parameters
        return FP32 + moments_of(run) * FP32
    in_fp32 = _of_bitsandbytes(run) or run["optim"] == "adafactor"
    return moments_of(run) * (FP32 if in_fp32 else trained_bytes(run))


def requests_of_update(run: RunSpec, weights: Weights, width: int) -> list[list[int]]:
    """Bytes that an update asks for, in groups: one group is freed when the next is asked for.

    `width`: bytes of a trained parameter. Of one parameter after the other, a loop keeps a
    temporary of the one before: `denom` of Adam, `update` of Adafactor. Trainer updates norms and
    biases apart, and they are small.
    """
    optim, decays = str(run["optim"]), run["weight_decay"] > 0
    if run.hardware.cuda and optim != "adafactor":
        copies, more = _OF_ALL.get(optim, (0, 0))
        trained = [size for size, kind in weights.sizes if kind == TRAINED] or [weights.trained]
        return [[size * width for size in trained] * (copies + decays * more)]
    matrices = weights.matrices or ((min(weights.trained, weights.largest_parameter), False),)
    if _of_bitsandbytes(run):
        copies = _OF_BITSANDBYTES_IN_8_BITS if few_bits(run) else _OF_BITSANDBYTES
        return [
            [FP32 * size * (_OF_BITSANDBYTES if table else copies) + (width < FP32) * FP32 * size]
            for size, table in matrices
        ]
    copies, more = (2 if width == FP32 else 4, 0) if optim == "adafactor" else _OF_ONE.get(optim, (0, 0))
    width = FP32 if optim == "adafactor" else width
    sizes = [size for size, _ in matrices]
    if not copies:
        return [[size * width] * (decays * more) for size in sizes]
    pairs = list(pairwise(sizes)) or [(sizes[0], 0)]
    return [[max(pair) * width] * (copies + decays * more) + [min(pair) * width] for pair in pairs]


def _of_bitsandbytes(run: RunSpec) -> bool:
    optim = str(run["optim"]).removeprefix("paged_")
    return optim.startswith(("lion", "ademamix", "rmsprop_bnb", "adamw_bnb", "adamw_8bit", "adamw_32bit"))


# --- On the GPU -----------------------------------------------------------------------------------


class Memory:
    """What a run keeps if each of its `accumulation` micro-batches keeps what was traced.

    `evaluation` is the trace of a batch of an evaluation, None without evaluations. `context` is
    what CUDA itself takes on a GPU, None for what is known of such a card. All sizes are bytes, and
    those of states are one GPU's.
    """

    def __init__(
        self,
        run: RunSpec,
        weights: Weights,
        micro_batch: Traced = NOTHING,
        accumulation: int = 1,
        evaluation: Traced | None = None,
        context: int | None = None,
    ) -> None:
        self.run, self.weights, self.kind = run, weights, run.engine.kind
        self.micro_batch, self.accumulation, self.evaluation = micro_batch, accumulation, evaluation
        self.context = context_of(run).bytes if context is None or not run.hardware.cuda else context
        self.stage = run.engine.zero_stage
        self.offloads = run.engine.offload_optimizer != "none"
        # Gradients become views of DDP's buckets when they are reduced, with the last micro-batch.
        self.viewed = run["gradient_as_bucket_view"] and run.world_size > 1 and not casts_the_model(run)

    @cached_property
    def _fullest(self) -> tuple[Components, str]:
        """Raises `UserError` for tensor parallelism."""
        if self.run.engine.parallelism.sharing > 1:
            what = "is not planned: how much of this model each process of a group holds is unknown"
            raise mistake("tensor_parallel", what, "recipes fit, which measures it")
        buffers = self.weights.buffer_bytes + self._bucket_bytes
        states = Components(parameters=self.parameters, optimizer=self.optimizer, buffers=buffers, context=self.context)
        # ZeRO-1 and ZeRO-2 have their bucket in the backward alone.
        after = states if self.stage not in (1, 2) else replace(states, buffers=self.weights.buffer_bytes)
        # Accumulated gradients exist beside the buckets that they become views of.
        beside = self.gradients if self.viewed and self.accumulation > 1 else 0
        # Weights in 4 bits are loaded onto each GPU as a whole, and sharded only then:
        # `fsdp2_prepare_model` shards them, or DeepSpeed, as transformers uses no `zero.Init` for
        # them (`get_init_context` of modeling_utils.py).
        whole = math.ceil(self._stored_bytes) if self.weights.in_4_bits else 0
        optimizer = states.optimizer + self.update
        found = {
            LOADING: Components(parameters=whole, context=self.context),
            TRAINING: _fullest(
                replace(states, buffers=buffers + beside), self._moments(self.micro_batch, self.accumulation)
            ),
            UPDATE: replace(after, gradients=self.gradients_in_update, optimizer=optimizer),
        }
        if self.evaluation:
            # Trainer has freed the gradients by then, but not the buckets that they are views of,
            # nor ZeRO-3 its flat ones.
            kept = self.gradients if self.stage == 3 or self.viewed else 0
            found[EVALUATION] = replace(_fullest(after, self._moments(self.evaluation, 1)), gradients=kept)
        moment = max(found, key=lambda name: found[name].total)
        return found[moment], moment

    def _moments(self, traced: Traced, accumulation: int) -> np.ndarray:
        """Rows of activations, logits, gradients, gathered parameters and buffers for sending."""
        moments = np.asarray(traced.moments)
        alive, logits, made = moments.T
        if self.kind != "fsdp":
            # Gradients appear one by one while activations are freed, unless all exist throughout:
            # with DeepSpeed, which moves each to a bucket at once, with bucket views, and with
            # accumulation.
            stays = self.kind == "deepspeed" or self.viewed or accumulation > 1
            gradients = np.full_like(made, self.gradients) if stays else made
            return np.stack((alive, logits, gradients, 0 * made, 0 * made), axis=1)
        done = made / max(1, made[-1])
        gathered, unscattered, sent = self.held(done, np.arange(len(done)) < traced.forward, logits > 0)
        scattered = self.gradients * done
        if accumulation > 1:  # of the micro-batches before
            whole = self.weights.trained * weight_bytes(self.run)
            scattered = (
                self.gradients + 0 * done if syncs_each_micro_batch(self.run) else scattered + whole * (1 - done)
            )
        return np.ceil(np.stack((alive, logits, scattered + unscattered, gathered, sent), axis=1))

    def held(self, done: np.ndarray, is_forward: np.ndarray, has_logits: np.ndarray) -> tuple[np.ndarray, ...]:
        """What FSDP2 holds while the share `done` of a micro-batch's gradients is complete:
        gathered parameters, whole gradients, and the buffers that they are scattered from.

        Read from the source of torch 2.13 and accelerate 1.15, and compared with the live bytes of
        real ranks by tests/benchmarks/sharded.py:

        - `fsdp2_prepare_model` (accelerate/utils/fsdp_utils.py) makes these units: each layer; the
          input embedding, unless it is tied to the head; the tail of last norm and head, which
          stays gathered from its forward to its backward. A tied embedding belongs to the tail,
          from the first operation.
        - A unit is gathered into one buffer, and copied from there into its parameters. In the
          forward the buffer stays until the next unit is copied (`wait_for_unshard` still has a
          name for it): three layers; in the backward the next unit's buffer is filled meanwhile
          (`FSDPParamGroup.wait_for_unshard` and `_backward_prefetch`). With one process there is
          nothing to gather, and no such buffer.
        - A unit's gradients are whole until its backward ends. The buffer that they are scattered
          from stays until the next unit has made its own (`FSDPParamGroup.post_backward`,
          `foreach_reduce`).
        - Without `sync_each_batch`, Trainer calls accelerate's `no_sync` for all micro-batches of a
          step but the last: gradients are then not scattered, and each GPU holds all of them.
        """
        weights, width, ranks = self.weights, weight_bytes(self.run), shards(self.run)
        in_layers = max(1, weights.total - weights.outside_layers)
        trains_all = bool(weights.trained_embedding)  # adapters are in the layers
        trained_in_layers = max(0, weights.trained - weights.outside_layers * trains_all)
        packed = weights.in_4_bits / in_layers
        layer = weights.largest_layer * (packed * IN_4_BITS + (1 - packed) * width)
        tail, table = (weights.outside_layers - weights.looked_up) * width, weights.looked_up * width
        of_layer = weights.largest_layer * width * trained_in_layers / in_layers
        of_tail, of_table, of_all = tail * trains_all, table * trains_all, weights.trained * width
        copies = 2 if ranks > 1 else 1  # of a unit while it is gathered: its buffer, and its parameters
        cast = layer / ranks if ranks > 1 else 0  # its shard in the dtype that it is gathered in, for a moment
        tied = not table
        always = tail if tied else 0
        made = done * of_all
        of_layers = np.maximum(0, made - (0 if tied else of_tail))  # a tied tail's are complete at the very end
        begun = of_layers % of_layer if of_layer else 0 * done
        sent_before = np.where(of_layers < of_layer, 0 if tied else of_tail, of_layer)
        cases = [is_forward & has_logits & (not tied), has_logits, is_forward, made > of_all - of_table]
        gathered = [copies * tail, tail + (copies - 1) * layer, always + (2 * copies - 1) * layer, always + table]
        last = always + copies * layer + np.maximum(0, cast - begun)
        return (
            np.select(cases, gathered, last),
            np.select(cases, [0 * done, np.minimum(made, of_tail), 0 * done, of_table + 0 * done], begun),
            np.select(cases, [0, 0, 0, of_layer], sent_before),
        )

    @property
    def gpu(self) -> Components:
        """What the run needs on each GPU at the fullest of its moments."""
        return self._fullest[0]

    @property
    def moment(self) -> str:
        """The one that needs most on the GPU: LOADING, TRAINING, UPDATE or EVALUATION."""
        return self._fullest[1]

    @property
    def _stored_bytes(self) -> float:
        """Bytes of the whole model in the dtypes that it is kept in between steps."""
        weights = self.weights
        frozen = (weights.total - weights.in_4_bits - weights.trained) * self.frozen_width
        return weights.in_4_bits * bytes_in_4_bits(self.run) + weights.trained * trained_bytes(self.run) + frozen

    @property
    def frozen_width(self) -> int:
        """Bytes of a parameter that is not trained, and not in 4 bits, in between steps."""
        if self.weights.in_4_bits and self.kind != "deepspeed":
            return FP32  # peft casts the rest
        # Shards of FSDP's frozen weights stay as they were loaded.
        return loaded_bytes(self.run) if self.kind == "fsdp" else weight_bytes(self.run)

    def _shard(self, size: float, from_stage: int) -> int:
        """One GPU's share of a state, rounded up. ZeRO shards it from this stage, FSDP2 always."""
        sharded = self.kind == "fsdp" or (self.kind == "deepspeed" and self.stage >= from_stage)
        return math.ceil(size / shards(self.run)) if sharded else math.ceil(size)

    @cached_property
    def parameters(self) -> int:
        stays = self.run.engine.offload_param == "none"
        if self.kind == "fsdp":  # each GPU has all scales of 4-bit weights: they are no parameters
            scales = self.weights.in_4_bits * (bytes_in_4_bits(self.run) - IN_4_BITS)
            return math.ceil(scales) + (self._shard(self._stored_bytes - scales, 3) if stays else 0)
        stored = self._shard(self._stored_bytes, 3)
        if self.stage < 3:
            return stored
        # What ZeRO-3 has fetched and not yet released. A layer of experts is fetched as a whole.
        gathered = min(self.weights.total, max(MAX_LIVE_PARAMETERS, self.weights.largest_layer))
        return gathered * weight_bytes(self.run) + (stored if stays else 0)

    @cached_property
    def gradients(self) -> int:
        """Bytes of the gradients that stay from one micro-batch to the next: offloaded ones go."""
        return 0 if self.offloads else self._shard(self.weights.trained * trained_bytes(self.run), 2)

    @cached_property
    def gradients_in_update(self) -> int:
        """Bytes of the gradients while the weights are updated.

        DeepSpeed makes one flat copy of this GPU's share, and one in fp32 of that (`step` of
        stage_1_and_2.py), ZeRO-3 of a billion parameters at a time. With ZeRO-1 the whole gradients
        are still there when the share is copied. Two ranks on a CPU hold just this.
        """
        width = weight_bytes(self.run)
        if self.kind != "deepspeed" or not self.gradients:
            return self.gradients
        copied = self.share * width + self._at_once * (width + (FP32 if width < FP32 else 0))
        return copied if self.stage > 1 else max(copied, self.gradients + self.share * width)

    @property
    def share(self) -> int:
        """Trained parameters that one GPU updates if they are shared."""
        return math.ceil(self.weights.trained / shards(self.run))

    @property
    def _at_once(self) -> int:
        return min(self.share, SUB_GROUP) if self.stage == 3 else self.share

    @cached_property
    def optimizer(self) -> int:
        if self.offloads:
            return 0
        # With bitsandbytes, Trainer keeps the moments of embeddings in fp32, with torchao not.
        stays_in_fp32 = few_bits(self.run) and not str(self.run["optim"]).startswith("adamw_torch")
        in_fp32 = self.weights.trained_embedding if stays_in_fp32 else 0
        kept = (self.weights.trained - in_fp32) * optimizer_bytes_per_parameter(self.run)
        return self._shard(kept + moments_of(self.run) * in_fp32 * FP32, 1)

    @cached_property
    def update(self) -> int:
        """What the update needs for a moment.

        DeepSpeed gives torch's optimizer one flat fp32 parameter, ZeRO-3 one for each billion.
        """
        if self.offloads:
            return 0
        weights, width = self.weights, trained_bytes(self.run)
        flat = self.kind == "deepspeed" and self.run["optim"] != "adafactor"
        if flat:
            weights, width = Weights(self._at_once, self._at_once, largest_parameter=self._at_once), FP32
        asked = max(sum(group) for group in requests_of_update(self.run, weights, width))
        return asked if flat else self._shard(asked, 1)

    @property
    def _bucket_bytes(self) -> int:
        if self.kind == "deepspeed":  # and a gradient on its way there
            return (REDUCE_BUCKET + self.weights.largest_parameter) * weight_bytes(self.run)
        if self.kind in ("single", "fsdp") or self.run.world_size == 1 or self.run["gradient_as_bucket_view"]:
            return 0
        return self.weights.trained * trained_bytes(self.run)  # DDP's buckets beside the gradients

    # --- In host RAM ------------------------------------------------------------------------------

    @cached_property
    def host_bytes(self) -> int:
        """Bytes of the RAM of the node that needs most, at the fullest of its moments."""
        kept, gradients = self._offloaded_bytes
        return round(max(self._loading_bytes, kept + gradients, kept + self._saving_bytes))

    @property
    def _loading_bytes(self) -> float:
        """The model while it is loaded, by all processes of a node.

        - ZeRO-3 makes each parameter in shards on the GPUs, and rank 0 alone maps the files
          (`_load_pretrained_model` of transformers 5.23), in their own dtype.
        - FSDP2: rank 0 reads and sends, unless `cpu_ram_efficient_loading` is off. But before that
          each process makes what is trained fp32 (`fsdp2_prepare_model`), also where nothing was
          read.
        - Weights in 4 bits: each process sends its own to its GPU.
        - Else each process has all of it.
        """
        run, weights = self.run, self.weights
        if weights.in_4_bits:
            return self._stored_bytes * (1 if self.kind == "fsdp" else run.local_world_size)
        if self.kind == "deepspeed" and self.stage == 3:
            return 0 if run["from_scratch"] else weights.total * weights.file_width
        width = loaded_bytes(run)
        reads_once = self.kind == "fsdp" and is_true(fsdp_section(run).get("cpu_ram_efficient_loading", True))
        if not reads_once:
            return weights.total * width * run.local_world_size
        if width == trained_bytes(run):
            return weights.total * width
        return (weights.total - weights.trained) * width + weights.trained * trained_bytes(run) * run.local_world_size

    @property
    def _offloaded_bytes(self) -> tuple[float, float]:
        """What offload keeps on a node from step to step, and FSDP's gradients, gone after the
        update.

        With DeepSpeed an offloaded parameter takes 18 bytes: fp32 copy, gradient and two moments,
        and a 16-bit copy to send back (deepspeed/runtime/zero/stage_1_and_2.py).
        """
        share = self.run.local_world_size / self.run.world_size
        if self.kind == "fsdp" and self.offloads:  # its shards are the parameters; moments and gradients are fp32
            kept = self._stored_bytes + 2 * FP32 * self.weights.trained
            return kept * share, FP32 * self.weights.trained * share
        states = 18 * self.weights.trained * share if self.offloads else 0
        parameters = HALF * self.weights.total * share if self.run.engine.offload_param != "none" else 0
        return states + parameters, 0

    @property
    def _saving_bytes(self) -> float:
        """Copies of weights in RAM while they are saved. A GPU sees one parameter at a time.

        ZeRO-1 and ZeRO-2 copy the whole model in every process (`Accelerator.get_state_dict`),
        though only rank 0 writes it. ZeRO-3 and FSDP2 gather it on rank 0, and safetensors copies
        it there from a GPU; of adapters without the frozen weights.
        """
        if self.kind == "deepspeed" and self.stage < 3:
            return self.weights.total * weight_bytes(self.run) * self.run.local_world_size
        width = weight_bytes(self.run) if self.kind == "deepspeed" else trained_bytes(self.run)
        return self.weights.trained * width


def _fullest(states: Components, moments: np.ndarray) -> Components:
    """These states at the moment that needs most."""
    activations, logits, gradients, gathered, sent = map(int, moments[moments.sum(1).argmax()])
    more = {"parameters": states.parameters + gathered, "buffers": states.buffers + sent}
    return replace(states, activations=activations, logits=logits, gradients=gradients, **more)
