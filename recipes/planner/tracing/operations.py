"""Stand-ins where a CPU would run something else than a GPU, with what a GPU's kernels keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from recipes.planner.shapes import EAGER
from recipes.planner.tracing.attention import Sdpa

_F, _T = torch.nn.functional, torch.Tensor
# Operations that autocast runs in fp32 on CUDA but not on a CPU: "CUDA Ops that can autocast to
# float32" in the documentation of torch.amp, limited to those that models of transformers call.
_IN_FP32_ON_CUDA = {
    _F.log_softmax, torch.log_softmax, _T.log_softmax, _F.layer_norm,
    _F.group_norm, _F.cross_entropy, _F.nll_loss, _F.mse_loss, _F.l1_loss, _F.smooth_l1_loss, _F.softplus,
    torch.exp, _T.exp, torch.log, _T.log, torch.pow, _T.pow, _T.__pow__, torch.rsqrt, _T.rsqrt, torch.sum, _T.sum,
    torch.cumsum, _T.cumsum, torch.norm, _T.norm,
}  # fmt: skip
_SOFTMAX = {_F.softmax, torch.softmax, _T.softmax}
# Mixtures of experts call these. On fake tensors torch's own version refuses fp32.
_GROUPED_MATMULS = {
    function
    for function in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
}


class Operations(TorchFunctionMode):
    """Runs what a GPU of this compute capability runs; without one, what a CPU runs.

    `kernels` are the names of the attention kernels that ran, EAGER for the model's own code.
    """

    def __init__(self, on_cuda: bool = True, capability: tuple[int, int] = (8, 0)) -> None:
        super().__init__()
        self.on_cuda = on_cuda
        self.sdpa = Sdpa(capability, _dropout)

    @property
    def kernels(self) -> set[str]:
        return self.sdpa.used

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _GROUPED_MATMULS:
            return _GroupedMatmul.apply(*args[:2])
        if not self.on_cuda:
            return func(*args, **kwargs)
        if func is _F.scaled_dot_product_attention:
            return self.sdpa(*args, **kwargs)
        if func in _SOFTMAX:
            return self._softmax(*args, **kwargs)
        if func is _F.dropout:
            return _dropout(*args, **kwargs)
        if func is torch.is_autocast_enabled and not (args or kwargs):
            return torch.is_autocast_enabled("cpu")  # without a device, this asks about CUDA
        if func not in _IN_FP32_ON_CUDA or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        args = [_in_fp32(value) for value in args]
        kwargs = {name: _in_fp32(value) for name, value in kwargs.items()}
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)

    def _softmax(self, scores: torch.Tensor, *others: object, **named: object) -> torch.Tensor:
        """softmax(scores, dim, dtype) in its forms: memory does not depend on the dimension."""
        if scores.dim() > 2 and scores.requires_grad:
            self.kernels.add(EAGER)
        asked = next((value for value in (*others, *named.values()) if isinstance(value, torch.dtype)), None)
        in_16_bits = scores.dtype in (torch.bfloat16, torch.float16)
        autocast = torch.float32 if in_16_bits and torch.is_autocast_enabled("cpu") else scores.dtype
        return _Softmax.apply(scores, asked or autocast)


def _in_fp32(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


def _dropout(tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """native_dropout, which CUDA runs: its mask has a byte per element, and not the tensor's type.

    `is_fused_kernel_acceptable` of ATen/native/Dropout.cpp; with p of 1 there is no mask.
    """
    if not training or not p or p == 1 or inplace:
        return torch.dropout_(tensor, p, training) if inplace else torch.dropout(tensor, p, training)
    return torch.native_dropout(tensor, p, training)[0]


class _Softmax(torch.autograd.Function):
    """As CUDA's kernels: one reads 16 bits and writes fp32, without a copy in between.

    The backward (softmax_backward_cuda_out of ATen/native/cuda/SoftMax.cu) makes `grad * output`,
    as large as the result. A CPU makes the copy, and not the product.
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty_like(scores, dtype=dtype)
        ctx.save_for_backward(out)
        ctx.dtype = scores.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = torch.empty_like(gradients[0], dtype=ctx.dtype)
        torch.empty_like(gradients[0])
        return result, None


class _GroupedMatmul(torch.autograd.Function):
    """Each row (tokens, in) times one of the matrices (experts, in, out); keeps both."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if wanted else None for tensor, wanted in needed)
