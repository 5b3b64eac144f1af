"""What one micro-batch of a model keeps in memory, found by running the model on fake tensors.

The real model runs forward and backward under torch's FakeTensorMode: shapes and lifetimes of
tensors are real, their memory is not allocated. This module imports torch and transformers, so the
planner imports it only when there is something to trace.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from recipes.planner.live_bytes import LiveBytes
from recipes.planner.shapes import ATTENTION, Adapters, Case, Moment, Traced, Weights
from recipes.quiet import silence


def trace(config: PreTrainedConfig, case: Case) -> Traced:
    """Run one micro-batch. Raises whatever the model raises if it cannot run on fake tensors."""
    with silence(), FakeTensorMode(), _attention_of_a_gpu():
        model = _model(config, case)
        live = LiveBytes(vocabulary=config.get_text_config().vocab_size)
        live.ignore([*model.parameters(), *model.buffers()])
        inputs = _inputs(config, case)
        with contextlib.ExitStack() as stack:
            for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
                hook = parameter.register_post_accumulate_grad_hook(live.gradient)
                stack.callback(hook.remove)
            stack.enter_context(_Operations(case.on_cuda))
            stack.enter_context(live)
            loss = model(**inputs).loss
            forward = len(live.moments)
            loss.backward()
    return Traced(live.moments, forward)


def weigh(config: PreTrainedConfig, task: str, adapters: Adapters | None = None) -> Weights:
    """Count the parameters of a model on torch's meta device, which allocates none of them."""
    with silence(), torch.device("meta"):
        model = _auto_class(task).from_config(config)
        if adapters:
            model = _with_adapters(model, adapters)
    layers = [layer for module in model.modules() if isinstance(module, torch.nn.ModuleList) for layer in module]
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    quantised = [module.weight for module in model.modules() if isinstance(module, _Linear4bit)]
    return Weights(
        total=_count(model.parameters()),
        trained=_count(parameter for parameter in model.parameters() if parameter.requires_grad),
        in_4_bits=_count(quantised),
        trained_embedding=_count(table for table in tables if table.requires_grad),
        largest_layer=max((_count(layer.parameters()) for layer in layers), default=0),
        largest_parameter=max(parameter.numel() for parameter in model.parameters()),
        looked_up=0 if getattr(config, "tie_word_embeddings", False) else model.get_input_embeddings().weight.numel(),
        outside_layers=_count(model.parameters()) - sum(_count(layer.parameters()) for layer in _outermost(layers)),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
    )


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _outermost(layers: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The layers that are not inside another layer, as experts are."""
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def _auto_class(task: str) -> type[AutoModelForCausalLM | AutoModelForSequenceClassification]:
    return AutoModelForSequenceClassification if task == "sequence_classification" else AutoModelForCausalLM


def _model(config: PreTrainedConfig, case: Case) -> torch.nn.Module:
    model = _auto_class(case.task).from_config(
        config, attn_implementation=case.attention, dtype=getattr(torch, case.dtype)
    )
    model.config.use_cache = False
    if case.adapters:
        if case.checkpointing:
            model.enable_input_require_grads()  # as launch/training/model.py does
        model = _with_adapters(model, case.adapters)
    model.train()
    if case.checkpointing:
        # A mode does not reach what autograd recomputes in the backward pass: enter it there too.
        again = {"use_reentrant": False, "context_fn": lambda: (contextlib.nullcontext(), _Operations(case.on_cuda))}
        model.gradient_checkpointing_enable(again)
    if case.autocast:
        from accelerate.utils import convert_outputs_to_fp32  # as Accelerator.prepare_model wraps it

        dtype = getattr(torch, case.autocast)
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=dtype)(model.forward))
    return model


def _with_adapters(model: PreTrainedModel, adapters: Adapters) -> torch.nn.Module:
    """Add LoRA as launch/training/model.py does: the same weights frozen, cast and quantised."""
    from peft import LoraConfig, get_peft_model

    if adapters.four_bits:
        _quantise(model, getattr(torch, adapters.four_bits))
    targets = adapters.targets if isinstance(adapters.targets, str) else list(adapters.targets)
    lora = LoraConfig(r=adapters.rank, lora_dropout=adapters.dropout, target_modules=targets)
    with patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):  # fails on fake tensors
        wrapped = get_peft_model(model, lora)
    if not adapters.in_fp32:
        for parameter in filter(lambda parameter: parameter.requires_grad, wrapped.parameters()):
            parameter.data = parameter.data.to(model.dtype)
    for layer in wrapped.modules():
        if adapters.four_bits and hasattr(layer, "cast_input_dtype_enabled"):
            layer.cast_input_dtype_enabled = False  # peft casts inputs of ordinary layers only
    return wrapped


def _inputs(config: PreTrainedConfig, case: Case) -> dict[str, torch.Tensor]:
    ids = torch.zeros(case.batch, case.length, dtype=torch.long)
    classifies = case.task == "sequence_classification"
    inputs = {"input_ids": ids, "labels": torch.zeros(case.batch, dtype=torch.long) if classifies else ids.clone()}
    if case.mask:
        inputs["attention_mask"] = torch.ones_like(ids)
    return inputs


# --- A few small traces instead of every large one ------------------------------------------------


def at_batch(two: Traced, three: Traced, batch: int) -> Traced:
    """The trace of `batch` sequences from those of two and three: each further one adds the same.

    One sequence runs slightly different operations than two: on the models in the tests, its
    extrapolation is at most 0.2 % off. Raises `ValueError` if the two ran different operations.
    """
    return Traced(_further(two.moments, three.moments, batch - 2), two.forward)


def _further(first: list[Moment], second: list[Moment], times: int) -> list[Moment]:
    """`first` plus `times` the difference between the two, moment by moment."""
    pairs = zip(first, second, strict=True)
    return [(a + (x - a) * times, b + (y - b) * times, c + (z - c) * times) for (a, b, c), (x, y, z) in pairs]


# Of a deep model with equal layers, only two shallow ones are traced: SHALLOW layers, and one more.
SHALLOW = 3


def layers_are_equal(config: PreTrainedConfig, weights: Weights, task: str, adapters: Adapters | None = None) -> bool:
    """Whether all layers of a deep model are of one type and have equally many parameters."""
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", 0)
    if layers <= SHALLOW + 1 or len(set(getattr(text, "layer_types", None) or [])) > 1:
        return False
    one, two = (weigh(with_layers(config, count), task, adapters).total for count in (SHALLOW, SHALLOW + 1))
    return weights.total == one + (two - one) * (layers - SHALLOW)


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The same configuration with fewer layers. Lists with one value per layer are cut to fit."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return config


def of_depth(shallow: Traced, deeper: Traced, layers: int) -> Traced:
    """The trace of `layers` equal layers from those of SHALLOW and SHALLOW + 1: each adds the same.

    Forward and backward each begin and end with operations outside the layers, so the two traces
    are aligned at both ends. In between memory grows or falls evenly: the maximum is at an end.
    Raises `ValueError` if the deeper model did more than run one further layer.
    """
    moments: list[Moment] = []
    forward = 0
    for half in (slice(None, shallow.forward), slice(shallow.forward, None)):
        deep_half = slice(half.start and deeper.forward, half.stop and deeper.forward)
        one, two = shallow.moments[half], deeper.moments[deep_half]
        shared = 2 * len(one) - len(two)  # the shallow trace without one layer
        if not len(one) > shared > 0:
            raise ValueError("a further layer runs different operations")
        moments += _further(one[:shared], two[:shared], layers - SHALLOW)
        moments += _further(one[-shared:], two[-shared:], layers - SHALLOW)
        forward = forward or len(moments)
    return Traced(moments, forward)


# --- Stand-ins where a CPU would run something else than a GPU ------------------------------------

_F, _T = torch.nn.functional, torch.Tensor
# Operations that autocast runs in fp32 on CUDA but not on a CPU: "CUDA Ops that can autocast to
# float32" in the documentation of torch.amp, limited to those that models of transformers call.
_IN_FP32_ON_CUDA = {
    _F.softmax, torch.softmax, _T.softmax, _F.log_softmax, torch.log_softmax, _T.log_softmax, _F.layer_norm,
    _F.group_norm, _F.cross_entropy, _F.nll_loss, _F.mse_loss, _F.l1_loss, _F.smooth_l1_loss, _F.softplus,
    torch.exp, _T.exp, torch.log, _T.log, torch.pow, _T.pow, _T.__pow__, torch.rsqrt, _T.rsqrt, torch.sum, _T.sum,
    torch.cumsum, _T.cumsum, torch.norm, _T.norm,
}  # fmt: skip


class _Operations(TorchFunctionMode):
    """Runs in fp32 what autocast runs in fp32 on CUDA only, and grouped products by their shapes.

    Dropout stays as on a CPU: its mask has the tensor's own type, where CUDA's kernel keeps one
    byte per element. With one byte, plans for the published readings of BERT come out 2 to 15 %
    low, without 2 to 6 % (tests/benchmarks/published.py). What else those readings hold is unknown.
    """

    def __init__(self, on_cuda: bool = True) -> None:
        super().__init__()
        self.on_cuda = on_cuda

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: Sequence = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _GROUPED_MATMULS:
            return _GroupedMatmul.apply(*args[:2])
        if func is torch.is_autocast_enabled and not (args or kwargs) and self.on_cuda:
            return torch.is_autocast_enabled("cpu")  # without a device, this asks about CUDA
        if not self.on_cuda or func not in _IN_FP32_ON_CUDA or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        args = [_in_fp32(value) for value in args]
        kwargs = {name: _in_fp32(value) for name, value in kwargs.items()}
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)


def _in_fp32(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value


# Mixtures of experts call these. On fake tensors torch's own version refuses fp32.
_GROUPED_MATMULS = {
    function
    for function in (getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
}


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


class _Linear4bit(torch.nn.Linear):
    """As Linear4bit of bitsandbytes: computes in its weight's dtype, returns its input's dtype."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return _Product4bit.apply(rows.to(self.weight.dtype), self.weight, self.bias).to(rows.dtype)


def _quantise(model: PreTrainedModel, compute: torch.dtype) -> None:
    """As loading in 4 bits and peft do: linear layers except the head in 4 bits, the rest fp32."""
    from transformers.pytorch_utils import Conv1D

    output, last = model.get_output_embeddings(), list(model.children())[-1]
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, (torch.nn.Linear, Conv1D)) or layer is output or layer is last:
            continue
        transposed = isinstance(layer, Conv1D)
        rows, columns = reversed(layer.weight.shape) if transposed else layer.weight.shape
        packed = _Linear4bit(columns, rows, bias=layer.bias is not None, dtype=compute)
        packed.requires_grad_(False)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed)
    model.requires_grad_(False)


class _FusedAttention(torch.autograd.Function):
    """Keeps what a fused kernel keeps: query, key, value, result, one fp32 log-sum-exp per query.

    On a CPU, scaled_dot_product_attention with dropout falls back to a version that keeps every
    attention weight.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, torch.empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _fused_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    groups = query.shape[1] // key.shape[1]
    if (
        groups > 1 and attention_mask is not None
    ):  # as transformers' sdpa_attention: without a mask, the kernel shares them
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return _FusedAttention.apply(query, key, value).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def _attention_of_a_gpu() -> Iterator[None]:
    """Register the fused attention with transformers, with the masks that sdpa takes."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _fused_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    yield
