"""What to trace and what was found, as plain data. Without torch: the arithmetic reads it alone."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import NamedTuple

# The name under which attention.py registers kernels of other packages. Transformers would look for
# the package flash-attn if it had "flash" in it.
PACKAGED = "recipes_packaged"

# Attention that is not a fused kernel: it keeps batch x heads x length x length numbers in a layer.
EAGER, MATH = "eager", "math"

LOOP = "loop"  # over a sequence, in the model's own code
TRAINED, IN_4_BITS, FROZEN = "trained", "in 4 bits", "frozen"

Moment = tuple[int, int, int]  # bytes alive after one operation: activations, logits, gradients
Operation = tuple[str, int]  # its name, and how many allocations there were up to its end


class Allocation(NamedTuple):
    """A request for `size` bytes. Time is counted in allocations: this many were made before.

    It is freed at the time `freed`, None if it outlives the trace, and from the time `complete` on
    it is the gradient of a parameter, None if it never is.
    """

    size: int
    freed: int | None
    complete: int | None = None


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


@dataclass(frozen=True)
class Traced:
    """Bytes alive after each operation of one micro-batch, without parameters and buffers.

    Logits are the tensors whose last dimension is the vocabulary. Gradients are those of the
    parameters, each from the moment it is complete. Activations are everything else. The first
    `forward` moments, and `made_forward` of the `allocations`, lead up to the loss. There are no
    allocations if they are not known. `kernels` are the names of the attention kernels that ran.
    `operations` are those of the moments, if they are known.
    """

    moments: list[Moment]
    forward: int
    allocations: list[Allocation] = field(default_factory=list)
    made_forward: int = 0
    kernels: frozenset[str] = frozenset()
    operations: list[Operation] = field(default_factory=list)


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


@dataclass(frozen=True)
class Need:
    """What a run needs on each GPU, by component, and in the RAM of each node.

    `moment` is the one that needs most on the GPU: LOADING, TRAINING, UPDATE or EVALUATION.
    `varied_bytes` is what the process may come to take if lengths vary, 0 if that was not asked.
    """

    gpu: Components
    host_bytes_per_node: int
    moment: str = TRAINING
    varied_bytes: int = 0
