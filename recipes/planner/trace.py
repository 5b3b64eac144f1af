"""The memory of one micro-batch of a model, found by running the model on fake tensors.

The real model runs forward and backward under torch's FakeTensorMode: shapes and lifetimes of
tensors are real, but no memory is allocated. This module imports torch and transformers, so the
planner imports this module only when there is a model to count or trace.
"""

import contextlib
import copy
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.initialization import no_init_weights

from recipes.planner.kernels import Linear4bit, Operations, fuse_layers, fuse_loss, packaged_attention, quantise
from recipes.planner.memory import (
    COMPILED,
    COMPLETE,
    FREED,
    FROZEN,
    IN_4_BITS,
    LOGITS,
    LOOP,
    NEVER,
    PACKAGED,
    SIZE,
    TRAINED,
    Adapters,
    Case,
    Traced,
    Weights,
)
from recipes.planner.regions import compile_layers, divided
from recipes.quiet import silence
from recipes.rules.data_and_model import freeze_parts_without_text

_DIFFERENT = "the two traces ran different operations"


# --- The bytes that are alive while code runs -----------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Record each storage once: the operation that allocates it, and the time when it is freed.

    Tensors, except vectors, count as logits if their last dimension is `vocabulary`. `allocations`
    has a row per storage, as in `Traced`. `made_by` has each row's operation and size.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.known: dict[int, int | None] = {}  # each storage's row in `allocations`, None for an ignored storage
        self.allocations: list[list[int]] = []
        self.made_by: list[tuple[str, int]] = []

    @property
    def moments(self) -> np.ndarray:
        """The bytes alive after each allocation so far, as in `Traced.moments`."""
        return Traced(np.array(self.allocations), 0).moments

    def ignore(self, tensors: list[torch.Tensor]) -> None:
        """Leave out the storages of these tensors, which existed before the trace."""
        self.known |= {tensor.untyped_storage()._cdata: None for tensor in tensors}

    def gradient(self, parameter: torch.Tensor) -> None:
        """Count the complete gradient of a parameter as a gradient, no longer as an activation."""
        if parameter.grad is not None:  # None if the backward gave this parameter no gradient
            self._note(COMPLETE, self.known.get(parameter.grad.untyped_storage()._cdata))

    def __torch_dispatch__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is torch.ops.prim.device.default:  # first, because it is the most frequent call
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


# --- One micro-batch, and the weights -------------------------------------------------------------


