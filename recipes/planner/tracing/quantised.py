"""Weights in 4 bits, as bitsandbytes and peft have them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


class _Product4bit(torch.autograd.Function):
    """A product with a 4-bit matrix, unpacked for each use: MatMul4Bit of bitsandbytes."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(rows, torch.empty_like(weight), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return gradients[0] @ torch.empty_like(weight), None, None


class Linear4bit(torch.nn.Linear):
    """As Linear4bit of bitsandbytes: computes in its weight's dtype, returns its input's dtype."""

    stored: torch.dtype

    @property
    def W_q(self) -> torch.Tensor:
        """By this name peft's DoRA, which needs the norm of the whole matrix, asks to unpack it."""
        return self.weight

    def __deepcopy__(self, memo: dict) -> Linear4bit:
        """peft's DoRA makes a copy before it asks for that first."""
        return self

    def dequantize(self) -> torch.Tensor:
        """The matrix in the type that it had when it was packed."""
        return torch.empty_like(self.weight, dtype=self.stored)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _Product4bit.apply(rows.to(self.weight.dtype), self.weight, self.bias).to(rows.dtype)


def quantise(model: PreTrainedModel, compute: torch.dtype) -> None:
    """As loading in 4 bits and peft do: linear layers except the head in 4 bits, the rest fp32."""
    from transformers.pytorch_utils import Conv1D

    output, last = model.get_output_embeddings(), list(model.children())[-1]
    stored = model.dtype
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, (torch.nn.Linear, Conv1D)) or layer is output or layer is last:
            continue
        transposed = isinstance(layer, Conv1D)
        rows, columns = reversed(layer.weight.shape) if transposed else layer.weight.shape
        packed = Linear4bit(columns, rows, bias=layer.bias is not None, dtype=compute)
        packed.stored = stored
        packed.requires_grad_(False)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed)
    model.requires_grad_(False)
