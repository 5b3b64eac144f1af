"""Attention as a GPU runs it: which kernel torch takes there, and what that keeps.

Nothing here computes. What is made has the shapes, dtypes and lifetimes that the kernels' have.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from recipes.planner.shapes import MATH, PACKAGED

_IN_16_BITS = (torch.bfloat16, torch.float16)


def alike(capability: tuple[int, int]) -> tuple[int, int]:
    """A compute capability for which `Sdpa.kernel` chooses as for this one, and Liger's loss too.

    Cards that are alike share their traces.
    """
    major = capability[0]
    if major == 12 or (8, 6) <= capability <= (8, 9):
        return 8, 9
    return {7: (7, 0), 8: (8, 0), 9: (9, 0), 10: (9, 0)}.get(major, capability)


class Sdpa:
    """scaled_dot_product_attention on a GPU of this compute capability.

    `used` are the names of the kernels that ran; `dropout` is that of a GPU.
    """

    def __init__(self, capability: tuple[int, int], dropout: Callable) -> None:
        self.capability, self.dropout = capability, dropout
        self.used: set[str] = set()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.dtype != torch.bool else attn_mask
        kernel = self.kernel(query, key, value, attn_mask, dropout_p, enable_gqa)
        self.used.add(kernel)
        if kernel == MATH:
            with torch.autocast("cpu", enabled=False):
                return self._math(query, key, value, attn_mask, dropout_p, is_causal)
        bias = _as_bias(attn_mask, query) if attn_mask is not None else None
        return _Fused.apply(query, key, value, bias)

    def kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        dropout: float = 0.0,
        grouped: bool = False,
    ) -> str:
        """The first kernel that takes these: select_sdp_backend of torch's cuda/sdp_utils.cpp.

        The flash kernel needs 8.0, 16 bits, equal head sizes of at most 256 (less to train on 8.6
        to 8.9 and 12), and no mask. The efficient one takes masks, head sizes by the alignment of
        its products, and before 8.0 no bfloat16; up to torch 2.13 it refuses groups of heads
        (later ones take them: then a plan is above the truth). So a card below 8.0 has only the
        math kernel for grouped heads without a mask (with one transformers repeats them), and for
        bfloat16, and every card has only that for grouped fp32. cuDNN's, which a 9.0 or 10.0
        prefers for the same shapes, keeps what the flash kernel keeps.
        """
        sizes = {tensor.shape[-1] for tensor in (query, key, value)}
        half = query.dtype in _IN_16_BITS
        modern = self.capability >= (8, 0)
        equal_heads = query.shape[-3] == key.shape[-3] == value.shape[-3]
        if query.dim() != 4 or not (equal_heads or grouped):
            return MATH
        if modern and half and mask is None and len(sizes) == 1 and self._flash_trains(max(sizes), dropout):
            return "flash"
        if not equal_heads:
            return MATH if mask is None or self.capability[0] not in (9, 10) or not half else "cudnn"
        alignment = max(4 if modern else 1, (8 if half else 4) if modern or (half and self.capability[0] == 7) else 1)
        fits = query.shape[-1] == key.shape[-1] and not any(size % alignment for size in sizes)
        if fits and (modern or query.dtype != torch.bfloat16) and query.dtype != torch.float64:
            return "efficient"
        return MATH

    def _flash_trains(self, size: int, dropout: float) -> bool:
        """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 of sdp_utils.cpp."""
        if (8, 6) <= self.capability <= (8, 9) or self.capability[0] == 12:
            return size <= 192 or (224 < size <= 256 and not dropout)
        return size <= 256

    def _math(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
    ) -> torch.Tensor:
        """_scaled_dot_product_attention_math of ATen/native/transformers/attention.cpp.

        It computes in fp32, scales queries and keys, repeats keys and values for groups of heads,
        and takes a softmax that gives 0 for rows without any key.
        """
        dtype, groups = query.dtype, query.shape[-3] // key.shape[-3]
        query, key, value = (tensor.float() if dtype in _IN_16_BITS else tensor for tensor in (query, key, value))
        query = query * 1.0
        if causal:
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))
        if groups > 1:
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        weights = _Safe.apply(query @ (key.transpose(-2, -1) * 1.0), mask)
        if dropout:
            weights = self.dropout(weights, dropout)
        in_asked_dtype = weights.to(dtype)  # the second result, which nobody takes
        result = (weights @ value).to(dtype)
        del in_asked_dtype
        return result


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The mask as the fused kernels take it: numbers in the queries' dtype, each call its own copy.

    convert_boolean_attn_mask of attention.cpp. pad_bias of that file copies it once more, for the
    kernel and the backward, where its rows are not a multiple of 8 long.
    """
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))
    if any(stride % 8 for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask


class _Fused(torch.autograd.Function):
    """Keeps what a fused kernel keeps: query, key, value, mask, result, log-sum-exp of each query.

    The mask is each layer's own copy (_scaled_dot_product_efficient_attention in derivatives.yaml
    saves it). On a GPU 16-bit kernels add up the queries' gradients in fp32, and in the flash
    kernel each head of a group has its own gradient of key and value before they are added up:
    mha_bwd of flash_api.cpp, workspace_size of mem_eff_attention/kernel_backward.h.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if query.shape[-1] == value.shape[-1]:
            out = torch.empty_like(query)
        else:
            batch, heads, length = query.shape[:3]
            out = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        log_sum_exp = torch.empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum_exp, *([] if bias is None else [bias]))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, _, log_sum_exp, *_ = ctx.saved_tensors
        delta = torch.empty_like(log_sum_exp)
        in_fp32 = torch.empty_like(query, dtype=torch.float32) if query.dtype in _IN_16_BITS else None
        groups = query.shape[-3] // key.shape[-3]
        each = [torch.empty_like(query) for _ in range(2)] if groups > 1 else None
        result = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
        del delta, in_fp32, each
        return result


class _Safe(torch.autograd.Function):
    """Scores plus a mask, in place, and torch's _safe_softmax (ATen/native/SoftMax.cpp) of them.

    That looks for rows without any key, which takes a byte for each score and a second result.
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        softmax, masked = torch.empty_like(scores), torch.empty_like(scores, dtype=torch.bool)
        out = torch.empty_like(scores)
        del softmax, masked
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        product = torch.empty_like(gradients[0])
        result = torch.empty_like(gradients[0])
        del product
        return result, None


def _packaged(padded: bool) -> Callable:
    """FlashAttention's own package, or flex attention: no mask as a matrix, heads in groups.

    Of padded rows it takes the tokens out, and puts the result back: `_upad_input` and `pad_input`
    of transformers' modeling_flash_attention_utils.py.
    """

    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, None]:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if padded:
            query, key, value = query.clone(), key.clone(), value.clone()
        out = _Fused.apply(query, key, value, None)
        return (out.clone() if padded else out).transpose(1, 2).contiguous(), None

    return attention


@contextlib.contextmanager
def packaged_attention(padded: bool) -> Iterator[None]:
    """Make `attn_implementation=PACKAGED` known to transformers."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS[PACKAGED] = _packaged(padded)
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[PACKAGED]
