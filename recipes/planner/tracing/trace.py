"""What one micro-batch of a model keeps in memory, found by running the model on fake tensors.

The real model runs forward and backward under torch's FakeTensorMode: shapes and lifetimes of
tensors are real, their memory is not allocated. This module imports torch and transformers, so the
planner imports it only when there is something to trace.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from recipes.planner.shapes import FROZEN, IN_4_BITS, TRAINED, Adapters, Case, Traced, Weights
from recipes.planner.tracing.attention import packaged_attention
from recipes.planner.tracing.further import Depths, depths, of_depth
from recipes.planner.tracing.liger import apply_liger
from recipes.planner.tracing.live_bytes import LiveBytes
from recipes.planner.tracing.operations import Operations
from recipes.planner.tracing.quantised import Linear4bit, quantise
from recipes.quiet import silence

_MOST_PIECES = 3


def trace(config: PreTrainedConfig, case: Case) -> Traced:
    """Run one micro-batch, or one batch of an evaluation, which has no backward.

    Raises whatever the model raises if it cannot run on fake tensors.
    """
    with silence(), FakeTensorMode(), packaged_attention(case.mask), _positions_in_order():
        model = _model(config, case)
        live = LiveBytes(vocabulary=config.get_text_config().vocab_size)
        live.ignore([*model.parameters(), *model.buffers()])
        inputs = _inputs(config, case)
        with contextlib.ExitStack() as stack:
            for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
                hook = parameter.register_post_accumulate_grad_hook(live.gradient)
                stack.callback(hook.remove)
            operations = stack.enter_context(Operations(case.on_cuda, case.capability))
            stack.enter_context(live)
            stack.enter_context(torch.set_grad_enabled(not case.evaluation))
            loss = _smoothed_loss(model, inputs) if case.label_smoothing else model(**inputs).loss
            forward, made_forward = len(live.moments), len(live.allocations)
            if not case.evaluation:
                loss.backward()
            allocations = list(live.allocations)  # before the model is freed
    return Traced(live.moments, forward, allocations, made_forward, frozenset(operations.kernels), live.operations)


def _smoothed_loss(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """As `Trainer.compute_loss` with `label_smoothing_factor`: the model is not given the labels.

    It computes outside autocast, in the dtype of the logits that the model returns. The factor
    itself has no influence on memory.
    """
    from transformers.trainer_pt_utils import LabelSmoother

    outputs = model(**{name: tensor for name, tensor in inputs.items() if name != "labels"})
    return LabelSmoother()(outputs, inputs["labels"], shift_labels=True)


@contextlib.contextmanager
def _positions_in_order() -> Iterator[None]:
    """Without a mask there is one sequence in a row.

    On fake tensors, whose numbers nobody knows, transformers expects several, and masks them apart.
    """
    with patch("transformers.masking_utils.find_packed_sequence_indices", lambda _: None):
        yield


def weigh(config: PreTrainedConfig, task: str, adapters: Adapters | None = None) -> Weights:
    """Count the parameters of a model on torch's meta device, which allocates none of them."""
    with silence(), torch.device("meta"):
        with no_init_weights():
            model = _auto_class(task).from_config(copy.deepcopy(config))
        model.tie_weights()
        if adapters:
            model = _with_adapters(model, adapters)
    layers = [layer for module in model.modules() if isinstance(module, torch.nn.ModuleList) for layer in module]
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    quantised = [module.weight for module in model.modules() if isinstance(module, Linear4bit)]
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
        layers=tuple(_count(layer.parameters()) for layer in _decoder_layers(model, config)),
        sizes=tuple((parameter.numel(), _kind(parameter, quantised)) for parameter in model.parameters()),
        matrices=tuple(
            (parameter.numel(), any(parameter is table for table in tables))
            for parameter in model.parameters()
            if parameter.requires_grad and parameter.dim() > 1
        ),
        file_width=_dtype_of(config).itemsize,
    )


def _dtype_of(config: PreTrainedConfig) -> torch.dtype:
    """What its files hold. `save_pretrained` leaves a name in the configuration of its model."""
    found = config.dtype or config.get_text_config().dtype or torch.float32
    return getattr(torch, found) if isinstance(found, str) else found


def _kind(parameter: torch.Tensor, quantised: list[torch.Tensor]) -> str:
    if parameter.requires_grad:
        return TRAINED
    return IN_4_BITS if any(parameter is one for one in quantised) else FROZEN


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _outermost(layers: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """The layers that are not inside another layer, as experts are."""
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}
    return [layer for layer in layers if id(layer) not in inner]


def _decoder_layers(model: torch.nn.Module, config: PreTrainedConfig) -> Iterable[torch.nn.Module]:
    """The layers of the part about text: none if no list has as many of them as it says."""
    count = getattr(config.get_text_config(), "num_hidden_layers", 0)
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
    return max(lists, key=lambda layers: _count(layers.parameters()), default=())


def _auto_class(task: str) -> type[AutoModelForCausalLM | AutoModelForSequenceClassification]:
    return AutoModelForSequenceClassification if task == "sequence_classification" else AutoModelForCausalLM