def trace(config: PreTrainedConfig, case: Case) -> Traced:
    """Trace one micro-batch, or one evaluation batch, which has no backward.

    Raises the model's own exception if the model cannot run on fake tensors.
    """
    # Without a mask, each row is one sequence. Fake tensors have no values, so transformers would
    # assume several sequences in a row and build a mask that separates them.
    in_order = patch("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)
    with silence(), FakeTensorMode(), packaged_attention(case.mask), in_order, _rotary(config, case):
        model = _model(config, case)
        live = LiveBytes(vocabulary=config.get_text_config().vocab_size)
        live.ignore([*model.parameters(), *model.buffers()])
        inputs = _inputs(case)
        operations = Operations(case.on_cuda, case.capability)
        before = divided()
        if case.compiled:
            compile_layers(model, str((case, with_layers(config, range(1)).to_json_string())))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(live.gradient)
        with operations, live, torch.set_grad_enabled(not case.evaluation):
            loss = model(**inputs).loss
            made_forward = len(live.allocations)
            if not case.evaluation:
                loss.backward()
            allocations = np.array(live.allocations)  # a copy: freeing the model changes `live`
    if divided() > before:
        return trace(config, case)  # again: dividing the layers made allocations of its own
    kernels = operations.kernels | ({COMPILED} if case.compiled else set())
    return Traced(allocations, made_forward, frozenset(kernels), live.made_by)


def _rotary(config: PreTrainedConfig, case: Case) -> contextlib.AbstractContextManager:
    """Return a context in which rotary embeddings allocate nothing if `liger_layers` is set."""
    module = sys.modules.get(getattr(_class(config, case.task), "__module__", ""))
    if not case.liger_layers or not hasattr(module, "apply_rotary_pos_emb"):
        return contextlib.nullcontext()
    return patch.object(module, "apply_rotary_pos_emb", lambda query, key, *_, **__: (query, key))


def weigh(config: PreTrainedConfig, task: str, adapters: Adapters | None = None) -> Weights:
    """Count the parameters of a model. torch's meta device builds the model without memory."""
    with silence(), torch.device("meta"):
        model = _of_config(config, task)
        if adapters:
            model = _with_adapters(model, adapters)
    modules, parameters = list(model.modules()), list(model.parameters())
    lists = [module for module in modules if isinstance(module, torch.nn.ModuleList)]
    layers = [layer for one in lists for layer in one]
    inner = {id(part) for layer in layers for part in layer.modules() if part is not layer}  # such as experts
    # The layers of the text model. There are none if no list has `num_hidden_layers` modules.
    count = getattr(config.get_text_config(), "num_hidden_layers", 0)
    decoder = max((one for one in lists if len(one) == count), key=_count, default=())
    tables = [module.weight for module in modules if isinstance(module, torch.nn.Embedding)]
    quantised = {id(module.weight) for module in modules if isinstance(module, Linear4bit)}

    def kind(parameter: torch.Tensor) -> str:
        return TRAINED if parameter.requires_grad else IN_4_BITS if id(parameter) in quantised else FROZEN

    sizes = tuple((parameter.numel(), kind(parameter)) for parameter in parameters)
    total = sum(size for size, _ in sizes)
    dtype = config.dtype or config.get_text_config().dtype or torch.float32  # may be a name, as in config.json
    return Weights(
        total=total,
        trained=sum(size for size, kind in sizes if kind == TRAINED),
        in_4_bits=sum(size for size, kind in sizes if kind == IN_4_BITS),
        trained_embedding=sum(table.numel() for table in tables if table.requires_grad),
        largest_layer=max(map(_count, layers), default=0),
        largest_parameter=max(size for size, _ in sizes),
        looked_up=0 if getattr(config, "tie_word_embeddings", False) else model.get_input_embeddings().weight.numel(),
        outside_layers=total - sum(_count(layer) for layer in layers if id(layer) not in inner),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        layers=tuple(map(_count, decoder)),
        sizes=sizes,
        matrices=tuple(one.numel() for one in parameters if one.requires_grad and one.dim() > 1),
        file_width=(getattr(torch, dtype) if isinstance(dtype, str) else dtype).itemsize,
    )


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _auto_class(task: str) -> type[AutoModelForCausalLM | AutoModelForSequenceClassification]:
    return AutoModelForSequenceClassification if task == "sequence_classification" else AutoModelForCausalLM


def _class(config: PreTrainedConfig, task: str) -> type | None:
    """Return transformers' model class for a task; None if there is none, as for remote code."""
    return _auto_class(task)._model_mapping.get(type(config), None)


def _of_config(config: PreTrainedConfig, task: str, **how: Any) -> torch.nn.Module:
    """Build the model of `config`. Use remote code only if the class of `config` is remote code."""
    own = type(config).__module__.startswith("transformers_modules.")
    config = copy.deepcopy(config)  # a model writes its dtype and attention into the configuration
    with no_init_weights():  # some models draw weights again until all are in range: endless on fake tensors
        model = _auto_class(task).from_config(config, trust_remote_code=own, **how)
    model.tie_weights()
    freeze_parts_without_text(model)
    return model


def _model(config: PreTrainedConfig, case: Case) -> torch.nn.Module:
    asked = {"attn_implementation": case.attention} if case.attention else {}
    model = _of_config(config, case.task, dtype=getattr(torch, case.dtype), **asked)
    model.config.use_cache = model.config.get_text_config().use_cache = False  # as in launch/training/model.py
    if case.liger:
        fuse_loss(model, case.capability, case.copies)
    if case.liger_layers:
        fuse_layers(model)
    if case.adapters:
        if case.checkpointing or case.compiled:  # compiled: so that one partition serves the first layer too
            model.enable_input_require_grads()  # as launch/training/model.py does with checkpointing
        model = _with_adapters(model, case.adapters)
    model.train(not case.evaluation)
    if case.checkpointing:
        # The backward recomputes the forward outside `Operations`, so it enters `Operations` again.
        def contexts() -> tuple[contextlib.AbstractContextManager, ...]:
            return contextlib.nullcontext(), Operations(case.on_cuda, case.capability)

        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    if case.autocast:
        for layer in model.modules():
            if case.adapters and case.adapters.four_bits and hasattr(layer, "cast_input_dtype_enabled"):
                layer.cast_input_dtype_enabled = False  # under autocast, peft does not cast inputs of 4-bit layers
        from accelerate.utils import convert_outputs_to_fp32  # as in Accelerator.prepare_model

        dtype = getattr(torch, case.autocast)
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", dtype=dtype)(model.forward))
    return model


def _with_adapters(model: torch.nn.Module, adapters: Adapters) -> torch.nn.Module:
    """Add LoRA as launch/training/model.py does, except that a classifier's head stays frozen."""
    from peft import LoraConfig, get_peft_model

    if adapters.four_bits:
        quantise(model, getattr(torch, adapters.four_bits))
    targets = adapters.targets if isinstance(adapters.targets, str) else list(adapters.targets)
    how = {"lora_dropout": adapters.dropout, "target_modules": targets, "use_dora": adapters.dora}
    lora = LoraConfig(r=adapters.rank, exclude_modules="|".join(freeze_parts_without_text(model)) or None, **how)
    with patch.object(torch.nn.Module, "to", lambda module, *_, **__: module):  # `to` fails on fake tensors
        wrapped = get_peft_model(model, lora)
    if not adapters.in_fp32:
        for parameter in filter(lambda parameter: parameter.requires_grad, wrapped.parameters()):
            parameter.data = parameter.data.to(model.dtype)
    return wrapped


def _inputs(case: Case) -> dict[str, torch.Tensor]:
    ids = torch.zeros(case.batch * case.copies, case.length, dtype=torch.long)
    labels = ids[:, 0] if case.task == "sequence_classification" else ids
    mask = {"attention_mask": torch.ones_like(ids)} if case.mask else {}
    return {"input_ids": ids, "labels": labels.clone(), **mask}


# --- Shallow models -------------------------------------------------------------------------------


def depths(kinds: Sequence[object], pieces: int = 1) -> tuple[range, range, int] | None:
    """Choose the layers of two shallow models, which are traced in place of a deep model.

    `kinds` has one entry per layer of the deep model. A piece (one layer, or six in Gemma 3)
    repeats up to the last layer. Other layers may come first, such as dense ones before experts.
    The first shallow model has `pieces` pieces, or two if a piece has several layers. The second
    has one piece more. Return the layers of both, and the number of pieces that the first lacks.
    Return None if no piece repeats, or if the second model would be as deep as the whole model.
    """
    found = []
    for period in range(1, len(kinds) // 3 + 1):
        before = len(kinds) - period
        while before and kinds[before - 1] == kinds[before - 1 + period]:
            before -= 1
        shallow = before + (len(kinds) - before) % period + period * (pieces if period == 1 else 2)
        if shallow + period < len(kinds):
            found.append((range(shallow), range(shallow + period), (len(kinds) - shallow) // period))
    return min(found, key=lambda one: len(one[1]), default=None)


def trace_any(config: PreTrainedConfig, weights: Weights, case: Case, times: float, known: dict) -> Traced:
    """Return the trace of `times` copies of a case's batch, for a model of any depth and length.

    Extrapolate from shallow models if layers repeat, and from three short lengths if the model
    loops over tokens, because a long loop takes minutes. A batch of shorter sequences holds more
    sequences, so that its number of tokens stays the same. A model that loops is not compiled.
    `known` caches the traces by case.
    """
    by_name = getattr(_class(config, case.task), "_supports_attention_backend", True)  # if not, PACKAGED is ignored
    attention = case.attention if by_name or case.attention != PACKAGED else None
    lengths = short_lengths(config, case)
    case = replace(case, attention=attention, compiled=case.compiled and not lengths)
    if lengths:
        shorter = [replace(case, length=length) for length in lengths]
        as_many = [trace_any(config, weights, one, times * case.length / one.length, known) for one in shorter]
        return _at_length(as_many, lengths, case.length)
    if case not in known:
        known[case] = trace_shallow(config, weights, case) or trace(config, case)
    return at_batch(known[case], case.copies, times)


def trace_shallow(config: PreTrainedConfig, weights: Weights, case: Case) -> Traced | None:
    """Extrapolate from traces of shallow models. None if no layers repeat, or if traces mismatch.

    Without checkpointing, the last layer's backward differs from the other layers'. In 16 bits
    without autocast, the last layer's result is freed sooner. For each of these reasons that
    applies, the shallow models get one more piece of layers, so that no moment of the deep model is
    underestimated.
    """
    types = getattr(config.get_text_config(), "layer_types", None) or [None] * len(weights.layers)
    if len(types) != len(weights.layers):
        return None
    kinds = list(zip(types, weights.layers, strict=True))
    in_16_bits = case.autocast is None and case.dtype != "float32"
    first = 1 + (not case.checkpointing) + in_16_bits
    tries = [depths(kinds, pieces) for pieces in range(first, 5)]
    if len({*types}) == 2 and len({*weights.layers}) == 1:
        # Sliding-window attention often takes as much memory as full attention. If two adjacent
        # layers of different kinds take equal memory, a piece is one layer, not a group of both.
        turns = [n for n in range(first, len(types) - 1) if types[n - 1] not in (types[n], types[0])]
        for end in turns[:1]:  # the layers from `start` to `end` are of both kinds
            start = min(end - first, end - 1 - types[:end][::-1].index(types[end]))
            tries.insert(0, (range(start, end), range(start, end + 1), len(types) - (end - start)))
    traces: dict[range, Traced] = {}
    for shallow, deeper, times in filter(None, tries):
        for layers in {shallow, deeper} - traces.keys():
            traces[layers] = trace(with_layers(config, layers), case)
        for share in (0.5, 0):  # two possible starts of the piece: the lifetimes may fit at only one of them
            with contextlib.suppress(ValueError):
                return _of_depth(traces[shallow], traces[deeper], times, share)
    return None


def short_lengths(config: PreTrainedConfig, case: Case) -> Sequence[int]:
    """Return three short lengths if the model loops over tokens and the case is longer, else ().

    Recurrent layers loop over tokens, or over chunks of 64, unless another package's kernels run.
    In an evaluation of less than 12 tokens, the many recurrent states would set the peak.
    """
    classes = [_class(part, case.task) for part in (config, config.get_text_config())]
    source = "".join(inspect.getsource(sys.modules[one.__module__]) for one in classes if isinstance(one, type))
    by_chunks = r"for \w+ in range\(num_(chunks|blocks)\)|in range\(\w*length // chunk_size\)"
    by_token = re.search(r"for \w+ in range\(seq_len\)", source)
    tokens = (12, 16, 20) if case.evaluation else (6, 8, 10)
    lengths = tokens if by_token else (128, 192, 256) if re.search(by_chunks, source) else ()
    return lengths if case.length > max(lengths, default=case.length) else ()


def with_layers(config: PreTrainedConfig, layers: range) -> PreTrainedConfig:
    """Return a copy of `config` with only these layers. Lists of a value per layer are cut too."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    before = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, value[layers.start : layers.stop])
    text.num_hidden_layers = len(layers)
    return config


# --- A few small traces instead of every large one ------------------------------------------------


def at_batch(traced: Traced, copies: int, times: float) -> Traced:
    """Return the trace of `times` copies of a batch, from the trace of `copies` copies.

    `copies` has no factor in common with a size of the model. So only an allocation that depends
    on the batch has a size that is a multiple of `copies`.
    """
    sizes = traced.allocations[:, SIZE]
    sizes = np.where(sizes % copies, sizes, np.rint(sizes // copies * times).astype(int))
    return replace(traced, allocations=np.column_stack((sizes, traced.allocations[:, SIZE + 1 :])))


def _at_length(three: Sequence[Traced], lengths: Sequence[int], length: int) -> Traced:
    """Extrapolate to another length from traces of three lengths with equally many tokens.

    A size is constant (most are), grows with the length (attention scores), or shrinks (the state
    of a sequence). The result has nine allocations. They are gradients, activations and logits at
    three peaks: of activations and logits together, of the total, and of gradients.
    """
    kinds = np.array([(1, one, 1 / one) for one in lengths])
    weights = np.linalg.solve(kinds.T, (1, length, 1 / length))
    found = np.zeros((3, 3))
    for weight, moments in zip(weights, (one.moments for one in three), strict=True):
        total, gradients = moments.sum(1), moments[:, 2]
        orders = (gradients, total - gradients), (gradients, total), (total, gradients)
        found += weight * np.stack([moments[np.lexsort(order)[-1]] for order in orders])
    rows, made_before = [], 0
    for place, (alive, logits, made) in zip((0, 3, 6), np.maximum(0, np.rint(found)), strict=True):
        freed = NEVER if place == 6 else place + 3
        rows += [(made - made_before, NEVER, place, 0), (alive, freed, NEVER, 0), (logits, freed, NEVER, 1)]
        made_before = made
    return Traced(np.maximum(0, rows).astype(int), made_forward=3, kernels=three[0].kernels | {LOOP})


def _of_depth(shallow: Traced, deeper: Traced, times: int, share: float) -> Traced:
    """Return the trace of `shallow` with `times` more pieces like the one that `deeper` adds.

    Forward and backward each hold one such piece in `shallow`, two in `deeper`, and `times` + 1 in
    the result. The piece may begin at several allocations: `share` selects one, from 0 (the
    earliest) to 1 (the latest). Raises `ValueError` if operations differ, or if a tensor's release
    time is not linear in the number of pieces and in the index of the piece that holds the tensor.
    """
    forward = deeper.made_forward - shallow.made_forward
    backward = len(deeper.allocations) - len(shallow.allocations) - forward
    around, more = (0, forward, backward, forward + backward), times - 1
    found = []
    for added, (one, made_one), (two, made_two) in zip(
        (forward, backward), _halves(shallow), _halves(deeper), strict=True
    ):
        if not len(two):  # an evaluation has no backward
            continue
        first = _first(made_one, made_two, share)
        last = first + added
        before, after, rest = two[:last], two[last : last + added], two[last + added :]
        before = before + _delay(one[:last], before, around) * more
        delay = _delay(two[first:last], after, (added, 0, -backward))
        found += [before[:first], *(before[first:] + delay * place for place in range(times + 1))]
        found.append(rest + _delay(one[last:], rest, around) * more)
    return Traced(np.concatenate(found), deeper.made_forward + more * forward, deeper.kernels)


def _halves(traced: Traced) -> Iterator[tuple[np.ndarray, Sequence[object]]]:
    """Yield the allocations of the forward, then of the backward, each with their operations."""
    for part in (slice(traced.made_forward), slice(traced.made_forward, None)):
        yield traced.allocations[part], traced.made_by[part]


def _first(one: Sequence[object], two: Sequence[object], share: float) -> int:
    """Return the index where `two` has added rows. Raises `ValueError` if there are none."""
    added = len(two) - len(one)
    earliest, latest = max(0, len(one) - _same(one[::-1], two[::-1])), _same(one, two) - added
    if added <= 0 or earliest > latest:
        raise ValueError(_DIFFERENT)
    return earliest + int((latest - earliest) * share)


def _same(one: Sequence[object], two: Sequence[object]) -> int:
    """Return how many entries, counted from the start, are the same in two sequences."""
    return next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _delay(one: np.ndarray, other: np.ndarray, possible: Sequence[int]) -> np.ndarray:
    """Return `other - one`. Raises `ValueError` for unequal sizes or delays not in `possible`."""
    delay = other - one
    if delay[:, [SIZE, LOGITS]].any() or not np.isin(delay[:, [FREED, COMPLETE]], possible).all():
        raise ValueError(_DIFFERENT)
    return delay
