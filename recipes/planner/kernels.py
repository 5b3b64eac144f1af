"""Stand-ins for GPU kernels and for packages, so that a trace on a CPU shows the GPU's memory.

Nothing here computes. Tensors have the shapes, dtypes and lifetimes that real kernels give them.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from recipes.planner.memory import EAGER, MATH, PACKAGED
from recipes.planner.regions import is_divided

_IN_16_BITS = (torch.bfloat16, torch.float16)
_F, _T = torch.nn.functional, torch.Tensor
# Operations of transformers' models that autocast runs in fp32 on CUDA, but not on a CPU. Source:
# "CUDA Ops that can autocast to float32" in the documentation of torch.amp.
_IN_FP32_ON_CUDA = {
    _F.log_softmax, torch.log_softmax, _T.log_softmax, _F.layer_norm,
    _F.group_norm, _F.cross_entropy, _F.nll_loss, _F.mse_loss, _F.l1_loss, _F.smooth_l1_loss, _F.softplus,
    torch.exp, _T.exp, torch.log, _T.log, torch.pow, _T.pow, _T.__pow__, torch.rsqrt, _T.rsqrt, torch.sum, _T.sum,
    torch.cumsum, _T.cumsum, torch.norm, _T.norm,
}  # fmt: skip
_SOFTMAX = {_F.softmax, torch.softmax, _T.softmax}
# Mixtures of experts call these functions. On fake tensors, torch's own versions refuse fp32.
_GROUPED_MATMULS = {_F.grouped_mm, torch._grouped_mm}


class Operations(TorchFunctionMode):
    """Let operations allocate as on a GPU of this capability, or as on a CPU if not `on_cuda`.

    `kernels` names the unfused attention that ran: torch's math kernel (MATH), or the model's own
    code (EAGER, only if it ran with gradients).
    """

    def __init__(self, on_cuda: bool = True, capability: tuple[int, int] = (8, 0)) -> None:
        super().__init__()
        self.on_cuda, self.capability = on_cuda, capability
        self.kernels: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _GROUPED_MATMULS and is_divided():
            raise NotImplementedError("torch.compile replaces the kernel of MoE experts by one whose memory is unknown")
        if func in _GROUPED_MATMULS:
            return _GroupedMatmul.apply(*args[:2])
        if not self.on_cuda:
            return func(*args, **kwargs)
        if func is _F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func in _SOFTMAX:
            return self._softmax(func, *args, **kwargs)
        if func is _F.dropout:
            return _dropout(*args, **kwargs)
        if func is torch.is_autocast_enabled and not (args or kwargs):
            return torch.is_autocast_enabled("cpu")  # torch would return the state of CUDA
        if func not in _IN_FP32_ON_CUDA or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        args = [_in_fp32(value) for value in args]
        kwargs = {name: _in_fp32(value) for name, value in kwargs.items()}
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)

    def _attention(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ) -> torch.Tensor:
        query, key, value = _as_autocast(query, key, value)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            (attn_mask,) = _as_autocast(attn_mask)
        if is_fused(self.capability, query, key, value, attn_mask, enable_gqa):
            return _fused(query, key, value, None if attn_mask is None else _as_bias(attn_mask, query))
        self.kernels.add(MATH)
        with torch.autocast("cpu", enabled=False):
            kept = (query, key, value, attn_mask, dropout_p, is_causal)
            return torch.ops.aten._scaled_dot_product_attention_math(*kept, enable_gqa=enable_gqa)[0]

    def _softmax(self, softmax: Callable, scores: torch.Tensor, *others: object, **named: object) -> torch.Tensor:
        """Allocate like softmax (function or method). `dim` does not change the memory."""
        if scores.dim() > 2 and scores.requires_grad:
            self.kernels.add(EAGER)
        if is_divided():
            return softmax(scores, *others, **named)
        asked = next((value for value in (*others, *named.values()) if isinstance(value, torch.dtype)), None)
        in_16_bits = scores.dtype in _IN_16_BITS
        autocast = torch.float32 if in_16_bits and torch.is_autocast_enabled("cpu") else scores.dtype
        return _Softmax.apply(scores, asked or autocast)


def _in_fp32(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.dtype in _IN_16_BITS:
        return value.float()
    return value


def _dropout(tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Use `native_dropout` if CUDA would. The mask takes one byte per element, for any dtype.

    Source: `is_fused_kernel_acceptable` of ATen/native/Dropout.cpp. With p = 1, CUDA keeps no mask.
    """
    if not training or not p or p == 1 or inplace:
        return torch.dropout_(tensor, p, training) if inplace else torch.dropout(tensor, p, training)
    return torch.native_dropout(tensor, p, training)[0]


