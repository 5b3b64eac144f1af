"""Counts the bytes of the tensors that are alive while code runs, after each operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.planner.shapes import Allocation, Moment, Operation

# CUDA's caching allocator rounds up to this: kMinBlockSize in c10/cuda/CUDACachingAllocator.cpp.
ALLOCATION_BYTES = 512


class LiveBytes(TorchDispatchMode):
    """Each storage counts once, from the operation that made it to its release.

    Tensors whose last dimension is `vocabulary` count as logits. `moments` holds one entry per
    operation: bytes of activations, logits and gradients. `allocations` are those of the storages.
    `operations` names each operation, with the number of allocations up to its end.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.known: dict[int, int | None] = {}  # by storage, the number of its allocation
        self.allocations: list[Allocation] = []
        self.live = self.logits = self.gradients = 0
        self.moments: list[Moment] = []
        self.operations: list[Operation] = []

    def ignore(self, tensors: list[torch.Tensor]) -> None:
        """Do not count the storages of these tensors, which existed before."""
        self.known |= {tensor.untyped_storage()._cdata: None for tensor in tensors}

    def gradient(self, parameter: torch.Tensor) -> None:
        """Count the complete gradient of a parameter as a gradient, no longer as an activation."""
        self.gradients += _rounded(parameter.grad)
        number = self.known.get(parameter.grad.untyped_storage()._cdata)
        if number is not None:
            self.allocations[number] = self.allocations[number]._replace(complete=len(self.allocations))
        self._look("gradient")

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is torch.ops.prim.device.default:  # the most frequent call
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor)
        self._look(func.__name__)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known[key] = len(self.allocations)
        self.allocations.append(Allocation(storage.nbytes(), None))
        size = _rounded(tensor)
        logits = size if self.vocabulary and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary else 0
        self.live += size
        self.logits += logits
        weakref.finalize(storage, self._release, key, size, logits)

    def _release(self, key: int, size: int, logits: int) -> None:
        number = self.known.pop(key, None)
        if number is not None:
            self.allocations[number] = self.allocations[number]._replace(freed=len(self.allocations))
        self.live -= size
        self.logits -= logits

    def _look(self, operation: str) -> None:
        self.operations.append((operation, len(self.allocations)))
        self.moments.append((self.live - self.logits - self.gradients, self.logits, self.gradients))


def _rounded(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage, rounded up as the allocator does."""
    return -(-tensor.untyped_storage().nbytes() // ALLOCATION_BYTES) * ALLOCATION_BYTES
