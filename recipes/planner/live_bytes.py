"""Counting the bytes of the tensors that are alive while something runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.planner.shapes import Moment

ALLOCATION_BYTES = 512  # what CUDA's caching allocator rounds up to: kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are alive. A storage counts once, from the operation that made it to its release."""

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.known: set[int] = set()
        self.live = self.logits = self.gradients = 0
        self.moments: list[Moment] = []

    def ignore(self, tensors: list[torch.Tensor]) -> None:
        """Storages that were there before."""
        self.known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def gradient(self, parameter: torch.Tensor) -> None:
        """Called when the gradient of a parameter is whole: from now on it is no activation."""
        self.gradients += _rounded(parameter.grad)
        self._look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # most calls ask for this
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
    """Bytes of a tensor's storage as the allocator hands them out."""
    return -(-tensor.untyped_storage().nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
