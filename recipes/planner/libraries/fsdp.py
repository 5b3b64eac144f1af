"""What FSDP2 holds beside its shards, moment by moment of a micro-batch, in bytes on one GPU.

Read from the source of torch 2.13 and accelerate 1.15, and compared with the live bytes of real
ranks by tests/benchmarks/sharded.py:

- `fsdp2_prepare_model` (accelerate/utils/fsdp_utils.py) makes these units: each layer; the input
  embedding, unless it is tied to the head; the tail of last norm and head, which stays gathered
  from its forward to its backward. A tied embedding belongs to the tail, from the first operation.
- A unit is gathered into one buffer, and copied from there into its parameters. In the forward the
  buffer stays until the next unit is copied (`wait_for_unshard` still has a name for it): three
  layers; in the backward the next unit's buffer is filled
  meanwhile (`FSDPParamGroup.wait_for_unshard` and `_backward_prefetch`). With one process there is
  nothing to gather, and no such buffer.
- A unit's gradients are whole until its backward ends. The buffer that they are scattered from
  stays until the next unit has made its own (`FSDPParamGroup.post_backward`, `foreach_reduce`).
- Without `sync_each_batch`, Trainer calls accelerate's `no_sync` for all micro-batches of a step
  but the last: gradients are then not scattered, and each GPU holds all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.planner.shapes import Weights

IN_4_BITS = 0.5  # bytes of a weight in 4 bits, without scales

Held = tuple[float, float, float]  # gathered parameters, whole gradients, and the buffers for scattering


@dataclass(frozen=True)
class Units:
    """Bytes of a gathered layer, of the tail, and of an input embedding that is not in the tail.

    Then those of their gradients, and of all gradients. `copies` is how often a unit exists while
    it is gathered: in its buffer and in its parameters, or only there if nothing is gathered.
    `cast` is the shard of a layer in the dtype that it is gathered in, for a moment.
    """

    layer: float
    tail: float
    table: float
    layer_gradient: float
    tail_gradient: float
    table_gradient: float
    all_gradients: float
    tied: bool
    copies: int
    cast: float


def units(weights: Weights, width: int, shards: int) -> Units:
    """`width` is the bytes of a gathered parameter that is not in 4 bits."""
    in_layers = max(1, weights.total - weights.outside_layers)
    everything_trains = bool(weights.trained_embedding)  # adapters are in the layers
    trained_in_layers = max(0, weights.trained - weights.outside_layers * everything_trains)
    tail, table = weights.outside_layers - weights.looked_up, weights.looked_up
    packed = weights.in_4_bits / in_layers
    layer = weights.largest_layer * (packed * IN_4_BITS + (1 - packed) * width)
    return Units(
        layer=layer,
        tail=tail * width,
        table=table * width,
        layer_gradient=weights.largest_layer * width * trained_in_layers / in_layers,
        tail_gradient=tail * width * everything_trains,
        table_gradient=table * width * everything_trains,
        all_gradients=weights.trained * width,
        tied=not table,
        copies=2 if shards > 1 else 1,
        cast=layer / shards if shards > 1 else 0,
    )


def held(unit: Units, done: float, is_forward: bool, has_logits: bool) -> Held:
    """What is held while the share `done` of a micro-batch's gradients is complete.

    While there are logits, the tail is in use.
    """
    always = unit.tail if unit.tied else 0
    if is_forward and has_logits and not unit.tied:
        return unit.copies * unit.tail, 0, 0
    if has_logits:
        return unit.tail + (unit.copies - 1) * unit.layer, min(done * unit.all_gradients, unit.tail_gradient), 0
    if is_forward:
        return always + (2 * unit.copies - 1) * unit.layer, 0, 0
    two_layers = always + unit.copies * unit.layer
    made = done * unit.all_gradients
    if made > unit.all_gradients - unit.table_gradient:
        return always + unit.table, unit.table_gradient, unit.layer_gradient
    tail_gradient = 0 if unit.tied else unit.tail_gradient  # complete at the very end if it is tied
    of_layers = max(0, made - tail_gradient)
    begun = of_layers % unit.layer_gradient if unit.layer_gradient else 0
    sent_before = tail_gradient if of_layers < unit.layer_gradient else unit.layer_gradient
    return two_layers + max(0, unit.cast - begun), begun, sent_before
