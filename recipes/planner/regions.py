"""The layers of a model as accelerate's regional compilation runs them, on fake tensors.

torch.compile divides each layer into a forward and a backward, and its min-cut partitioner chooses
the tensors that the forward keeps. Here the same partitioner divides the layers, and both halves
run operation by operation. A result that inductor would fuse into its consumer takes no memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils.other import is_repeated_blocks
from functorch.compile import aot_function, min_cut_rematerialization_partition  # type: ignore[import-untyped]
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

_aten = torch.ops.aten
# Operations that inductor fuses, besides elementwise ones.
_FUSED = {_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.cat, _aten.slice_scatter, _aten.full, _aten.where}
_divided: dict[str, Callable] = {}  # by kind of layer, the function that runs both halves


def is_divided() -> bool:
    """True while the operations of a layer are recorded for the partitioner."""
    return get_proxy_mode() is not None


def divided() -> int:
    """Return the number of distinct layers partitioned in this process."""
    return len(_divided)


def compile_layers(model: torch.nn.Module, kind: str) -> None:
    """Partition the forward of each layer in a list of equal layers. Skip lists inside a layer.

    Models of one `kind` differ only in their number of layers, and share the divided layers.
    """
    inner: set[torch.nn.Module] = set()
    for blocks in [module for module in model.modules() if is_repeated_blocks(module)]:
        for layer in blocks if blocks not in inner else ():
            layer.forward = _region(layer, kind)
            inner |= set(layer.modules())


def _region(layer: Any, kind: str) -> Callable:
    """Return a forward for `layer` that the partitioner divides, once for all equal layers."""
    forward = layer.forward

    def region(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        parameters = dict(layer.named_parameters())
        trained = [(name, one.shape, one.requires_grad) for name, one in parameters.items()]
        given = [(one.shape, one.dtype, one.requires_grad) for one in tensors]
        key = str((kind, layer, trained, structure, given))

        def run(parameters: dict[str, torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
            rest = iter(tensors)
            filled = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(filled, structure)
            with _reparametrize_module(layer, parameters):
                return forward(*args, **kwargs)

        if key not in _divided:
            how = {"partition_fn": min_cut_rematerialization_partition, "decompositions": select_decomp_table()}
            _divided[key] = aot_function(run, _compiled, _compiled, **how)
        return _divided[key](parameters, tensors)

    return region


# --- What inductor fuses --------------------------------------------------------------------------


def _compiled(half: torch.fx.GraphModule, inputs: list) -> Callable:
    """Return a function that runs the graph `half`. Fused operations only allocate a result."""
    for node in half.graph.nodes:
        value, written = node.meta.get("val"), _is_written(node)
        if isinstance(value, torch.Tensor) and (_is_fused(node) or (_is_view(node) and not written)):
            strides = value.stride() if written else None
            node.args, node.kwargs = (value.shape, strides, value.dtype, *node.all_input_nodes), {}
            node.target = _result
    return boxed_nop(half, inputs)


def _is_fused(node: torch.fx.Node) -> bool:
    operation: Any = node.target
    return torch.Tag.pointwise in getattr(operation, "tags", ()) or getattr(operation, "overloadpacket", None) in _FUSED


def _is_view(node: torch.fx.Node) -> bool:
    return getattr(node.target, "is_view", False)


def _is_written(node: torch.fx.Node) -> bool:
    """True if something outside of fused kernels reads the result or a view of the result."""
    return any(_is_written(user) if _is_view(user) else not _is_fused(user) for user in node.users)


def _result(shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, *_: object) -> torch.Tensor:
    """Return a fused kernel's result. Without `strides`, the result takes one number's memory."""
    return torch.empty_strided(shape, [0] * len(shape) if strides is None else strides, dtype=dtype)
