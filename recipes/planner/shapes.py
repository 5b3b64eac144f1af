"""What to trace and what was found, as plain data. Without torch: the arithmetic reads it alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

# The name under which attention.py registers kernels of other packages. Transformers would look for
# the package flash-attn if it had "flash" in it.
PACKAGED = "recipes_packaged"

# Attention that is not a fused kernel: it keeps batch x heads x length x length numbers in a layer.
EAGER, MATH = "eager", "math"

LOOP = "loop"  # over a sequence, in the model's own code
CLOSED_FORM = "closed form"  # the model could not be traced: this is estimated from its shape
TRAINED, IN_4_BITS, FROZEN = "trained", "in 4 bits", "frozen"

# The columns of a trace's allocations. Time is counted in allocations, those that were made before.
# SIZE: bytes. FREED: when, NEVER if it outlives the trace. COMPLETE: since when it is a gradient
# of a parameter. LOGITS: 1 if its last dimension is the vocabulary.
SIZE, FREED, COMPLETE, LOGITS = range(4)
NEVER = 1 << 62
ROUNDING = 512  # torch's allocator rounds requests up to this: kMinBlockSize of CUDACachingAllocator.cpp


@dataclass(frozen=True)
class Weights:
    """Counts of a model's parameters, and the bytes of its buffers.

    total              all parameters
    trained            those with a gradient
    in_4_bits          those that are stored in 4 bits
    trained_embedding  those in embeddings that are trained
    largest_layer      those of the largest layer
    largest_parameter  those of the largest single tensor
    outside_layers     those in no layer: embeddings and the head
    looked_up          those of an input embedding that is not tied to the head: a lookup, no FLOPs
    layers             those of each layer, in order; none if it is not known which they are
    sizes              of each tensor of them: TRAINED, IN_4_BITS or FROZEN
    matrices           of each that is trained: its parameters, and whether it is an embedding
    file_width         bytes of a parameter in the model's files, fp32's if they are unknown
    """

    total: int
    trained: int
    in_4_bits: int = 0
    trained_embedding: int = 0
    largest_layer: int = 0
    largest_parameter: int = 0
    outside_layers: int = 0
    looked_up: int = 0
    buffer_bytes: int = 0
    layers: tuple[int, ...] = ()
    sizes: tuple[tuple[int, str], ...] = ()
    matrices: tuple[tuple[int, bool], ...] = ()
    file_width: int = 4


@dataclass(frozen=True)
class Adapters:
    """LoRA of rank `rank` on `targets`, or DoRA.

    `four_bits` is the name of the dtype that 4-bit base weights compute in, None without them.
    `in_fp32` is false if they compute in the weights' dtype: DeepSpeed and FSDP cast them too.
    """

    rank: int
    targets: tuple[str, ...] | str = "all-linear"
    dropout: float = 0.0
    four_bits: str | None = None
    in_fp32: bool = True
    dora: bool = False


@dataclass(frozen=True)
class Case:
    """One micro-batch to trace: `batch` sequences of `length` tokens.

    `dtype` (of the weights) and `autocast` are names of torch dtypes. `mask`: the batch is padded,
    or has several sequences in a row. `on_cuda`: operations keep what they keep on a GPU of this
    compute capability, not on a CPU. `attention` is transformers' name for it, None if it chooses,
    PACKAGED for FlashAttention's package and the like. `evaluation`: a forward without gradients,
    by a model in eval mode. `liger`: with the kernels of that package. `label_smoothing`: Trainer
    computes the loss of a language model from its logits.
    """

    batch: int
    length: int
    task: str = "causal_lm"
    dtype: str = "float32"
    autocast: str | None = None
    checkpointing: bool = False
    attention: str | None = None
    mask: bool = True
    adapters: Adapters | None = None
    on_cuda: bool = True
    evaluation: bool = False
    capability: tuple[int, int] = (8, 0)
    liger: bool = False
    label_smoothing: bool = False


@dataclass(frozen=True, eq=False)
class Traced:
    """What one micro-batch keeps, without parameters and buffers.

    `moments` are rows of the bytes alive: activations, logits and gradients of the parameters, each
    from the moment it is complete. The first `forward` moments, and `made_forward` of the
    `allocations`, lead up to the loss. There are no allocations if they are not known. `kernels`
    are the names of the attention kernels that ran. `made_by` names what made each allocation.
    """

    moments: np.ndarray
    forward: int
    allocations: np.ndarray = field(default_factory=lambda: np.empty((0, 4), int))
    made_forward: int = 0
    kernels: frozenset[str] = frozenset()
    made_by: Sequence[object] = ()


NOTHING = Traced(np.zeros((1, 3), int), forward=1)  # without activations and logits


def traced_of(
    allocations: np.ndarray,
    made_forward: int,
    kernels: frozenset[str] = frozenset(),
    made_by: Sequence[object] = (),
) -> Traced:
    """The trace with these allocations. It has two moments after each of them: before gradients
    that are complete then count as such, and after.
    """
    sizes, freed, complete, logits = allocations.T
    sizes = -(-sizes // ROUNDING) * ROUNDING
    end = len(sizes)

    def at(times: np.ndarray, change: np.ndarray) -> np.ndarray:
        """The sum of the changes up to each moment."""
        there = times <= end
        return np.bincount(times[there], change[there], end + 1).astype(int).cumsum()[1:]

    alive, wide = (part.cumsum() - at(freed + 1, part) for part in (sizes, sizes * logits))
    moments = np.empty((2 * end, 3), int)
    for place, gradients in enumerate((at(complete + 1, sizes), at(complete, sizes))):
        moments[place::2] = np.stack((alive - wide - gradients, wide, gradients), axis=1)
    return Traced(moments, 2 * made_forward, allocations, made_forward, kernels, made_by)


@dataclass(frozen=True)
class Components:
    """Bytes on one GPU at the moment of a step that needs most."""

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
    def reserved(self) -> int:
        """torch.cuda.max_memory_reserved: with what its allocator has cached."""
        return self.total - self.context

    @property
    def total(self) -> int:
        """What nvidia-smi shows of the process: with what CUDA itself takes."""
        return sum(getattr(self, field.name) for field in fields(self))


# The moments of a training that may need most on a GPU.
LOADING, TRAINING, UPDATE, EVALUATION = "loading", "training", "update", "evaluation"