class _Softmax(torch.autograd.Function):
    """Allocate as softmax does on CUDA: one kernel reads 16 bits and writes fp32, so that no fp32
    copy of the input is made.

    The backward (softmax_backward_cuda_out of ATen/native/cuda/SoftMax.cu) allocates the product
    `grad * output`, as large as the result. A CPU copies the input, but makes no such product.
    """

    @staticmethod
    def forward(ctx, scores, dtype):
        out = torch.empty_like(scores, dtype=dtype)
        ctx.save_for_backward(out)
        ctx.dtype = scores.dtype
        return out

    @staticmethod
    def backward(ctx, *gradients):
        result = torch.empty_like(gradients[0], dtype=ctx.dtype)
        torch.empty_like(gradients[0])
        return result, None


class _GroupedMatmul(torch.autograd.Function):
    """Multiply rows (tokens, in) by the experts' matrices (experts, in, out). Save both inputs."""

    @staticmethod
    def forward(ctx, rows, matrices):
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx, *gradients):
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if wanted else None for tensor, wanted in needed)


# --- Attention ------------------------------------------------------------------------------------


def is_fused(capability: tuple[int, int], query, key, value, mask=None, grouped: bool = False) -> bool:
    """True if a fused kernel (flash, efficient, cuDNN) supports the tensors. `grouped` allows GQA.

    All fused kernels save the same tensors. Source: select_sdp_backend of torch's sdp_utils.cpp.
    Flash needs capability 8.0, 16 bits, no mask, and equal head sizes of at most 256. The efficient
    kernel supports masks and needs aligned head sizes. It refuses bfloat16 below 8.0, and GQA up to
    torch 2.13 (with a later torch, plans are too high). cuDNN's kernel runs masked GQA in 16 bits
    on 9.x and 10.x. The math kernel runs the rest, for example GQA in fp32 and, below 8.0, GQA
    without a mask (with a mask, transformers repeats the heads).
    """
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    half = query.dtype in _IN_16_BITS
    modern = capability >= (8, 0)
    equal_heads = query.shape[-3] == key.shape[-3] == value.shape[-3]
    if query.dim() != 4 or not (equal_heads or grouped):
        return False
    if modern and half and mask is None and len(sizes) == 1 and max(sizes) <= 256:
        return True
    if not equal_heads:
        return mask is not None and half and capability[0] in (9, 10)  # cuDNN's kernel
    alignment = max(4 if modern else 1, (8 if half else 4) if modern or (half and capability[0] == 7) else 1)
    fits = query.shape[-1] == key.shape[-1] and not any(size % alignment for size in sizes)
    return fits and (modern or query.dtype != torch.bfloat16) and query.dtype != torch.float64


def _as_bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Convert a boolean mask to the queries' dtype, as each call of a fused kernel does.

    Source: convert_boolean_attn_mask of attention.cpp. If the length of a row is not a multiple of
    8, pad_bias of attention.cpp makes a second, padded copy for the kernel and the backward.
    """
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))
    if any(stride % 8 for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
    return mask


def _fused(query, key, value, bias) -> torch.Tensor:
    if is_divided():  # inductor orders queries by tokens, and therefore the result too
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    return attention(query, key, value, bias)[0]


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and the log-sum-exp of each query."""
    log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
    if query.shape[-1] == value.shape[-1]:
        return torch.empty_like(query), log_sum_exp
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2), log_sum_exp


