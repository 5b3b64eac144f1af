"""Counts the bytes of the tensors that are alive while code runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.planner.shapes import COMPLETE, FREED, NEVER, traced_of


class LiveBytes(TorchDispatchMode):
    """Each storage counts once, from the operation that made it to its release.

    Tensors whose last dimension is `vocabulary` count as logits. `allocations` are rows as in
    `Traced`, and `made_by` the operation and the size of each.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.known: dict[int, int | None] = {}  # by storage, the number of its allocation
        self.allocations: list[list[int]] = []
        self.made_by: list[tuple[str, int]] = []

    @property
    def moments(self) -> list[list[int]]:
        """Bytes of activations, logits and gradients after each allocation."""
        return traced_of(np.array(self.allocations), 0).moments.tolist()

    def ignore(self, tensors: list[torch.Tensor]) -> None:
        """Do not count the storages of these tensors, which existed before."""
        self.known |= {tensor.untyped_storage()._cdata: None for tensor in tensors}

    def gradient(self, parameter: torch.Tensor) -> None:
        """Count the complete gradient of a parameter as a gradient, no longer as an activation."""
        self._note(COMPLETE, self.known.get(parameter.grad.untyped_storage()._cdata))

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is torch.ops.prim.device.default:  # the most frequent call
            return args[0].fake_device
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor, func.__name__)
        return out

    def count(self, tensor: torch.Tensor, operation: str = "") -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known[key] = len(self.allocations)
        size = storage.nbytes()
        is_logits = self.vocabulary and tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary
        self.allocations.append([size, NEVER, NEVER, int(bool(is_logits))])
        self.made_by.append((operation, size))
        weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self._note(FREED, self.known.pop(key, None))

    def _note(self, what: int, number: int | None) -> None:
        if number is not None:
            self.allocations[number][what] = len(self.allocations)
