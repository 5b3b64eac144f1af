"""What to trace and what was found, as plain data. Without torch: the arithmetic reads it alone."""

from __future__ import annotations

from dataclasses import dataclass

# The name under which trace.py registers its fused attention. Transformers would look for the
# package flash-attn if it had "flash" in it.
ATTENTION = "recipes_traced"

Moment = tuple[int, int, int]  # bytes alive after one operation: activations, logits, gradients


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


@dataclass(frozen=True)
class Adapters:
    """LoRA of rank `rank` on `targets`.

    `four_bits` is the name of the dtype that 4-bit base weights compute in, None without them.
    `in_fp32` is false if they compute in the weights' dtype: DeepSpeed and FSDP cast them too.
    """

    rank: int
    targets: tuple[str, ...] | str = "all-linear"
    dropout: float = 0.0
    four_bits: str | None = None
    in_fp32: bool = True


@dataclass(frozen=True)
class Case:
    """One micro-batch to trace: `batch` sequences of `length` tokens.

    `dtype` (of the weights) and `autocast` are names of torch dtypes. `mask`: the batch has an
    attention mask. `on_cuda`: operations keep what they keep on a GPU, not on a CPU.
    """

    batch: int
    length: int
    task: str = "causal_lm"
    dtype: str = "float32"
    autocast: str | None = None
    checkpointing: bool = False
    attention: str = ATTENTION
    mask: bool = True
    adapters: Adapters | None = None
    on_cuda: bool = True


@dataclass(frozen=True)
class Traced:
    """Bytes alive after each operation of one micro-batch, without parameters and buffers.

    Logits are the tensors whose last dimension is the vocabulary. Gradients are those of the
    parameters, each from the moment it is complete. Activations are everything else. The first
    `forward` moments lead up to the loss.
    """

    moments: list[Moment]
    forward: int
