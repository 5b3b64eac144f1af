"""What Liger's kernels keep, where they replace parts of a model: read in liger-kernel 0.8.5.

Only what lowers the memory is replaced: the loss, norms and gated products. Its rotary embedding
works in place, which is one tensor of one layer less for a moment.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch


def apply_liger(model: Any, capability: tuple[int, int], with_loss: bool = True) -> None:
    """Replace the loss, the norms, and gated products of layers that have a projection for each.

    Without `with_loss` the model makes its logits, as `lce_forward` does if it gets no labels.
    """
    if with_loss:
        _fuse_loss(model, capability)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            module.forward = MethodType(lambda self, rows: _Norm.apply(rows, self.weight), module)
        elif all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            module.forward = MethodType(_gated, module)


def _fuse_loss(model: Any, capability: tuple[int, int]) -> None:
    head = model.get_output_embeddings()
    weight, bias = head.weight, head.bias
    head.forward = lambda hidden: hidden  # no logits are made
    model.loss_function = lambda logits, *_, **__: _Loss.apply(
        logits.reshape(-1, logits.shape[-1]), weight, bias, capability
    )


def _gated(self: Any, rows: torch.Tensor) -> torch.Tensor:
    return self.down_proj(_Gated.apply(self.gate_proj(rows), self.up_proj(rows)))


class _Loss(torch.autograd.Function):
    """ops/fused_linear_cross_entropy.py: logits of some rows at a time, and all gradients at once.

    The gradients are those of the rows (tokens, width) and of the head, in their own dtypes. From
    8.0 on a product is added to the head's where it lies; before, it is made in fp32 first.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, capability: tuple[int, int]
    ) -> torch.Tensor:
        (tokens, width), words = rows.shape, weight.shape[0]
        chunk = min(tokens, _power_of_2(-(-tokens // -(-words // width))))
        of_rows = torch.empty_like(rows)
        of_weight = torch.empty_like(weight) if weight.requires_grad else None
        of_bias = torch.empty_like(bias) if bias is not None else None
        losses = torch.empty(tokens, dtype=torch.float32)
        logits = rows[:chunk] @ weight.t()
        product = logits @ weight
        del product
        if of_weight is not None and capability < (8, 0):
            product = logits.t() @ rows[:chunk]
            in_fp32 = product.float()
            del product, in_fp32
        elif of_weight is not None and rows.dtype != logits.dtype:
            cast = rows[:chunk].to(logits.dtype)
            del cast
        ctx.save_for_backward(*(one for one in (of_rows, of_weight, of_bias) if one is not None))
        ctx.has = of_weight is not None, of_bias is not None
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_rows, *others = ctx.saved_tensors
        has_weight, has_bias = ctx.has
        return of_rows, others.pop(0) if has_weight else None, others.pop(0) if has_bias else None, None


class _Norm(torch.autograd.Function):
    """ops/rms_norm.py: keeps its input and a number for each row.

    The backward writes into the gradient that it gets, but for Gemma and a few others, which take
    one tensor more: it is counted for all.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, torch.empty(rows.shape[:-1], dtype=torch.float32))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, weight, _ = ctx.saved_tensors
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return torch.empty_like(rows), of_weight


class _Gated(torch.autograd.Function):
    """ops/swiglu.py and geglu.py: keep both inputs, and write their gradients over them."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ctx.saved_tensors


def _power_of_2(number: int) -> int:
    """The next power of 2."""
    return 1 << (number - 1).bit_length()