def _model(config: PreTrainedConfig, case: Case) -> torch.nn.Module:
    asked = {} if case.attention is None else {"attn_implementation": case.attention}
    config = copy.deepcopy(config)  # a model notes its dtype and its attention there
    with no_init_weights():  # some draw numbers until all are near enough, which fake ones never are
        model = _auto_class(case.task).from_config(config, dtype=getattr(torch, case.dtype), **asked)
    model.tie_weights()
    model.config.use_cache = model.config.get_text_config().use_cache = False  # as launch/training/model.py
    if case.liger:
        apply_liger(model, case.capability, with_loss=not case.label_smoothing)
    if case.adapters:
        if case.checkpointing:
            model.enable_input_require_grads()  # as launch/training/model.py does
        model = _with_adapters(model, case.adapters)
    model.train(not case.evaluation)
    if case.checkpointing:
        # A mode does not reach what autograd recomputes in the backward pass: enter it there too.
        def contexts() -> tuple[contextlib.AbstractContextManager, ...]:
            return contextlib.nullcontext(), Operations(case.on_cuda, case.capability)

        again = {"use_reentrant": False, "context_fn": contexts}
        model.gradient_checkpointing_enable(again)
    if case.autocast:
        for layer in model.modules():
            if case.adapters and case.adapters.four_bits and hasattr(layer, "cast_input_dtype_enabled"):
                layer.cast_input_dtype_enabled = False  # with autocast, peft casts inputs of ordinary layers only
        from accelerate.utils import convert_outputs_to_fp32  # as Accelerator.prepare_model wraps it

        dtype = getattr(torch, case.autocast)
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=dtype)(model.forward))
    return model


def _with_adapters(model: PreTrainedModel, adapters: Adapters) -> torch.nn.Module:
    """Add LoRA as launch/training/model.py does: the same weights frozen, cast and quantised."""
    from peft import LoraConfig, get_peft_model

    if adapters.four_bits:
        quantise(model, getattr(torch, adapters.four_bits))
    targets = adapters.targets if isinstance(adapters.targets, str) else list(adapters.targets)
    how = {"lora_dropout": adapters.dropout, "target_modules": targets, "use_dora": adapters.dora}
    lora = LoraConfig(r=adapters.rank, **how)
    with patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):  # fails on fake tensors
        wrapped = get_peft_model(model, lora)
    if not adapters.in_fp32:
        for parameter in filter(lambda parameter: parameter.requires_grad, wrapped.parameters()):
            parameter.data = parameter.data.to(model.dtype)
    return wrapped


def _inputs(config: PreTrainedConfig, case: Case) -> dict[str, torch.Tensor]:
    ids = torch.zeros(case.batch, case.length, dtype=torch.long)
    classifies = case.task == "sequence_classification"
    inputs = {"input_ids": ids, "labels": torch.zeros(case.batch, dtype=torch.long) if classifies else ids.clone()}
    if case.mask:
        inputs["attention_mask"] = torch.ones_like(ids)
    return inputs


# --- Shallow models -------------------------------------------------------------------------------


def depths_of(config: PreTrainedConfig, weights: Weights, pieces: int = 1) -> Depths | None:
    """Which shallow models stand for this one. Layers are as others of their type and size."""
    types = getattr(config.get_text_config(), "layer_types", None) or [None] * len(weights.layers)
    return depths(list(zip(types, weights.layers, strict=True)), pieces) if len(types) == len(weights.layers) else None


def trace_shallow(config: PreTrainedConfig, weights: Weights, case: Case, pieces: int = 1) -> tuple[Traced, int] | None:
    """The trace of a deep model from shallow ones, and how many pieces of repeated layers it took.

    One is not enough where the first or the last layer differs. None if layers do not repeat.
    """
    traces: dict[int, Traced] = {}
    for count in range(max(pieces, _least_pieces(case)), _MOST_PIECES + 1):
        found = depths_of(config, weights, count)
        if found is None:
            return None
        for layers in found[:2]:
            if layers not in traces:
                traces[layers] = trace(with_layers(config, layers), case)
        with contextlib.suppress(ValueError):
            return of_depth(traces[found.shallow], traces[found.deeper], found.times), count
    return None


def _least_pieces(case: Case) -> int:
    """Pieces with which every moment was found to be one of the whole model.

    Without checkpointing the last layer's backward pass, and with adapters the first one's, differ
    from others. In 16 bits without autocast the last layer's result is freed sooner.
    """
    in_16_bits = case.autocast is None and case.dtype != "float32"
    return 1 + (not case.checkpointing) + in_16_bits


def loop_unit(config: PreTrainedConfig, task: str) -> int | None:
    """Tokens that the shortest of three traces is to have, if the model loops over a sequence.

    Layers with a state do, by token or by chunks of 64, where no kernel of another package runs.
    None if the source of the model has no such loop.
    """
    known = _auto_class(task)._model_mapping
    classes = [known.get(type(part), None) for part in (config, config.get_text_config())]
    source = "".join(inspect.getsource(sys.modules[one.__module__]) for one in classes if isinstance(one, type))
    if re.search(r"for \w+ in range\(seq_len\)", source):
        return 8
    return (
        64
        if re.search(r"for \w+ in range\(num_(chunks|blocks)\)|in range\(\w*length // chunk_size\)", source)
        else None
    )


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
