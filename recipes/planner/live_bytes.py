"""Counts the bytes of the tensors that are alive while code runs, after each operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.planner.shapes import Moment

# CUDA's caching allocator rounds up to this: kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp.
ALLOCATION_BYTES = 512


class LiveBytes(TorchDispatchMode):
    """Each storage counts once, from the operation that made it to its release.

    Tensors whose last dimension is `vocabulary` count as logits. `moments` holds one entry per
    operation: bytes of activations, logits and gradients.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.known: set[int] = set()
        self.live = self.logits = self.gradients = 0
        self.moments: list[Moment] = []

    def ignore(self, tensors: list[torch.Tensor]) -> None:
        """Do not count the storages of these tensors, which existed before."""
        self.known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def gradient(self, parameter: torch.Tensor) -> None:
        """Count the complete gradient of a parameter as a gradient, no longer as an activation."""
        self.gradients += _rounded(parameter.grad)
        self._look()

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is torch.ops.prim.device.default:  # the most frequent call
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        self._look()
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        size = _rounded(tensor)
        logits = size if self.vocabulary and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary else 0
        self.live += size
        self.logits += logits
        weakref.finalize(storage, self._release, key, size, logits)

    def _release(self, key: int, size: int, logits: int) -> None:
        self.known.discard(key)
        self.live -= size
        self.logits -= logits

    def _look(self) -> None:
        self.moments.append((self.live - self.logits - self.gradients, self.logits, self.gradients))


def _rounded(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage, rounded up as the allocator does."""
    return -(-tensor.untyped_storage().nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