def _attention_backward(
    gradient: torch.Tensor, saved: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value, and a tensor as large as all temporary tensors.
    16-bit kernels sum the queries' gradients in fp32. The flash kernel makes gradients of key and
    value for each query head, then sums those of a group. Source: mha_bwd of flash_api.cpp,
    workspace_size of mem_eff_attention/kernel_backward.h.
    """
    query, key, value, _, log_sum_exp, *_ = saved
    groups = query.shape[-3] // key.shape[-3]
    of_query = (query.dtype in _IN_16_BITS) * 4 + (groups > 1) * 2 * query.itemsize
    temporary = query.new_empty(log_sum_exp.nbytes + of_query * query.numel(), dtype=torch.uint8)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), temporary


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Save the tensors that a fused kernel saves, and its copy of the mask (derivatives.yaml)."""
    query, key, value, bias = inputs
    ctx.save_for_backward(query, key, value, *output, *([] if bias is None else [bias]))


def _gradients(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple:
    return *_backward(gradient, list(ctx.saved_tensors))[:3], None


# Custom operations, so that the partitioner of torch.compile sees which tensors the backward needs.
attention = torch.library.custom_op("accelerate_recipes::attention", _attention, mutates_args=())
_backward = torch.library.custom_op("accelerate_recipes::attention_backward", _attention_backward, mutates_args=())
attention.register_fake(_attention)
_backward.register_fake(_attention_backward)
attention.register_autograd(_gradients, setup_context=_keep)


@contextlib.contextmanager
def packaged_attention(padded: bool) -> Iterator[None]:
    """Register `attn_implementation=PACKAGED` with transformers inside the context.

    PACKAGED allocates like the package `flash-attn` and flex attention, which accept grouped heads
    and need no mask matrix. If `padded`, the inputs and the result are copied, as `_upad_input` and
    `pad_input` in transformers' modeling_flash_attention_utils.py do.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def packaged(module, query, key, value, *_, **__):
        query, key, value = _as_autocast(query, key, value)
        if padded:
            query, key, value = query.clone(), key.clone(), value.clone()
        out = _fused(query, key, value, None)
        return (out.clone() if padded else out).transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS[PACKAGED] = packaged
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[PACKAGED]


def _as_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype("cpu")) for tensor in tensors)


# --- Liger's kernels ------------------------------------------------------------------------------


def fuse_loss(model: Any, capability: tuple[int, int], copies: int) -> None:
    """Replace head and loss as liger-kernel 0.8.5 does, so that the full logits never exist.

    The rows hold `copies` equal batches, so Liger's chunks are `copies` times as long.
    """
    head = model.get_output_embeddings()
    weight, bias = head.weight, head.bias
    head.forward = lambda hidden: hidden
    model.loss_function = lambda logits, *_, **__: _Loss.apply(
        logits.reshape(-1, logits.shape[-1]), weight, bias, capability, copies
    )


def fuse_layers(model: Any) -> None:
    """Replace RMSNorm and the product of a gated MLP as liger-kernel 0.8.5 does (ops/rms_norm.py,
    ops/swiglu.py). `_rotary` in trace.py replaces rotary embeddings, which Liger computes in place.
    """
    for layer in model.modules():
        if type(layer).__name__.endswith("RMSNorm"):
            layer.forward = lambda rows, layer=layer: _Norm.apply(rows, layer.weight)
        elif all(hasattr(layer, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            layer.forward = lambda rows, layer=layer: layer.down_proj(
                _Gate.apply(layer.gate_proj(rows), layer.up_proj(rows))
            )


class _Norm(torch.autograd.Function):
    """Save input, weight and a number per row. The backward overwrites the result's gradient."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight, torch.empty(rows.shape[:-1], dtype=torch.float32))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0], torch.empty_like(ctx.saved_tensors[1])


class _Gate(torch.autograd.Function):
    """Save `gate`, before its activation, and `up`. Their gradients overwrite the saved tensors."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx, *gradients):
        return ctx.saved_tensors


class _Loss(torch.autograd.Function):
    """Allocate the logits of a few rows at a time, and all gradients in the forward.

    Source: Liger's ops/fused_linear_cross_entropy.py. `rows` has the shape (tokens, width). The
    gradients keep the dtypes of rows and head. From capability 8.0 on, a chunk's product is added
    to the head's gradient in place. Below 8.0, the product and its fp32 copy are allocated first.
    """

    @staticmethod
    def forward(ctx, rows, weight, bias, capability, copies):
        (tokens, width), words = rows.shape, weight.shape[0]
        of_one = -(-tokens // copies // -(-words // width))
        chunk = min(tokens, copies << (of_one - 1).bit_length())  # rounded up to a power of 2 per copy
        of_rows = torch.empty_like(rows)
        of_weight = torch.empty_like(weight) if weight.requires_grad else None
        of_bias = torch.empty_like(bias) if bias is not None else None
        losses = torch.empty(tokens, dtype=torch.float32)
        for _ in range(1 + (chunk < tokens)):  # two chunks: in the second, autocast holds a copy of the head
            logits = rows[:chunk] @ weight.t()
            torch.matmul(logits, weight)  # a result without a name is freed at once
            if of_weight is not None and capability < (8, 0):
                torch.matmul(logits.t(), rows[:chunk]).float()
            elif of_weight is not None and rows.dtype != logits.dtype:
                rows[:chunk].to(logits.dtype)
            del logits
        ctx.save_for_backward(of_rows, of_weight, of_bias)
        return losses.sum()

    @staticmethod
    def backward(ctx, *gradients):
        return *ctx.saved_tensors, None, None


# --- Layers with weights in 4 bits, as bitsandbytes computes them ---------------------------------


class _Product4bit(torch.autograd.Function):
    """Allocate like bitsandbytes' MatMul4Bit for many tokens: unpack the matrix at each use."""

    @staticmethod
    def forward(ctx, rows, weight, bias):
        ctx.save_for_backward(weight)
        return torch.nn.functional.linear(rows, torch.empty_like(weight), bias)

    @staticmethod
    def backward(ctx, *gradients):
        (weight,) = ctx.saved_tensors
        return gradients[0] @ torch.empty_like(weight), None, None


class Linear4bit(torch.nn.Linear):
    """Allocate like bitsandbytes' Linear4bit: compute in the weight's dtype, return the input's."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _Product4bit.apply(rows.to(self.weight.dtype), self.weight, self.bias).to(rows.dtype)


def quantise(model: PreTrainedModel, compute: torch.dtype) -> None:
    """Freeze the model, and put 4-bit layers in place of all linear layers except the head."""
    from transformers.pytorch_utils import Conv1D

    output, last = model.get_output_embeddings(), list(model.children())[-1]
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, (torch.nn.Linear, Conv1D)) or layer is output or layer is last:
            continue
        rows, columns = reversed(layer.weight.shape) if isinstance(layer, Conv1D) else layer.weight.shape
        model.set_submodule(name, Linear4bit(columns, rows, bias=layer.bias is not None, dtype=compute))
    model.requires_grad_(False)
